//! Defines the contents of a rule, and checks them.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::guest::accounts;
use crate::guest::disks::lookup::{self, Selector};
use crate::guest::volumes::format::Kind;
use crate::guest::volumes::options::Options;

/// Names of buses that a disk can report.
const BUSES: &[&str] = &["ide", "nvme", "sata", "scsi", "usb", "virtio", "xen"];
/// Single-disk file systems that are mounted by their own names.
const FILE_SYSTEMS: &[&str] = &["btrfs", "ext2", "ext3", "ext4", "vfat", "xfs"];
/// Value that is accepted in place of a file system: swap space.
const SWAP: &str = "swap";

/// Matcher of a disk, and what to do with the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// File and line where the rule is written.
    pub origin: String,
    /// Criteria that select the disk.
    pub matcher: Matcher,
    /// Instructions for the selected disk.
    pub how: How,
}

/// Criteria that select a disk. All that are given have to match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matcher {
    /// Serial number of the disk.
    pub serial: Option<String>,
    /// Label of the file system on the disk or on one of its partitions.
    pub label: Option<String>,
    /// World-wide name of the disk.
    pub wwn: Option<String>,
    /// Bus of the disk, such as `virtio`.
    pub bus: Option<String>,
    /// Number of the partition in its table.
    pub partition: Option<u32>,
}

/// Instructions for a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct How {
    /// Mount point; for [swap space](Self::is_swap) a text that no other rule has.
    pub mount_point: PathBuf,
    /// File system that the disk must have.
    pub kind: Option<String>,
    /// True if a blank disk is formatted with that file system.
    pub format: bool,
    /// Mount options, as for mount(8).
    pub options: Vec<String>,
    /// Owner of the root directory of the mount: the name or number of a user.
    pub owner: Option<String>,
    /// Group of the root directory of the mount: its name or number.
    pub group: Option<String>,
    /// Permissions of the root directory of the mount.
    pub mode: Option<u32>,
    /// True if partition and file system are grown when the disk grows.
    pub grow: bool,
}

impl How {
    /// Returns whether the disk is used as swap space and is not mounted anywhere.
    pub fn is_swap(&self) -> bool {
        self.kind.as_deref() == Some(SWAP)
    }

    /// Returns whether a mount made as `self` says has to be unmounted before `other` can be applied.
    pub fn mounts_otherwise(&self, other: &Self) -> bool {
        self.mount_point != other.mount_point
            || self.options != other.options
            || other.kind.is_some() && self.kind != other.kind
    }
}

impl Matcher {
    /// Returns the selectors with which the disk is looked up.
    pub fn selectors(&self) -> impl Iterator<Item = Selector> {
        let serial = self.serial.clone().map(Selector::Serial);
        serial.into_iter().chain(self.wwn.clone().map(Selector::Wwn))
    }
}

impl fmt::Display for Matcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts =
            [("serial", &self.serial), ("label", &self.label), ("wwn", &self.wwn), ("bus", &self.bus)];
        let said = texts.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        let partition = self.partition.map(|number| format!("partition {number}"));
        formatter.write_str(&said.chain(partition).collect::<Vec<_>>().join(", "))
    }
}

