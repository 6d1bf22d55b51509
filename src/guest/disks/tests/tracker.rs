//! Tests the tracker: each state of a disk, and arbitrary orders of the states.

use std::collections::{HashMap, VecDeque};
use std::io;

use proptest::prelude::*;
use tokio::time::Instant;

use super::*;
use crate::guest::disks::identity::KnownDisk;
use crate::guest::disks::tracker::{ANSWER, Change, GOING, MOST_DOUBTS, Seen, Tracker, UDEV, Udev};

impl Machine {
    fn seen(&self, name: &str, udev: Udev) -> Option<Seen> {
        let place = Self::place(name);
        let generation = block::generation(&self.root, &place)?;
        let number = block::number(&self.root, &place)?;
        Some(Seen { place, number, generation, sequence: None, udev })
    }
}

/// Carries out jobs until none is left.
fn work(machine: &Machine, tracker: &mut Tracker, now: Instant) {
    loop {
        let jobs = tracker.jobs(now);
        if jobs.is_empty() {
            return;
        }
        for job in jobs {
            tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), now);
        }
    }
}

fn told(tracker: &mut Tracker) -> Vec<String> {
    let words = |change: Change| match change {
        Change::Touched(_) => None,
        change => Some(spelled(change)),
    };
    tracker.changes().into_iter().filter_map(words).collect()
}

fn spelled(change: Change) -> String {
    let name = |disk: &KnownDisk| {
        format!("{} {}", disk.name, disk.serial().map(identity::Serial::text).unwrap_or_default())
    };
    match change {
        Change::Added(disk) => format!("+ {}", name(&disk)),
        Change::Removed(disk) => format!("- {}", name(&disk)),
        Change::Resized { disk, before } => format!("{before} -> {} {}", disk.bytes, name(&disk)),
        Change::Changed(disk) => format!("* {}", name(&disk)),
        Change::Touched(disk) => format!(". {}", name(&disk)),
        Change::Usurped(disk) => format!("? {}", name(&disk)),
    }
}

#[tokio::test]
async fn a_disk_comes_grows_gets_a_partition_and_goes() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    machine.plug("vda", "data-1", 2048);
    let look = |machine: &Machine, tracker: &mut Tracker| {
        tracker.look("vda", machine.seen("vda", Udev::Absent), true, now);
        work(machine, tracker, now);
        told(tracker)
    };
    assert_eq!(look(&machine, &mut tracker), ["+ vda data-1"]);
    assert!(look(&machine, &mut tracker).is_empty(), "nothing changed");
    machine.write(&format!("{}/size", Machine::place("vda")), "4096\n");
    assert_eq!(look(&machine, &mut tracker), ["1048576 -> 2097152 vda data-1"]);
    let partition = format!("{}/vda1", Machine::place("vda"));
    for (file, text) in [("partition", "1\n"), ("start", "2048\n"), ("size", "100\n"), ("dev", "254:1\n")] {
        machine.write(&format!("{partition}/{file}"), text);
    }
    machine.write(&format!("{partition}/holders/dm-0/dm/name"), "volume\n");
    assert_eq!(look(&machine, &mut tracker), ["* vda data-1"]);
    let disk = Arc::clone(&tracker.list()[0]);
    let [partition] = disk.partitions.as_slice() else { panic!("{disk:?}") };
    assert_eq!((partition.index, partition.start, partition.bytes), (1, 1 << 20, 51200));
    assert_eq!((disk.holders[0].of.as_str(), disk.holders[0].alias.as_deref()), ("vda1", Some("volume")));
    assert_eq!(tracker.held_by("dm-0").len(), 1);
    // The kernel removes the size first.
    let nothing = |machine: &Machine| machine.write(&format!("{}/size", Machine::place("vda")), "0\n");
    nothing(&machine);
    assert!(look(&machine, &mut tracker).is_empty());
    machine.unplug("vda");
    assert_eq!(look(&machine, &mut tracker), ["- vda data-1"]);
    assert!(tracker.list().is_empty() && tracker.is_settled());
    // A disk that loses its size but stays is reported as empty in the end.
    machine.plug("vda", "data-2", 1);
    assert_eq!(look(&machine, &mut tracker), ["+ vda data-2"]);
    nothing(&machine);
    assert!(look(&machine, &mut tracker).is_empty());
    assert!(look(&machine, &mut tracker).is_empty(), "not asked again until it has had its time");
    for turn in 1..=MOST_DOUBTS {
        assert!(told(&mut tracker).is_empty());
        let later = now + GOING * turn;
        assert_eq!(tracker.deadline(), Some(later));
        tracker.expire(later);
        let [job] = &tracker.jobs(later)[..] else { panic!() };
        assert!(job.anew, "it may be another one");
        tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), later);
    }
    assert_eq!(told(&mut tracker), ["512 -> 0 vda data-2"]);
    assert!(tracker.is_settled() && tracker.deadline().is_none());
    // A disk that has no size when it appears is reported once it has one.
    machine.plug("vdb", "data-3", 0);
    tracker.look("vdb", machine.seen("vdb", Udev::Absent), true, now);
    work(&machine, &mut tracker, now);
    assert!(told(&mut tracker).is_empty());
    machine.write(&format!("{}/size", Machine::place("vdb")), "1\n");
    tracker.expire(now + GOING);
    work(&machine, &mut tracker, now + GOING);
    assert_eq!(told(&mut tracker), ["+ vdb data-3"]);
    assert_eq!(tracker.list()[1].bytes, 512);
}

