//! Operating system and kernel of this guest.

use std::env;
use std::io;

use nix::sys::utsname::uname;

use crate::sys::os_release;
use crate::sys::root::Root;

/// Running kernel; see uname(2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Kernel release, such as `6.1.0-30-cloud-amd64`.
    pub release: String,
    /// Kernel version, such as `#1 SMP PREEMPT_DYNAMIC Debian 6.1.124-1 (2025-01-12)`.
    pub version: String,
    /// Hardware name, such as `x86_64`.
    pub machine: String,
}

/// Returns the running kernel.
///
/// # Errors
/// The errors of uname(2), which has none on Linux.
pub fn kernel() -> io::Result<Kernel> {
    let name = uname()?;
    Ok(Kernel {
        release: name.release().to_string_lossy().into_owned(),
        version: name.version().to_string_lossy().into_owned(),
        machine: name.machine().to_string_lossy().into_owned(),
    })
}

/// Returns the contents of os-release(5) from the first of its two paths; empty if neither can be read.
///
/// The environment variable `QGA_OS_RELEASE` names another file, as it does for qemu-ga.
pub fn os_release(root: &Root) -> OsRelease {
    let file = match env::var("QGA_OS_RELEASE") {
        Ok(path) => root.read(&path),
        Err(_) => root.read("/etc/os-release").or_else(|_| root.read("/usr/lib/os-release")),
    };
    OsRelease(file.unwrap_or_default())
}

/// Contents of an os-release(5) file.
#[derive(Debug, Clone)]
pub struct OsRelease(Vec<u8>);

impl OsRelease {
    /// Returns the value of `key`, such as `PRETTY_NAME`.
    pub fn get(&self, key: &str) -> Option<String> {
        os_release::value(&self.0, key)
    }
}
