//! Detection of confidential VMs, which are protected from their own hypervisor: AMD SEV, Intel TDX, Arm CCA,
//! Secure Execution of s390.
//!
//! To add a technology, add the path where the kernel shows it to `SHOWN`, or its leaf of CPUID.

use crate::sys::root::Root;

/// Paths that exist in such a guest only. The first two are made by kernel drivers, which may not be loaded.
const SHOWN: [(&str, &str); 4] = [
    ("/sys/devices/virtual/misc/sev-guest", "AMD SEV-SNP"),
    ("/sys/devices/virtual/misc/tdx_guest", "Intel TDX"),
    ("/sys/devices/system/cpu/sev", "AMD SEV-SNP"),
    ("/sys/devices/platform/arm-cca-dev", "Arm CCA"),
];
/// Holds 1 in such a guest.
const SECURE_EXECUTION: &str = "/sys/firmware/uv/prot_virt_guest";

/// The name of what protects this guest's memory from the host.
pub fn technology(root: &Root) -> Option<&'static str> {
    if let Some((_, name)) = SHOWN.into_iter().find(|(path, _)| root.path(path).exists()) {
        return Some(name);
    }
    if root.line(SECURE_EXECUTION) == "1" {
        return Some("IBM Secure Execution");
    }
    // The kernel itself sets this flag, when it knows.
    let processors = root.read("/proc/cpuinfo").unwrap_or_default();
    let flags = processors.split(|byte| *byte == b'\n').find(|line| line.starts_with(b"flags"));
    if flags.is_some_and(|flags| flags.split(|byte| *byte == b' ').any(|flag| flag == b"tdx_guest")) {
        return Some("Intel TDX");
    }
    root.is_the_machine().then(of_the_processor).flatten()
}

/// SEV before SNP shows no file, but QEMU shows its leaf of CPUID to no other guest.
#[cfg(target_arch = "x86_64")]
fn of_the_processor() -> Option<&'static str> {
    use std::arch::x86_64::__cpuid;

    const FEATURES: u32 = 1;
    const UNDER_A_HYPERVISOR: u32 = 1 << 31;
    const HIGHEST: u32 = 0x8000_0000;
    const ENCRYPTED_MEMORY: u32 = 0x8000_001f;
    const SEV: u32 = 1 << 1;

    // Up to Rust 1.9x it was unsafe, for processors without the instruction: none of this architecture.
    #[allow(unused_unsafe)]
    // SAFETY: every processor of x86-64 has CPUID.
    let leaf = |leaf| unsafe { __cpuid(leaf) };
    let is_guest = leaf(FEATURES).ecx & UNDER_A_HYPERVISOR != 0;
    let has_leaf = leaf(HIGHEST).eax >= ENCRYPTED_MEMORY;
    (is_guest && has_leaf && leaf(ENCRYPTED_MEMORY).eax & SEV != 0).then_some("AMD SEV")
}

#[cfg(not(target_arch = "x86_64"))]
fn of_the_processor() -> Option<&'static str> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_technology_is_seen_by_what_it_shows() {
        for (path, text, expected) in [
            ("/etc/hostname", "vm", None),
            ("/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sev tdx_guests\n", None),
            ("/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu tdx_guest vme\n", Some("Intel TDX")),
            ("/sys/firmware/uv/prot_virt_guest", "0\n", None),
            ("/sys/firmware/uv/prot_virt_guest", "1\n", Some("IBM Secure Execution")),
            ("/sys/devices/virtual/misc/sev-guest/dev", "10:1", Some("AMD SEV-SNP")),
            ("/sys/devices/system/cpu/sev/vmpl", "0", Some("AMD SEV-SNP")),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let root = Root::at(folder.path());
            let file = root.path(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            #[allow(clippy::disallowed_methods)]
            std::fs::write(file, text).unwrap();
            assert_eq!(technology(&root), expected, "{path}: {text}");
        }
    }
}