/// Key of the rule that is wrong, and the reason.
pub type Problem = (&'static str, String);

/// Checks that a rule makes sense.
///
/// # Errors
/// The key that is wrong, with the reason.
pub fn check(rule: &Rule) -> Result<(), Problem> {
    let Rule { matcher, how, .. } = rule;
    for selector in matcher.selectors() {
        lookup::usable(&selector).map_err(|why| ("match", format!("{selector} {why}")))?;
    }
    if let Some(bus) = matcher.bus.as_deref().filter(|bus| !BUSES.contains(bus)) {
        return Err(("match", format!("the bus {bus:?} is not one of {}", BUSES.join(", "))));
    }
    if matcher.label.as_ref().is_some_and(String::is_empty) {
        return Err(("match", "a label must not be empty".to_owned()));
    }
    if matcher.partition == Some(0) {
        return Err(("match", "partitions are numbered from 1".to_owned()));
    }
    let kind = how.kind.as_deref();
    if how.is_swap() {
        let said = [
            ("options", !how.options.is_empty()),
            ("owner", how.owner.is_some()),
            ("group", how.group.is_some()),
            ("mode", how.mode.is_some()),
            ("grow", how.grow),
        ];
        return match said.into_iter().find(|(_, said)| *said) {
            Some((key, _)) => Err((key, format!("swap space has no {key}"))),
            None => Ok(()),
        };
    }
    if let Some(kind) = kind.filter(|kind| !FILE_SYSTEMS.contains(kind)) {
        return Err(("file-system", format!("{kind:?} is not one of {}, {SWAP}", FILE_SYSTEMS.join(", "))));
    }
    if let Some(kind) = kind.filter(|kind| how.format && Kind::named(kind).is_none()) {
        return Err(("file-system", format!("{kind} is no longer created; use ext4")));
    }
    Options::parse(&how.options, false).map_err(|error| ("options", error.to_string()))?;
    for (key, name) in [("owner", &how.owner), ("group", &how.group)] {
        let Some(name) = name else { continue };
        if kind == Some("vfat") {
            let why = "vfat has no owners; use the options uid= and gid=";
            return Err((key, why.to_owned()));
        }
        accounts::check_name(name).map_err(|_| (key, format!("{key} = {name:?} is not a name")))?;
    }
    if kind == Some("vfat") && how.mode.is_some() {
        return Err(("mode", "vfat has no permissions; use the option umask=".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_make_no_sense() {
        let good = Rule {
            origin: String::new(),
            matcher: Matcher { serial: Some("data-1".into()), ..Matcher::default() },
            how: How { mount_point: "/a".into(), ..How::default() },
        };
        assert_eq!(check(&good), Ok(()));
        let matching = |matcher: Matcher| Rule { matcher, ..good.clone() };
        let doing = |how: How| Rule { how, ..good.clone() };
        let text = |text: &str| Some(text.to_owned());
        for (rule, key, why) in [
            (matching(Matcher { serial: text("0000"), ..Matcher::default() }), "match", "is all zeros"),
            (matching(Matcher { wwn: text("naa."), ..Matcher::default() }), "match", "is empty"),
            (
                matching(Matcher { bus: text("pci"), ..Matcher::default() }),
                "match",
                "\"pci\" is not one of ide,",
            ),
            (matching(Matcher { label: text(""), ..Matcher::default() }), "match", "must not be empty"),
            (matching(Matcher { partition: Some(0), ..Matcher::default() }), "match", "from 1"),
            (
                doing(How { kind: text("swap"), grow: true, ..How::default() }),
                "grow",
                "swap space has no grow",
            ),
            (doing(How { kind: text("swap"), mode: Some(0), ..How::default() }), "mode", "has no mode"),
            (
                doing(How { kind: text("ntfs"), ..How::default() }),
                "file-system",
                "\"ntfs\" is not one of btrfs",
            ),
            (doing(How { kind: text("ext3"), format: true, ..How::default() }), "file-system", "use ext4"),
            (doing(How { options: vec!["bind".into()], ..How::default() }), "options", "\"bind\""),
            (doing(How { owner: text("a:b"), ..How::default() }), "owner", "is not a name"),
            (doing(How { kind: text("vfat"), group: text("7"), ..How::default() }), "group", "gid="),
            (doing(How { kind: text("vfat"), mode: Some(0), ..How::default() }), "mode", "umask="),
        ] {
            let (found, text) = check(&rule).unwrap_err();
            assert_eq!(found, key, "{text}");
            assert!(text.contains(why), "{text}");
        }
    }

    #[test]
    fn rules_in_words() {
        let matcher = Matcher {
            serial: Some("data 1".into()),
            bus: Some("scsi".into()),
            partition: Some(2),
            ..Matcher::default()
        };
        assert_eq!(matcher.to_string(), "serial data 1, bus scsi, partition 2");
    }
}
