//! Tests the decisions, for arbitrary rules and disks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;

use crate::guest::disk_rules::find::{Device, Labels, Verdict};
use crate::guest::disk_rules::made::{Made, Standing};
use crate::guest::disk_rules::plan::{Finding, Plan, Seen, View, plan};
use crate::guest::disk_rules::rule::{How, Matcher, Rule};
use crate::guest::disks::identity::{KnownDisk, Serial, Source};
use crate::guest::disks::location::Bus;
use crate::sys::block::Partition;

fn disk(number: u8, serial: &str, parts: u8) -> Arc<KnownDisk> {
    let name = format!("vd{}", char::from(b'a' + number));
    let partition = |index: u8| Partition {
        name: format!("{name}{index}"),
        index: index.into(),
        number: (254, u32::from(number) * 16 + u32::from(index)),
        start: 0,
        bytes: 1 << 20,
    };
    Arc::new(KnownDisk {
        file: format!("/dev/{name}"),
        place: format!("/sys/devices/x/block/{name}"),
        number: (254, u32::from(number) * 16),
        generation: number.into(),
        sequence: None,
        bus: if number.is_multiple_of(2) { Bus::Virtio } else { Bus::Scsi },
        pci: None,
        scsi: None,
        serials: Serial::new(Source::Virtio, serial.as_bytes()).into_iter().collect(),
        alias: None,
        wwn: (number == 3).then(|| "naa.5000".to_owned()),
        bytes: 1 << 30,
        sector: 512,
        read_only: false,
        rotational: false,
        partitions: (1..=parts).map(partition).collect(),
        holders: Vec::new(),
        silent: false,
        name,
    })
}

fn rule(point: &str, matcher: Matcher) -> Rule {
    let how = How { mount_point: point.into(), ..How::default() };
    Rule { origin: format!("rule of {point}"), matcher, how }
}

fn serial(serial: &str) -> Matcher {
    Matcher { serial: Some(serial.to_owned()), ..Matcher::default() }
}

fn labels(view: &View) -> Labels {
    let all = view.disks.iter().flat_map(Device::all);
    all.map(|device| ((device.disk.generation, device.partition), Ok(None))).collect()
}

fn made(rule: &Rule, device: &Device) -> Seen {
    let made = Made { mount: Some(1), done: true, grown: device.disk.bytes, ..Made::new(&rule.how, device) };
    Seen { made, standing: Standing::Mounted, gone: false }
}

/// Carries out a plan as if all of it succeeded.
fn follow(rules: &[Rule], view: &mut View, plan: &Plan) {
    view.made.retain(|seen| !plan.undo.contains(&seen.made.how.mount_point));
    for (rule, finding) in rules.iter().zip(&plan.findings) {
        if let Finding::Apply(device) = finding {
            view.made.retain(|seen| seen.made.how.mount_point != rule.how.mount_point);
            view.made.push(made(rule, device));
        }
    }
}

#[test]
fn why_a_disk_is_not_meant() {
    let mut view = View { disks: vec![disk(0, "a", 0), disk(1, "b", 1), disk(2, "", 0)], ..View::default() };
    view.system = [0].into();
    let reasons = |view: &View, matcher: Matcher| {
        let plan = plan(&[rule("/m", matcher)], view);
        let reason = |verdict: &Verdict| match verdict {
            Verdict::Fits(devices) => {
                devices.iter().map(|device| device.file.clone()).collect::<Vec<_>>().join(" ")
            }
            Verdict::Not(why) => why.clone(),
            Verdict::Unknown(why) => format!("? {why}"),
        };
        plan.verdicts[0].iter().map(reason).collect::<Vec<_>>()
    };
    let system = "it holds the system itself";
    let by_bus = |bus: &str| Matcher { bus: Some(bus.into()), ..Matcher::default() };
    let label = Matcher { label: Some("l".into()), ..Matcher::default() };
    assert_eq!(reasons(&view, serial("b")), [system, "/dev/vdb", "it has no serial number"]);
    assert_eq!(
        reasons(&view, serial("a")),
        [system, "its serial number is \"b\"", "it has no serial number"]
    );
    assert_eq!(reasons(&view, by_bus("virtio")), [system, "its bus is scsi, not virtio", "/dev/vdc"]);
    let part = Matcher { partition: Some(1), ..serial("b") };
    assert_eq!(reasons(&view, part.clone())[1], "/dev/vdb1");
    assert_eq!(reasons(&view, Matcher { partition: Some(2), ..part })[1], "it has no partition 2");
    let wwn = Matcher { wwn: Some("0x5000".into()), ..Matcher::default() };
    assert_eq!(reasons(&view, wwn)[1], "it has no WWN");
    assert_eq!(reasons(&view, label.clone())[1], "? its contents are being read");
    view.labels = labels(&view);
    assert_eq!(reasons(&view, label.clone())[1], "it has no label");
    view.labels.insert((1, Some(1)), Ok(Some("l".into())));
    view.labels.insert((2, None), Ok(Some("m".into())));
    assert_eq!(reasons(&view, label.clone())[1..], ["/dev/vdb1", "its label is \"m\""]);
    view.labels.insert((2, None), Err("broken".into()));
    assert_eq!(reasons(&view, label)[2], "? broken");
}

