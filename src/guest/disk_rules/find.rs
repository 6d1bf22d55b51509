//! Decides which disk a rule means, and why the others do not match. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::guest::disk_rules::rule::Matcher;
use crate::guest::disks::identity::KnownDisk;
use crate::guest::disks::lookup::{self, Selector};
use crate::sys::block::{self, Number};

/// Labels of disks and partitions that have been read so far, or the reasons why they are not known.
pub type Labels = BTreeMap<(u64, Option<u32>), Label>;

/// Label of one device, if it has one, or the reason why it is not known.
pub type Label = Result<Option<String>, String>;

/// Disk or partition that a rule may match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Disk to which the device belongs.
    pub disk: Arc<KnownDisk>,
    /// Number of the partition in its table; absent for the whole disk.
    pub partition: Option<u32>,
    /// Device node, such as `/dev/vdb1`.
    pub file: String,
    /// Device number (major and minor).
    pub number: Number,
    /// True if the disk reports only the beginning of the rule's serial number. It may be a different disk, so it
    /// is never formatted.
    pub cut: bool,
}

impl Device {
    /// Returns the device that is the whole disk.
    pub fn whole(disk: &Arc<KnownDisk>) -> Self {
        let (disk, file, number) = (Arc::clone(disk), disk.file.clone(), disk.number);
        Self { disk, partition: None, file, number, cut: false }
    }

    /// Returns all devices of a disk that can be mounted: the disk itself and its partitions.
    pub fn all(disk: &Arc<KnownDisk>) -> impl Iterator<Item = Self> {
        let part = |partition: &block::Partition| Self {
            disk: Arc::clone(disk),
            partition: Some(partition.index),
            file: block::file(&partition.name),
            number: partition.number,
            cut: false,
        };
        std::iter::once(Self::whole(disk)).chain(disk.partitions.iter().map(part))
    }
}

/// Result of comparing a rule with one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The rule matches this device, or any of these.
    Fits(Vec<Device>),
    /// The rule does not match, for this reason.
    Not(String),
    /// The decision is not possible yet, for this reason.
    Unknown(String),
}

/// Compares one rule with every disk. `system` are the generations of the disks that are never touched.
pub fn verdicts(
    matcher: &Matcher,
    disks: &[Arc<KnownDisk>],
    system: &BTreeSet<u64>,
    labels: &Labels,
) -> Vec<Verdict> {
    let meant: Vec<_> = matcher
        .selectors()
        .map(|selector| {
            let matching = lookup::matching(disks, &selector);
            let generations: BTreeSet<_> = matching.iter().map(|disk| disk.generation).collect();
            (selector, generations)
        })
        .collect();
    let judge = |disk: &Arc<KnownDisk>| {
        if system.contains(&disk.generation) {
            return Verdict::Not("it holds the system itself".to_owned());
        }
        for (selector, generations) in &meant {
            if !generations.contains(&disk.generation) {
                return other(disk, selector);
            }
        }
        if let Some(bus) = matcher.bus.as_deref().filter(|bus| *bus != disk.bus.word()) {
            return Verdict::Not(format!("its bus is {}, not {bus}", disk.bus.word()));
        }
        let cut =
            matcher.wwn.is_none() && meant.iter().any(|(selector, _)| !lookup::is_whole(disk, selector));
        let mut devices: Vec<_> = Device::all(disk).map(|device| Device { cut, ..device }).collect();
        match (matcher.partition, &matcher.label) {
            (Some(number), _) => {
                devices.retain(|device| device.partition == Some(number));
                if devices.is_empty() {
                    return Verdict::Not(format!("it has no partition {number}"));
                }
            }
            (None, None) => devices.truncate(1),
            (None, Some(_)) => {}
        }
        match &matcher.label {
            Some(label) => labelled(devices, label, labels),
            None => Verdict::Fits(devices),
        }
    };
    disks.iter().map(judge).collect()
}

/// Returns the verdict for a disk whose serial number or WWN differs from the rule's.
fn other(disk: &KnownDisk, selector: &Selector) -> Verdict {
    match selector {
        Selector::Wwn(_) => Verdict::Not(match &disk.wwn {
            Some(name) => format!("its WWN is {name}"),
            None => "it has no WWN".to_owned(),
        }),
        _ if disk.silent => Verdict::Unknown("it does not identify itself".to_owned()),
        _ => Verdict::Not(match disk.serial() {
            Some(serial) => format!("its serial number is {:?}", serial.text()),
            None => "it has no serial number".to_owned(),
        }),
    }
}

fn labelled(devices: Vec<Device>, wanted: &str, labels: &Labels) -> Verdict {
    let mut found = Vec::new();
    let (mut others, mut unknown) = (Vec::new(), None);
    for device in devices {
        match labels.get(&(device.disk.generation, device.partition)) {
            Some(Ok(Some(label))) if label == wanted => found.push(device),
            Some(Ok(label)) => others.extend(label.as_ref().map(|label| format!("{label:?}"))),
            Some(Err(why)) => unknown = Some(why.clone()),
            None => unknown = Some("its contents are being read".to_owned()),
        }
    }
    match unknown {
        _ if !found.is_empty() => Verdict::Fits(found),
        Some(why) => Verdict::Unknown(why),
        None if others.is_empty() => Verdict::Not("it has no label".to_owned()),
        None => Verdict::Not(format!("its label is {}", others.join(", "))),
    }
}
