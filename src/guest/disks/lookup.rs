//! Finds the disk that a selector means, by its identity and never by a guess. Pure.

use std::fmt;
use std::sync::Arc;

use crate::guest::disks::identity::{KnownDisk, Serial};
use crate::sys::vital_product_data::trim;

/// Limit on the candidates that an error names.
const NAMED: usize = 8;

/// Property by which a disk is looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// Serial number, in full. Where a disk has no room for all of it, its beginning: 20 bytes for virtio-blk, 36
    /// for QEMU's SCSI disks. A beginning is accepted only if no disk has the number in full.
    Serial(String),
    /// World-wide name, with or without the prefix `naa.`, `eui.` or `0x`.
    Wwn(String),
    /// Text of page 83h, in full.
    Alias(String),
    /// Device name given by the kernel, such as `vda` or `/dev/vda`: for people, who look at the present state.
    Name(String),
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Serial(serial) => write!(formatter, "the serial number {serial:?}"),
            Self::Wwn(name) => write!(formatter, "the world-wide name {name:?}"),
            Self::Alias(alias) => write!(formatter, "the alias {alias:?}"),
            Self::Name(name) => write!(formatter, "the name {name:?}"),
        }
    }
}

/// Reasons why no disk was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// No disk matches.
    #[error("no disk has {0}")]
    NotFound(Selector),
    /// Several disks match.
    #[error("{} disks have {selector}: {}", .candidates.len(), list(.candidates))]
    Ambiguous {
        /// Selector of the look-up.
        selector: Selector,
        /// Names of the disks, with what distinguishes them.
        candidates: Vec<String>,
    },
    /// The selector cannot identify a disk.
    #[error("{selector} {why}")]
    Unusable {
        /// Selector of the look-up.
        selector: Selector,
        /// Reason why it is unusable.
        why: &'static str,
    },
}

fn list(candidates: &[String]) -> String {
    let mut list = candidates.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    if candidates.len() > NAMED {
        list.push_str("; …");
    }
    list
}

/// Returns the one disk that the selector means.
///
/// # Errors
/// If no disk matches, or more than one.
pub fn find(disks: &[Arc<KnownDisk>], selector: &Selector) -> Result<Arc<KnownDisk>, FindError> {
    usable(selector).map_err(|why| FindError::Unusable { selector: selector.clone(), why })?;
    match matching(disks, selector).as_slice() {
        [] => Err(FindError::NotFound(selector.clone())),
        [disk] => Ok(Arc::clone(disk)),
        several => Err(FindError::Ambiguous {
            selector: selector.clone(),
            candidates: several.iter().map(|disk| describe(disk)).collect(),
        }),
    }
}

/// Returns all disks that may be meant by a selector that is [usable].
pub fn matching<'a>(disks: &'a [Arc<KnownDisk>], selector: &Selector) -> Vec<&'a Arc<KnownDisk>> {
    let chosen =
        |test: &dyn Fn(&KnownDisk) -> bool| disks.iter().filter(|disk| test(disk)).collect::<Vec<_>>();
    match selector {
        Selector::Serial(wanted) => {
            let exact = chosen(&|disk| is_whole(disk, selector));
            let wanted = trim(wanted.as_bytes());
            if exact.is_empty() { chosen(&|disk| begins(disk, wanted)) } else { exact }
        }
        Selector::Wwn(wanted) => {
            let wanted = bare(wanted);
            chosen(&|disk| disk.wwn.as_deref().is_some_and(|name| bare(name) == wanted))
        }
        Selector::Alias(wanted) => chosen(&|disk| disk.alias.as_deref() == Some(wanted.trim())),
        Selector::Name(wanted) => chosen(&|disk| disk.name == *wanted || disk.file == *wanted),
    }
}

/// Returns whether a matching disk reports all of the selector's value, and not only the beginning of a serial
/// number. A disk that reports less may be a different one, and is never formatted.
pub fn is_whole(disk: &KnownDisk, selector: &Selector) -> bool {
    match selector {
        Selector::Serial(wanted) => {
            let wanted = trim(wanted.as_bytes());
            disk.serials.iter().any(|serial| *serial.value == *wanted)
        }
        Selector::Wwn(_) | Selector::Alias(_) | Selector::Name(_) => true,
    }
}