#[tokio::test]
async fn another_disk_at_the_same_place_is_another_disk() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    machine.plug("vda", "one", 1);
    tracker.look("vda", machine.seen("vda", Udev::Absent), true, now);
    work(&machine, &mut tracker, now);
    let first = tracker.list()[0].generation;
    machine.unplug("vda");
    machine.plug("vda", "two", 1);
    tracker.look("vda", machine.seen("vda", Udev::Absent), true, now);
    work(&machine, &mut tracker, now);
    assert_eq!(told(&mut tracker), ["+ vda one", "- vda one", "+ vda two"]);
    assert_ne!(tracker.list()[0].generation, first);
}

#[tokio::test]
async fn the_end_of_a_disk_counts_while_sysfs_still_shows_it_but_not_that_of_one_before_it() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    machine.plug("vda", "one", 1);
    let seen = |sequence| machine.seen("vda", Udev::Absent).map(|seen| Seen { sequence, ..seen });
    for (here, gone, stays) in
        [(None, None, false), (Some(7), Some(7), false), (Some(7), Some(6), true), (Some(7), None, false)]
    {
        tracker.look("vda", seen(here), true, now);
        work(&machine, &mut tracker, now);
        tracker.changes();
        tracker.removed("vda", gone, seen(here), now);
        let expected: &[&str] = if stays { &[] } else { &["- vda one"] };
        assert_eq!(told(&mut tracker), expected, "{here:?} {gone:?}");
    }
}

#[tokio::test]
async fn a_disk_that_the_kernel_takes_for_another_is_no_disk() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    machine.plug("sda", "", 1);
    let page = |serial: &str| machine.write(&format!("{}/device/serial", Machine::place("sda")), serial);
    page("one");
    let look = |tracker: &mut Tracker| {
        tracker.look("sda", machine.seen("sda", Udev::Absent), true, now);
        work(&machine, tracker, now);
        told(tracker)
    };
    assert_eq!(look(&mut tracker), ["+ sda one"]);
    let device = Machine::place("sda").replace("/block/sda", "");
    tracker.reset(&device);
    let [job] = &tracker.jobs(now)[..] else { panic!() };
    assert!(job.anew);
    tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), now);
    assert!(told(&mut tracker).is_empty(), "it is the same");
    tracker.reset_all();
    let [job] = &tracker.jobs(now)[..] else { panic!() };
    assert!(job.anew);
    tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), now);
    assert!(told(&mut tracker).is_empty(), "it still is");
    page("two");
    assert_eq!(look(&mut tracker), ["- sda one", "? sda two"]);
    assert!(look(&mut tracker).is_empty() && tracker.list().is_empty());
    // The kernel detects the disk afresh.
    machine.unplug("sda");
    assert!(look(&mut tracker).is_empty());
    machine.plug("sda", "", 1);
    page("two");
    // The device was reset once more while the disk was queried for the first time.
    tracker.reset(&device);
    tracker.look("sda", machine.seen("sda", Udev::Absent), true, now);
    assert!(tracker.jobs(now)[0].anew);
    work(&machine, &mut tracker, now);
}

