//! Determines the consistency level of a snapshot from the receipt of a freeze. Pure.
//!
//! The receipt counts only for a snapshot that was provably taken while everything was frozen; any other has
//! the level that it would have without a freeze.

use k8s_openapi::jiff::Timestamp;

use super::super::objects::{Disk, Instance};
use super::Freeze;
use super::objects::VirtualMachineSnapshot;
use crate::receipt::{Level, Receipt, Volume};

/// Maximum difference between the clocks of nodes and of the storage, in microseconds.
const SKEW: i64 = 100_000;
/// Maximum length, in bytes, of the reason why the level is not higher.
const LONGEST: usize = 1024;

/// Interval in which a snapshot was taken, in microseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub least: i64,
    pub most: i64,
}

impl Cut {
    /// Converts nanoseconds since 1970, which many drivers report in whole seconds.
    pub fn of_nanoseconds(nanoseconds: i64) -> Self {
        let least = nanoseconds.div_euclid(1000);
        let step = if nanoseconds % 1_000_000_000 == 0 { 1_000_000 } else { 1 };
        Self { least, most: least.saturating_add(step) }
    }

    /// Parses a time of the API, which has whole seconds.
    pub fn of_text(text: &str) -> Option<Self> {
        let time: Timestamp = text.parse().ok()?;
        let nanoseconds = i64::try_from(time.as_nanosecond()).ok()?;
        Some(Self::of_nanoseconds(nanoseconds))
    }
}

/// Consistency level of a snapshot, and the reason why it is not higher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worth {
    pub level: Level,
    pub why: String,
}

impl Worth {
    fn crash(why: impl Into<String>) -> Self {
        Self { level: Level::Crash, why: short(why.into()) }
    }
}

fn short(mut text: String) -> String {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Formats a time for people.
fn words(micros: i64) -> String {
    Timestamp::from_microsecond(micros).map(|time| time.to_string()).unwrap_or_default()
}

/// Judges all snapshots that were taken at this moment.
fn taken(freeze: &Freeze, cut: Cut) -> Worth {
    let receipt = &freeze.receipt;
    let reasons = receipt.reasons.join("; ");
    if receipt.level == Level::Crash {
        return Worth::crash(reasons);
    }
    let Some((from, until)) = freeze.window else {
        return Worth::crash(format!("when everything was frozen is not proved: {}", freeze.problem));
    };
    if cut.least < from.saturating_add(SKEW) || cut.most > until.saturating_sub(SKEW) {
        let at = words(cut.least);
        let (from, until) = (words(from), words(until));
        return Worth::crash(format!(
            "the snapshot was taken at {at}, which is not proved to lie between {from} and {until}, when everything was frozen"
        ));
    }
    Worth { level: receipt.level, why: short(reasons) }
}

/// Judges the snapshot of a claim that is this disk of its VM.
pub fn of_claim(freeze: &Freeze, cut: Cut, instance: &Instance, disk: &Disk) -> Worth {
    let worth = taken(freeze, cut);
    if worth.level == Level::Crash {
        return worth;
    }
    if disk.shareable {
        return Worth::crash("other VMs may have written to it meanwhile: it is shareable");
    }
    match on(&freeze.receipt, instance, disk) {
        None => Worth::crash(
            "which file systems are on it is not known: its disk has no serial number \
             (spec.template.spec.domain.devices.disks[].serial of the VirtualMachine)",
        ),
        Some(volumes) => match volumes.iter().map(|volume| volume.level).min() {
            None => Worth::crash("none of the file systems that the receipt lists as frozen is on it"),
            Some(Level::Crash) => Worth::crash("a file system on it did not stay frozen"),
            Some(_) => worth,
        },
    }
}

/// Returns the file systems of the receipt that are provably on a disk: by its serial number, or because it is
/// the only disk without one.
fn on<'a>(receipt: &'a Receipt, instance: &Instance, disk: &Disk) -> Option<Vec<&'a Volume>> {
    let with = |serial: &str| {
        let has = |volume: &&Volume| volume.disks.iter().any(|disk| disk.serial == serial);
        receipt.volumes.iter().filter(has).collect()
    };
    if !disk.serial.is_empty() {
        return Some(with(&disk.serial));
    }
    let is_configuration = |disk: &Disk| {
        instance.spec.volumes.iter().any(|one| one.name == disk.name && one.cloud_init_no_cloud.is_some())
    };
    let nameless = instance.spec.domain.devices.disks.iter();
    let nameless = nameless.filter(|disk| disk.serial.is_empty() && !is_configuration(disk));
    let disks = receipt.volumes.iter().flat_map(|volume| &volume.disks);
    let mut files = disks.filter(|disk| disk.serial.is_empty()).map(|disk| disk.file.as_str());
    let first = files.next();
    // The backing disks of devices that the guest creates itself, such as loop devices, are unknown here.
    let is_disk = |file: &str| ["/dev/vd", "/dev/sd", "/dev/nvme"].iter().any(|kind| file.starts_with(kind));
    let is_only_one =
        nameless.count() == 1 && first.is_none_or(|first| is_disk(first) && files.all(|file| file == first));
    is_only_one.then(|| with(""))
}

