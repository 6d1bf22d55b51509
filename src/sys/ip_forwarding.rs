//! IP forwarding between interfaces: the settings in `/proc/sys/net`, as the kernel's ip-sysctl documentation
//! describes them.

use std::io;

use super::root::Root;

const IPV4: &str = "/proc/sys/net/ipv4/conf";
const IPV6: &str = "/proc/sys/net/ipv6/conf";
/// Entries that are no interface, or none by which a packet comes from elsewhere.
const NOBODY: [&str; 3] = ["all", "default", "lo"];

/// Returns whether IPv4 packets that arrive on any interface are forwarded. Each interface has its own
/// setting, and `net.ipv4.ip_forward` sets all of them.
///
/// # Errors
/// If /proc/sys cannot be read.
pub fn ipv4(root: &Root) -> io::Result<bool> {
    any_interface(root, IPV4, "forwarding")
}

/// The same of IPv6, where one setting is for all interfaces (`net.ipv6.conf.all.forwarding`). Kernels from 6.17 on know exceptions.
///
/// # Errors
/// If /proc/sys cannot be read.
pub fn ipv6(root: &Root) -> io::Result<bool> {
    let all = root.read(&format!("{IPV6}/all/forwarding"))?;
    Ok(all.trim_ascii() != b"0" || any_interface(root, IPV6, "force_forwarding")?)
}

/// Returns whether any interface has this setting enabled.
fn any_interface(root: &Root, folder: &str, setting: &str) -> io::Result<bool> {
    for entry in root.path(folder).read_dir()? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().filter(|name| !NOBODY.contains(name)) else { continue };
        // An interface may go meanwhile.
        if !matches!(root.line(&format!("{folder}/{name}/{setting}")).as_str(), "" | "0") {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn one_interface_is_enough_for_ipv4_and_none_for_ipv6() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(ipv4(&root).is_err() && ipv6(&root).is_err());
        let set = |name: &str, value: &str| {
            let path = folder.path().join("proc/sys/net").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{value}\n")).unwrap();
        };
        for name in ["all", "default", "lo"] {
            set(&format!("ipv4/conf/{name}/forwarding"), "1");
        }
        set("ipv4/conf/eth0/forwarding", "0");
        assert!(!ipv4(&root).unwrap());
        set("ipv4/conf/virbr0/forwarding", "1");
        assert!(ipv4(&root).unwrap());

        set("ipv6/conf/all/forwarding", "0");
        set("ipv6/conf/eth0/forwarding", "1");
        assert!(!ipv6(&root).unwrap());
        set("ipv6/conf/eth0/force_forwarding", "1");
        assert!(ipv6(&root).unwrap());
        set("ipv6/conf/eth0/force_forwarding", "0");
        set("ipv6/conf/all/forwarding", "2");
        assert!(ipv6(&root).unwrap());
    }
}