#[tokio::test]
async fn a_disk_that_does_not_answer_is_known_without_its_serial_number_and_with_it_when_it_does() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    for name in ["vda", "vdb", "vdc", "vdd", "vde"] {
        machine.plug(name, name, 1);
        tracker.look(name, machine.seen(name, Udev::Absent), true, now);
    }
    let hanging = tracker.jobs(now);
    assert_eq!(hanging.len(), 4, "so many at a time");
    assert!(tracker.jobs(now).is_empty());
    assert_eq!(tracker.deadline(), Some(now + ANSWER));
    let later = now + ANSWER;
    tracker.expire(later);
    work(&machine, &mut tracker, later);
    let mut known = told(&mut tracker);
    known.sort();
    assert_eq!(known, ["+ vda ", "+ vdb ", "+ vdc ", "+ vdd ", "+ vde vde"]);
    assert!(tracker.list()[0].silent && !tracker.list()[4].silent);

    // A reset of all disks must not query them a second time, or each would cost a thread.
    tracker.reset_all();
    for job in tracker.jobs(later) {
        assert_eq!((&job.asked, job.anew), (&Asked::Silent, false), "{}", job.place);
        tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), later);
    }
    work(&machine, &mut tracker, later);

    // One is unplugged, one responds, and one turns out to have disappeared.
    machine.unplug("vda");
    tracker.look("vda", None, true, later);
    for job in &hanging[..2] {
        tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), now);
    }
    tracker.done(hanging[2].id, Err(io::ErrorKind::NotFound.into()), later);
    work(&machine, &mut tracker, later);
    assert_eq!(told(&mut tracker), ["- vda ", "* vdb vdb"]);
    assert_eq!(tracker.list().iter().filter(|disk| disk.silent).count(), 2);
    assert!(tracker.is_settled() && tracker.deadline().is_none());
}

#[tokio::test]
async fn where_udev_runs_a_disk_is_known_once_udev_has_processed_it_and_not_the_one_before() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    let look = |tracker: &mut Tracker, udev, now| {
        tracker.look("vda", machine.seen("vda", udev), true, now);
        work(&machine, tracker, now);
        told(tracker)
    };
    machine.plug("vda", "one", 1);
    assert!(look(&mut tracker, Udev::Pending, now).is_empty());
    assert!(look(&mut tracker, Udev::Pending, now).is_empty());
    assert_eq!(tracker.for_udev().len(), 1);
    assert!(!tracker.is_settled());
    // The disk has been read by then.
    tracker.look("vda", machine.seen("vda", Udev::Processed(5)), false, now);
    assert!(tracker.jobs(now).is_empty());
    assert_eq!(told(&mut tracker), ["+ vda one"]);
    assert!(tracker.for_udev().is_empty() && tracker.is_settled());

    machine.unplug("vda");
    machine.plug("vda", "two", 1);
    // First udev's entry of the previous disk is still there, then it is deleted, then the new one appears.
    assert_eq!(look(&mut tracker, Udev::Processed(5), now), ["- vda one"]);
    assert!(look(&mut tracker, Udev::Pending, now).is_empty());
    assert_eq!(look(&mut tracker, Udev::Processed(9), now), ["+ vda two"]);

    machine.unplug("vda");
    machine.plug("vda", "three", 1);
    assert_eq!(look(&mut tracker, Udev::Processed(9), now), ["- vda two"]);
    tracker.expire(now + UDEV / 2);
    assert!(look(&mut tracker, Udev::Processed(9), now).is_empty());
    tracker.expire(now + UDEV);
    assert_eq!(look(&mut tracker, Udev::Processed(9), now + UDEV), ["+ vda three"]);
}