/// Snapshot of one volume, as part of a snapshot of a VM.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    pub claim: &'a str,
    /// Interval in which it was taken, once it is known.
    pub cut: Option<Cut>,
}

/// Judges the snapshot of a VM with these parts.
pub fn of_machine(
    freeze: &Freeze,
    snapshot: &VirtualMachineSnapshot,
    instance: &Instance,
    parts: &[Part<'_>],
) -> Worth {
    let volumes = &snapshot.status.snapshot_volumes;
    let claim = |name: &str| {
        instance.spec.volumes.iter().find(|volume| volume.name == name).and_then(|volume| volume.claim())
    };
    if volumes.included_volumes.is_empty() {
        return Worth::crash("it lists no included volumes");
    }
    if let Some(name) = volumes.excluded_volumes.iter().find(|name| claim(name).is_some()) {
        return Worth::crash(format!("the volume {name} is not in it"));
    }
    let mut worth: Option<Worth> = None;
    for name in &volumes.included_volumes {
        let part = claim(name).and_then(|claim| parts.iter().find(|part| part.claim == claim));
        let Some(cut) = part.and_then(|part| part.cut) else {
            return Worth::crash(format!("when the snapshot of its volume {name} was taken is not known"));
        };
        let disks = &instance.spec.domain.devices.disks;
        if disks.iter().any(|disk| disk.name == *name && disk.shareable) {
            return Worth::crash(format!(
                "other VMs may have written to its volume {name} meanwhile: it is shareable"
            ));
        }
        let of_part = taken(freeze, cut);
        if worth.as_ref().is_none_or(|worth| of_part.level < worth.level) {
            worth = Some(of_part);
        }
    }
    worth.unwrap_or_else(|| Worth::crash("it has no volumes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::receipt;

    const SECOND: i64 = 1_000_000;

    fn freeze(level: Level, window: Option<(i64, i64)>) -> Freeze {
        let volume = |mount_point: &str, serial: &str, file: &str| Volume {
            mount_point: mount_point.to_owned(),
            disks: vec![receipt::Disk { file: file.to_owned(), serial: serial.to_owned() }],
            level: level.min(Level::FileSystem),
            ..Volume::default()
        };
        let receipt = Receipt {
            level,
            reasons: vec!["no application took part".to_owned()],
            volumes: vec![volume("/", "", "/dev/vda"), volume("/data", "data", "/dev/vdb")],
            ..Receipt::default()
        };
        Freeze { receipt, window, problem: "because".to_owned(), ..Freeze::default() }
    }

    fn instance() -> Instance {
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": {
            "domain": {"devices": {"disks": [
                {"name": "root"}, {"name": "data", "serial": "data"}, {"name": "raw", "serial": "raw"}, {"name": "init"},
            ]}},
            "volumes": [
                {"name": "root", "dataVolume": {"name": "web-root"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "web-data"}},
                {"name": "raw", "persistentVolumeClaim": {"claimName": "web-raw"}},
                {"name": "init", "cloudInitNoCloud": {"userData": "x"}},
            ],
        }}))
        .unwrap()
    }

    fn disk(instance: &Instance, name: &str) -> Disk {
        instance.spec.domain.devices.disks.iter().find(|disk| disk.name == name).unwrap().clone()
    }

    #[test]
    fn a_claim_is_worth_what_is_proved_of_its_disk_and_its_cut() {
        let good = freeze(Level::FileSystem, Some((100 * SECOND, 200 * SECOND)));
        let inside = Cut { least: 150 * SECOND, most: 151 * SECOND };
        let instance = instance();
        let of = |freeze: &Freeze, cut, instance: &Instance, name| {
            of_claim(freeze, cut, instance, &disk(instance, name))
        };
        for name in ["root", "data"] {
            let worth = of(&good, inside, &instance, name);
            assert_eq!(
                (worth.level, worth.why.as_str()),
                (Level::FileSystem, "no application took part"),
                "{name}"
            );
        }
        assert!(of(&good, inside, &instance, "raw").why.contains("none of the file systems"));
        // With a second disk without a serial number, neither can be identified.
        let mut other = instance.clone();
        other.spec.domain.devices.disks.push(Disk { name: "scratch".to_owned(), ..Disk::default() });
        assert!(of(&good, inside, &other, "root").why.contains("has no serial number"));
        assert_eq!(of(&good, inside, &other, "data").level, Level::FileSystem);
        // A file system on a device that the guest created.
        let mut made = freeze(Level::FileSystem, good.window);
        made.receipt.volumes[0].disks[0].file = "/dev/loop0".to_owned();
        assert_eq!(of(&made, inside, &instance, "root").level, Level::Crash);
        let mut shared = instance.clone();
        shared.spec.domain.devices.disks[1].shareable = true;
        assert!(of(&good, inside, &shared, "data").why.contains("shareable"));

        // The time is in whole seconds: the whole second, plus a margin, has to be inside the window.
        for (least, most, level) in [
            (100 * SECOND + SKEW, 101 * SECOND, Level::FileSystem),
            (100 * SECOND + SKEW - 1, 101 * SECOND, Level::Crash),
            (199 * SECOND, 200 * SECOND - SKEW, Level::FileSystem),
            (199 * SECOND, 200 * SECOND - SKEW + 1, Level::Crash),
            (250 * SECOND, 251 * SECOND, Level::Crash),
        ] {
            let worth = of(&good, Cut { least, most }, &instance, "data");
            assert_eq!(worth.level, level, "{least}–{most}: {}", worth.why);
            assert!(
                level > Level::Crash || worth.why.contains("is not proved to lie between"),
                "{}",
                worth.why
            );
        }
        let unproved = of(&freeze(Level::Application, None), inside, &instance, "data");
        assert_eq!(unproved, Worth::crash("when everything was frozen is not proved: because"));
        let crash = of(&freeze(Level::Crash, good.window), inside, &instance, "data");
        assert_eq!(crash, Worth::crash("no application took part"));
    }

    #[test]
    fn a_vm_is_worth_what_the_worst_of_its_parts_is() {
        let good = freeze(Level::Application, Some((100 * SECOND, 200 * SECOND)));
        let snapshot = |included: &[&str], excluded: &[&str]| -> VirtualMachineSnapshot {
            let volumes = json!({"includedVolumes": included, "excludedVolumes": excluded});
            serde_json::from_value(json!({"metadata": {}, "status": {"snapshotVolumes": volumes}})).unwrap()
        };
        let cut = |second: i64| Some(Cut { least: second * SECOND, most: second * SECOND + 1 });
        let part = |claim, cut| Part { claim, cut };
        let whole = snapshot(&["root", "data"], &["init"]);
        let of = |snapshot: &VirtualMachineSnapshot, parts: &[Part<'_>]| {
            of_machine(&good, snapshot, &instance(), parts)
        };
        let worth = of(&whole, &[part("web-root", cut(120)), part("web-data", cut(180))]);
        assert_eq!(worth.level, Level::Application, "{}", worth.why);
        for (snapshot, parts, why) in [
            (
                &whole,
                vec![part("web-root", cut(120)), part("web-data", cut(220))],
                "is not proved to lie between",
            ),
            (&whole, vec![part("web-root", cut(120)), part("web-data", None)], "data was taken is not known"),
            (&whole, vec![part("web-root", cut(120))], "data was taken is not known"),
            (
                &snapshot(&["root"], &["data"]),
                vec![part("web-root", cut(120))],
                "the volume data is not in it",
            ),
            (&snapshot(&[], &[]), vec![], "no included volumes"),
            (&snapshot(&["gone"], &[]), vec![part("web-root", cut(120))], "gone was taken is not known"),
        ] {
            let worth = of(snapshot, &parts);
            assert!(worth.level == Level::Crash && worth.why.contains(why), "{why}: {}", worth.why);
        }
    }

    #[test]
    fn a_time_to_the_second_is_all_of_that_second() {
        assert_eq!(Cut::of_text("1970-01-01T00:00:07Z"), Some(Cut { least: 7 * SECOND, most: 8 * SECOND }));
        assert_eq!(Cut::of_text("yesterday"), None);
        assert_eq!(Cut::of_nanoseconds(7_000_001_999), Cut { least: 7_000_001, most: 7_000_002 });
        assert_eq!(Cut::of_nanoseconds(7_000_000_000), Cut { least: 7 * SECOND, most: 8 * SECOND });
    }

    proptest! {
        /// Regardless of the receipt, the level exceeds that of a crash only if the snapshot was taken while everything
        /// was frozen.
        #[test]
        fn nothing_outside_of_the_window_is_worth_more(
            from in 0i64..10, held in 0i64..10, at in proptest::num::i64::ANY, near in -3i64..15, is_near: bool,
        ) {
            let cut = Cut::of_nanoseconds(if is_near { near * 1_000_000_000 + at.rem_euclid(1_000_000_000) } else { at });
            let window = (from * SECOND, (from + held) * SECOND);
            let worth = of_claim(&freeze(Level::Application, Some(window)), cut, &instance(), &disk(&instance(), "data"));
            prop_assert_eq!(worth.level > Level::Crash, cut.least >= window.0 + SKEW && cut.most <= window.1 - SKEW);
        }
    }
}