#[test]
fn what_becomes_of_a_rule() {
    let disks = vec![disk(0, "a", 0), disk(1, "b", 2), disk(2, "twin", 0), disk(3, "twin", 0)];
    let mut view = View { disks, ..View::default() };
    let rules = [
        rule("/a", serial("a")),
        rule("/b", serial("b")),
        rule("/twin", serial("twin")),
        rule("/none", serial("none")),
        rule("/a/below", Matcher { partition: Some(2), ..serial("b") }),
    ];
    let words = |plan: &Plan| {
        plan.findings
            .iter()
            .map(|finding| match finding {
                Finding::NoDisk(why) => format!("none: {why}"),
                Finding::Several(why) => format!("several: {why}"),
                Finding::Waits(_, why) => format!("waits: {why}"),
                Finding::LetGo(device) => format!("let go {}", device.file),
                Finding::Apply(device) => format!("apply {}", device.file),
                Finding::Done(device) => format!("done {}", device.file),
            })
            .collect::<Vec<_>>()
    };
    let first = plan(&rules, &view);
    assert_eq!(
        words(&first),
        [
            "apply /dev/vda",
            "waits: the disk has partitions; choose one with match.partition",
            "several: 2 match, so none is used: vdc (virtio, serial number \"twin\"); vdd (scsi, serial number \"twin\")",
            "none: no disk has serial none",
            "waits: until /a is mounted",
        ]
    );
    follow(&rules, &mut view, &first);
    let second = plan(&rules, &view);
    assert_eq!(
        (words(&second)[0].as_str(), words(&second)[4].as_str()),
        ("done /dev/vda", "apply /dev/vdb2")
    );
    follow(&rules, &mut view, &second);
    // In turn: released; unmounted by hand; grown; rule edited; disk unplugged; and rule deleted.
    let check = |view: &View, rules: &[Rule], place: usize, expected: &str, undo: &[&str]| {
        let plan = plan(rules, view);
        assert_eq!(words(&plan)[place], expected);
        assert_eq!(plan.undo, undo.iter().map(PathBuf::from).collect::<Vec<_>>(), "{expected}");
    };
    check(&view, &rules, 4, "done /dev/vdb2", &[]);
    let released = View { released: [0].into(), ..view.clone() };
    let why = "waits: the disk was released; it will be mounted again when it is plugged in again";
    check(&released, &rules, 0, why, &[]);
    let mut unmounted = view.clone();
    unmounted.made[0].standing = Standing::Unmounted;
    check(&unmounted, &rules, 0, "let go /dev/vda", &[]);
    let mut grown = view.clone();
    let mut larger = KnownDisk::clone(&grown.disks[0]);
    larger.bytes *= 2;
    grown.disks[0] = Arc::new(larger);
    check(&grown, &rules, 0, "done /dev/vda", &[]);
    let mut edited = rules.clone();
    edited[0].how.mode = Some(0o700);
    check(&view, &edited, 0, "apply /dev/vda", &[]);
    edited[0].how = How { grow: true, ..rules[0].how.clone() };
    let mut growing = grown.clone();
    growing.made[0].made.how = edited[0].how.clone();
    check(&growing, &edited, 0, "apply /dev/vda", &[]);
    edited[0].how.options = vec!["ro".into()];
    let why = "waits: what is mounted there has to be unmounted first";
    check(&view, &edited, 0, why, &["/a/below", "/a"]);
    let mut gone = view.clone();
    gone.made[1].gone = true;
    check(&gone, &rules, 0, "done /dev/vda", &["/a/below"]);
    check(
        &view,
        &rules[1..],
        3,
        "waits: what is mounted there has to be unmounted first",
        &["/a/below", "/a"],
    );
    // A second disk with the same serial number appears, or the disk does not identify itself for a while: the
    // mount stays.
    let mut twin = view.clone();
    twin.disks.push(disk(5, "a", 0));
    assert_eq!(plan(&rules, &twin).undo, [] as [PathBuf; 0]);
    let mut silent = view.clone();
    let unknown = KnownDisk { silent: true, serials: Vec::new(), ..KnownDisk::clone(&view.disks[0]) };
    silent.disks[0] = Arc::new(unknown);
    assert_eq!(plan(&rules, &silent).undo, [] as [PathBuf; 0]);
}