#[tokio::test]
async fn a_disk_is_not_opened_before_udev_has_processed_it() {
    let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
    let look = |tracker: &mut Tracker, udev| tracker.look("vda", machine.seen("vda", udev), false, now);
    let asked = |tracker: &mut Tracker| {
        let jobs = tracker.jobs(now);
        let [job] = jobs.as_slice() else { panic!("{jobs:?}") };
        (job.id, job.asked.clone())
    };
    let read = || identity::read(&machine.root, &Machine::place("vda"), &Asked::AskUnopened);
    // A disk that reports no serial number that way is read again.
    machine.plug("vda", "", 1);
    machine.write(&format!("{}/device/type", Machine::place("vda")), "0\n");
    look(&mut tracker, Udev::Pending);
    let (early, how) = asked(&mut tracker);
    assert_eq!(how, Asked::AskUnopened);
    tracker.done(early, read(), now);
    assert!(tracker.jobs(now).is_empty() && told(&mut tracker).is_empty());
    look(&mut tracker, Udev::Processed(5));
    let (late, how) = asked(&mut tracker);
    assert_ne!(how, Asked::AskUnopened);
    tracker.done(late, read(), now);
    assert_eq!(told(&mut tracker), ["+ vda "]);
    machine.unplug("vda");
    look(&mut tracker, Udev::Pending);

    // The same holds if it is still being read when udev is done; a disk with a serial number is not read again.
    for (serial, reads) in [("", 2), ("one", 1)] {
        machine.plug("vda", serial, 1);
        look(&mut tracker, Udev::Pending);
        let (early, _) = asked(&mut tracker);
        look(&mut tracker, Udev::Processed(9 + reads));
        tracker.done(early, read(), now);
        assert_eq!(tracker.jobs(now).len() as u64, reads - 1, "{serial}");
        work(&machine, &mut tracker, now);
        machine.unplug("vda");
        look(&mut tracker, Udev::Pending);
        told(&mut tracker);
    }

    // A change that was read meanwhile counts, and so does the disappearance of the disk.
    machine.plug("vda", "one", 1);
    look(&mut tracker, Udev::Pending);
    work(&machine, &mut tracker, now);
    machine.write(&format!("{}/size", Machine::place("vda")), "2\n");
    tracker.look("vda", machine.seen("vda", Udev::Pending), true, now);
    work(&machine, &mut tracker, now);
    look(&mut tracker, Udev::Processed(20));
    assert_eq!(tracker.list()[0].bytes, 1024);
    assert_eq!(told(&mut tracker), ["+ vda one"]);
    machine.unplug("vda");
    // Once udev is done, a second read is not waited for, unless the disk may have been replaced.
    for (anew, expected) in
        [(false, ["+ vda one", "1024 -> 1536 vda one"].as_slice()), (true, &["+ vda one"])]
    {
        look(&mut tracker, Udev::Pending);
        told(&mut tracker);
        machine.plug("vda", "one", 2);
        look(&mut tracker, Udev::Pending);
        work(&machine, &mut tracker, now);
        if anew {
            tracker.reset(&Machine::place("vda").replace("/block/vda", ""));
        } else {
            tracker.look("vda", machine.seen("vda", Udev::Pending), true, now);
        }
        let (again, _) = asked(&mut tracker);
        look(&mut tracker, Udev::Processed(30 + u64::from(anew)));
        let early = told(&mut tracker);
        assert_eq!(early.is_empty(), anew, "{early:?}");
        machine.write(&format!("{}/size", Machine::place("vda")), "3\n");
        tracker.done(again, read(), now);
        assert_eq!([early, told(&mut tracker)].concat(), expected);
        machine.unplug("vda");
    }
    machine.plug("vda", "two", 1);
    look(&mut tracker, Udev::Pending);
    work(&machine, &mut tracker, now);
    machine.unplug("vda");
    look(&mut tracker, Udev::Pending);
    assert_eq!(told(&mut tracker), ["- vda one"], "the other one was never told");
    assert!(tracker.is_settled());
}

