//! The serial number that a disk has itself, for machines without udev.

use crate::sys::block::whole;
use crate::sys::root::Root;
use crate::sys::vital_product_data;

/// Returns the serial number of the disk that the block device at `place` is, or is a partition of. For some
/// types the kernel queries the disk, so this may take as long as the disk does.
pub fn read(root: &Root, place: &str) -> Option<String> {
    let disk = whole(place);
    let line = |file: &str| Some(root.line(&format!("{disk}/{file}"))).filter(|line| !line.is_empty());
    let page = |file: &str, parse: fn(&[u8]) -> Option<String>| {
        root.read(&format!("{disk}/device/{file}")).ok().and_then(|page| parse(&page))
    };
    // virtio-blk; NVMe and MMC; SCSI and what speaks it: SATA, USB, virtio-scsi.
    line("serial")
        .or_else(|| line("device/serial"))
        .or_else(|| page("vpd_pg80", unit_serial))
        .or_else(|| page("vpd_pg83", vendor_identifier))
}

/// Page 80h of SCSI's vital product data: a serial number.
pub fn unit_serial(page: &[u8]) -> Option<String> {
    vital_product_data::serial(page).and_then(printable)
}

/// Page 83h: the identifier of the disk that its vendor gave it as text, as which QEMU shows `device_id`.
pub fn vendor_identifier(page: &[u8]) -> Option<String> {
    vital_product_data::designation(page).text.and_then(printable)
}

fn printable(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?.trim_matches(|end: char| end == '\0' || end.is_whitespace());
    (!text.is_empty() && !text.contains(char::is_control)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_of_scsi_disks() {
        assert_eq!(unit_serial(b"\0\x80\0\x08 data-1 "), Some("data-1".into()));
        assert_eq!(unit_serial(b"\0\x80\0\x09data-1"), None);
        assert_eq!(unit_serial(b"\0\x80\0\0"), None);
        // An NAA identifier, then the text.
        let page = b"\0\x83\0\x16\x01\x03\0\x08\x50\0\0\0\0\0\0\x01\x02\0\0\x06ua-vol";
        assert_eq!(vendor_identifier(page), Some("ua-vol".into()));
        assert_eq!(vendor_identifier(&page[..20]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            for serial in [unit_serial(&bytes), vendor_identifier(&bytes)].into_iter().flatten() {
                prop_assert!(!serial.is_empty() && serial.len() <= bytes.len());
            }
        }
    }
}