fn any_matcher() -> impl Strategy<Value = Matcher> {
    let serial = prop::option::of("[ab]");
    let bus = prop::option::of(prop_oneof![Just("virtio".to_owned()), Just("scsi".to_owned())]);
    let wwn = prop::option::weighted(0.1, Just("naa.5000".to_owned()));
    let label = prop::option::weighted(0.2, "[lm]");
    (serial, bus, wwn, label, prop::option::weighted(0.3, 1_u32..3)).prop_map(
        |(serial, bus, wwn, label, partition)| Matcher {
            bus: bus
                .or_else(|| (serial.is_none() && wwn.is_none() && label.is_none()).then(|| "virtio".into())),
            serial,
            wwn,
            label,
            partition,
        },
    )
}

prop_compose! {
    fn any_rules()(
        rules in prop::collection::btree_map("/[ab](/[ab])?", (any_matcher(), any::<bool>()), 0..5),
    ) -> Vec<Rule> {
        let rule = |(point, (matcher, read_only)): (String, (Matcher, bool))| {
            let mut rule = rule(&point, matcher);
            rule.how.options = if read_only { vec!["ro".to_owned()] } else { Vec::new() };
            rule
        };
        rules.into_iter().map(rule).collect()
    }
}

prop_compose! {
    fn any_view()(
        disks in prop::collection::btree_map(0_u8..6, ("[ab]?", 0_u8..3), 0..6),
        system in prop::collection::btree_set(0_u64..6, 0..2),
        released in prop::collection::btree_set(0_u64..6, 0..2),
        marks in prop::collection::vec((0_u8..6, 0_u32..3, "[lm]"), 0..4),
    ) -> View {
        let disks = disks.into_iter().map(|(number, (serial, parts))| disk(number, &serial, parts)).collect();
        let mut view = View { disks, system, released, ..View::default() };
        view.labels = labels(&view);
        for (number, part, label) in marks {
            view.labels.insert((number.into(), Some(part).filter(|part| *part > 0)), Ok(Some(label)));
        }
        view
    }
}

/// Checks the invariants of every plan.
fn check(rules: &[Rule], view: &View, plan: &Plan) -> Result<(), TestCaseError> {
    prop_assert_eq!(plan.findings.len(), rules.len());
    let points: BTreeSet<&Path> = view.made.iter().map(|seen| seen.made.how.mount_point.as_path()).collect();
    for (place, point) in plan.undo.iter().enumerate() {
        prop_assert!(points.contains(point.as_path()), "only what a rule mounted is unmounted");
        let later = &plan.undo[place + 1..];
        prop_assert!(!later.iter().any(|later| later.starts_with(point)), "the deepest comes first");
    }
    for (rule, finding) in rules.iter().zip(&plan.findings) {
        if let Finding::Apply(device) | Finding::Done(device) = finding {
            prop_assert!(!view.system.contains(&device.disk.generation));
            prop_assert!(!view.released.contains(&device.disk.generation));
            prop_assert!(!plan.undo.contains(&rule.how.mount_point));
            let one = std::slice::from_ref(&device.disk);
            prop_assert!(
                rule.matcher.serial.is_none()
                    || one[0].serial().is_some_and(|serial| Some(serial.text()) == rule.matcher.serial)
            );
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_rules_come_to_an_end_and_touch_nothing_else(
        before in any_rules(),
        rules in any_rules(),
        first in any_view(),
        second in any_view(),
    ) {
        // Whatever the earlier rules and disks have left behind, the result is the same.
        let mut view = first;
        for _ in 0..before.len() + 2 {
            let plan = plan(&before, &view);
            check(&before, &view, &plan)?;
            follow(&before, &mut view, &plan);
        }
        let mut later = View { made: view.made, ..second.clone() };
        for seen in &mut later.made {
            seen.gone = !later.disks.iter().any(|disk| disk.generation == seen.made.disk.generation);
        }
        let mut last = None;
        for _ in 0..2 * rules.len() + 4 {
            let plan = plan(&rules, &later);
            check(&rules, &later, &plan)?;
            follow(&rules, &mut later, &plan);
            last = Some(plan);
        }
        let last = last.unwrap();
        prop_assert_eq!(&last.undo, &[] as &[PathBuf; 0]);
        let applied = last.findings.iter().any(|finding| matches!(finding, Finding::Apply(_)));
        prop_assert!(!applied, "{:?}", last.findings);
    }
}