/// Events on a machine and its tracker, in any order.
#[derive(Debug, Clone)]
enum Step {
    Plug(u8),
    Unplug(u8),
    /// The tracker receives the next message of the kernel.
    Hear,
    /// All messages that have not been received are lost.
    Lose,
    /// As many reads finish as given.
    Work(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0_u8..4).prop_map(Step::Plug),
        3 => (0_u8..4).prop_map(Step::Unplug),
        4 => Just(Step::Hear),
        1 => Just(Step::Lose),
        4 => (1_usize..4).prop_map(Step::Work),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_order_none_is_lost_and_none_is_wrong(steps in prop::collection::vec(step(), 0..60), counted: bool) {
        let (machine, mut tracker, now) = (Machine::new(), Tracker::default(), Instant::now());
        let name = |number: u8| format!("vd{}", char::from(b'a' + number));
        let mut there: HashMap<u8, u64> = HashMap::new();
        let (mut words, mut lost, mut count) = (VecDeque::new(), false, 0);
        let mut jobs = Vec::new();
        let mut state: Vec<(String, String)> = Vec::new();
        // Finally everything settles.
        let end = [Step::Lose].into_iter().cycle().take(1).chain(std::iter::repeat_n(Step::Hear, 100)).chain([Step::Work(1000)]);
        for step in steps.into_iter().chain(end) {
            match step {
                Step::Plug(number) if !there.contains_key(&number) => {
                    count += 1;
                    machine.plug(&name(number), &format!("serial-{count}"), 1);
                    there.insert(number, count);
                    words.push_back((number, true, count));
                }
                Step::Unplug(number) => {
                    if let Some(was) = there.remove(&number) {
                        machine.unplug(&name(number));
                        words.push_back((number, false, was));
                    }
                }
                Step::Plug(_) => {}
                Step::Lose => {
                    words.clear();
                    lost = true;
                }
                Step::Hear => {
                    let look = |number: u8| {
                        let sequence = there.get(&number).copied().filter(|_| counted);
                        machine.seen(&name(number), Udev::Absent).map(|seen| Seen { sequence, ..seen })
                    };
                    if std::mem::take(&mut lost) {
                        for number in 0..4 {
                            tracker.look(&name(number), look(number), true, now);
                        }
                    } else if let Some((number, added, was)) = words.pop_front() {
                        if added {
                            tracker.look(&name(number), look(number), true, now);
                        } else {
                            tracker.removed(&name(number), Some(was).filter(|_| counted), look(number), now);
                        }
                    }
                }
                Step::Work(many) => {
                    for _ in 0..many {
                        jobs.extend(tracker.jobs(now));
                        if jobs.is_empty() {
                            break;
                        }
                        let job = jobs.remove(0);
                        tracker.done(job.id, identity::read(&machine.root, &job.place, &job.asked), now);
                    }
                }
            }
            for change in tracker.changes() {
                let of = |disk: &KnownDisk| (disk.name.clone(), disk.serial().unwrap().text());
                match change {
                    Change::Added(disk) => {
                        prop_assert!(state.iter().all(|(name, _)| *name != disk.name), "twice {}", disk.name);
                        state.push(of(&disk));
                    }
                    Change::Removed(disk) => {
                        let place = state.iter().position(|known| *known == of(&disk));
                        state.remove(place.expect("what was not told is taken back"));
                    }
                    Change::Touched(_) => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
        let mut expected: Vec<_> =
            there.iter().map(|(number, count)| (name(*number), format!("serial-{count}"))).collect();
        expected.sort();
        state.sort();
        prop_assert_eq!(state, expected);
        prop_assert!(tracker.is_settled());
    }
}