/// Returns whether the disk has room for only the beginning of the serial number, and reports the rest nowhere
/// else.
fn begins(disk: &KnownDisk, wanted: &[u8]) -> bool {
    let goes_on =
        |cut: &Serial| disk.serials.iter().any(|other| !other.cut && other.value.starts_with(&cut.value));
    let is_beginning = |serial: &Serial| {
        let room = serial.room();
        serial.cut
            && wanted.len() > room
            && wanted.get(..room).is_some_and(|part| trim(part) == &*serial.value)
            && !goes_on(serial)
    };
    disk.serials.iter().any(is_beginning)
}

/// Checks a selector for values that no disk, or any disk, could have.
///
/// # Errors
/// The reason why the selector is unusable.
pub fn usable(selector: &Selector) -> Result<(), &'static str> {
    let text = match selector {
        Selector::Serial(text) | Selector::Alias(text) | Selector::Name(text) => text.trim(),
        Selector::Wwn(text) => bare_text(text),
    };
    if text.is_empty() {
        return Err("is empty");
    }
    if text.contains(char::is_control) {
        return Err("has a control character in it");
    }
    // Disks without a serial number report zeros.
    if !matches!(selector, Selector::Name(_)) && text.bytes().all(|byte| byte == b'0') {
        return Err("is all zeros, as disks without a serial number report it");
    }
    Ok(())
}

fn bare_text(name: &str) -> &str {
    let name = name.trim();
    ["naa.", "eui.", "uuid.", "0x"].iter().find_map(|kind| name.strip_prefix(kind)).unwrap_or(name)
}

/// Returns a world-wide name in the form in which it is compared.
fn bare(name: &str) -> String {
    bare_text(name).to_ascii_lowercase()
}

