//! What udev knows about a device: its database in /run/udev/data.

use crate::sys::block::Number;
use crate::sys::root::Root;

/// What udev keeps about a block device; nothing where no udev runs.
pub fn block_device(root: &Root, (major, minor): Number) -> Option<Vec<u8>> {
    root.read(&format!("/run/udev/data/b{major}:{minor}")).ok()
}

/// The value of a property in an entry of the database, a line `E:NAME=value`; none if it is empty.
pub fn property<'a>(entry: &'a [u8], name: &str) -> Option<&'a str> {
    let value = entry
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"E:")?.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    std::str::from_utf8(value).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of a disk in a Debian 12 guest, shortened.
    const CAPTURED: &[u8] = b"S:disk/by-path/pci-0000:00:06.0\nS:disk/by-id/virtio-data-1\nI:2143861\n\
        E:ID_SERIAL=data-1\nE:ID_SERIAL_SHORT=\nE:ID_PATH=pci-0000:00:06.0\nG:systemd\nQ:systemd\nV:1\n";

    #[test]
    fn captured_entry() {
        assert_eq!(property(CAPTURED, "ID_SERIAL"), Some("data-1"));
        assert_eq!(property(CAPTURED, "ID_SERIAL_SHORT"), None);
        assert_eq!(property(CAPTURED, "ID"), None);
        assert_eq!(property(CAPTURED, "systemd"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>, value in "[^\n]{1,9}") {
            let entry = [&bytes, "\nE:ANY_NAME=".as_bytes(), value.as_bytes()].concat();
            prop_assert!(property(&entry, "ANY_NAME").is_some());
            prop_assert_eq!(property(&bytes, "ANY_NAME"), None);
        }
    }
}