/// Describes a disk in a few words, such as `vda (virtio, serial number "data-1")`.
pub fn describe(disk: &KnownDisk) -> String {
    let at = disk.scsi.map(|at| format!(" {at}")).unwrap_or_default();
    let serial = disk.serial().map(|serial| format!(", serial number {:?}", serial.text()));
    format!("{} ({}{at}{})", disk.name, disk.bus.word(), serial.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest::disks::identity::Source;
    use crate::guest::disks::location::Bus;

    fn disk(name: &str, serials: Vec<Serial>) -> Arc<KnownDisk> {
        Arc::new(KnownDisk {
            name: name.to_owned(),
            file: format!("/dev/{name}"),
            place: format!("/sys/devices/x/block/{name}"),
            number: (8, 0),
            generation: 1,
            sequence: None,
            bus: Bus::Virtio,
            pci: None,
            scsi: None,
            alias: serials.iter().find(|serial| serial.source == Source::Page83).map(Serial::text),
            serials,
            wwn: None,
            bytes: 1 << 20,
            sector: 512,
            read_only: false,
            rotational: false,
            partitions: Vec::new(),
            holders: Vec::new(),
            silent: false,
        })
    }

    /// Returns a virtio-blk disk with its serial number cut as such a disk reports it.
    fn virtio(name: &str, serial: &str) -> Arc<KnownDisk> {
        let bytes = serial.as_bytes();
        disk(name, Serial::new(Source::Virtio, &bytes[..bytes.len().min(20)]).into_iter().collect())
    }

    fn scsi(name: &str, serial: &str, id: &str) -> Arc<KnownDisk> {
        let bytes = serial.as_bytes();
        let page80 = Serial::new(Source::Page80, &bytes[..bytes.len().min(36)]);
        let page83 = Serial::new(Source::Page83, id.as_bytes());
        disk(name, page80.into_iter().chain(page83).collect())
    }

    const LONG: &str = "pvc-11111111-2222-3333-4444-555555555555";
    const OTHER: &str = "pvc-11111111-2222-3333-4444-666666666666";

    fn found(disks: &[Arc<KnownDisk>], selector: &Selector) -> String {
        match find(disks, selector) {
            Ok(disk) => disk.name.clone(),
            Err(error) => error.to_string(),
        }
    }

    fn serial(text: &str) -> Selector {
        Selector::Serial(text.to_owned())
    }

    #[test]
    fn by_serial_number() {
        let disks = [
            virtio("vda", ""),
            virtio("vdb", "data-1"),
            virtio("vdc", LONG),
            scsi("sda", "data-2", "data-2"),
            scsi("sdb", "with  space", ""),
            scsi("sdc", "größe", ""),
        ];
        for (wanted, name) in [
            ("data-1", "vdb"),
            (" data-1 ", "vdb"),
            (LONG, "vdc"),
            (&LONG[..20], "vdc"),
            // As far as that disk can report it.
            (OTHER, "vdc"),
            ("data-2", "sda"),
            ("with  space", "sdb"),
            ("größe", "sdc"),
            ("data", "no disk has the serial number \"data\""),
            ("data-10", "no disk has the serial number \"data-10\""),
            ("DATA-1", "no disk has the serial number \"DATA-1\""),
            (&LONG[..19], "no disk has the serial number \"pvc-11111111-2222-3\""),
            (" ", "the serial number \" \" is empty"),
            ("0000", "the serial number \"0000\" is all zeros, as disks without a serial number report it"),
            ("a\nb", "the serial number \"a\\nb\" has a control character in it"),
        ] {
            assert_eq!(found(&disks, &serial(wanted)), name, "{wanted:?}");
        }
    }

    #[test]
    fn one_that_is_cut_off_counts_only_where_none_is_whole() {
        let (cut, whole) = (virtio("vda", LONG), scsi("sda", LONG, LONG));
        assert_eq!(found(&[cut.clone(), whole.clone()], &serial(LONG)), "sda");
        assert!(is_whole(&whole, &serial(LONG)) && !is_whole(&cut, &serial(LONG)));
        assert!(is_whole(&cut, &serial(&LONG[..20])) && is_whole(&cut, &Selector::Name("vda".into())));
        assert_eq!(found(&[cut, whole.clone()], &serial(OTHER)), "vda");
        // The first 36 bytes are the same, and the rest is known to differ.
        let alike = "pvc-11111111-2222-3333-4444-555555555556";
        assert!(found(&[whole], &serial(alike)).starts_with("no disk has"));
        assert_eq!(found(&[scsi("sdb", LONG, "")], &serial(alike)), "sdb");
        assert_eq!(found(&[scsi("sdc", LONG, "ua-vol")], &serial(alike)), "sdc");
    }

    #[test]
    fn several_are_an_error_that_names_them() {
        let disks =
            [virtio("vda", "twin"), scsi("sda", "twin", ""), virtio("vdb", LONG), virtio("vdc", OTHER)];
        assert_eq!(
            found(&disks, &serial("twin")),
            "2 disks have the serial number \"twin\": vda (virtio, serial number \"twin\"); \
             sda (virtio, serial number \"twin\")"
        );
        assert!(found(&disks, &serial(LONG)).starts_with("2 disks have the serial number \"pvc-"));
    }

    #[test]
    fn by_other_names() {
        let mut named = KnownDisk::clone(&scsi("sda", "", "ua-vol"));
        named.wwn = Some("naa.5000C50015ea71ac".to_owned());
        let disks = [Arc::new(named), virtio("vda", "x")];
        for (selector, name) in [
            (Selector::Alias("ua-vol".into()), "sda"),
            (Selector::Alias("vol".into()), "no disk has the alias \"vol\""),
            (Selector::Serial("ua-vol".into()), "sda"),
            (Selector::Wwn("0x5000c50015ea71ac".into()), "sda"),
            (Selector::Wwn("naa.5000c50015ea71ac".into()), "sda"),
            (
                Selector::Wwn("naa.5000c50015ea71a".into()),
                "no disk has the world-wide name \"naa.5000c50015ea71a\"",
            ),
            (Selector::Wwn("naa.".into()), "the world-wide name \"naa.\" is empty"),
            (Selector::Name("vda".into()), "vda"),
            (Selector::Name("/dev/vda".into()), "vda"),
        ] {
            assert_eq!(found(&disks, &selector), name, "{selector:?}");
        }
    }

    proptest! {
        #[test]
        fn never_a_guess(
            serials in prop::collection::vec(("[ab]{0,3}|pvc-[01]{20,24}", any::<bool>()), 0..6),
            wanted in "[ab]{1,3}|pvc-[01]{20,24}",
        ) {
            let disks: Vec<_> = serials
                .iter()
                .enumerate()
                .map(|(place, (serial, is_virtio))| {
                    let name = format!("d{place}");
                    if *is_virtio { virtio(&name, serial) } else { scsi(&name, serial, "") }
                })
                .collect();
            let whole = serials.iter().filter(|(serial, _)| *serial == wanted).count();
            match find(&disks, &serial(&wanted)) {
                Ok(disk) => {
                    let said = disk.serial().unwrap().text();
                    prop_assert!(said == wanted || wanted.starts_with(&said) && said.len() == 20);
                    prop_assert!(whole <= 1);
                }
                Err(FindError::NotFound(_)) => prop_assert_eq!(whole, 0),
                Err(error) => {
                    let named = matches!(&error, FindError::Ambiguous { candidates, .. } if candidates.len() > 1);
                    prop_assert!(named, "{}", error);
                }
            }
        }
    }
}
