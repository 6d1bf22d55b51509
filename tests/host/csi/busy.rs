//! Guests that ask much: what they ask of volumes costs neither their own session nor their host's log.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use guestlet::wire::proto::csi::{ControllerGetCapabilitiesRequest, CreateVolumeRequest};
use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Disk, DiskAdded, DiskHolder};
use tonic::Code;

use super::mirror::Mirror;
use super::{Machines, USUAL, started, wanted};
use crate::lab::DEADLINE;
use crate::namespace::is_outside;
use crate::neighbour::Pings;

const MIB: i64 = 1 << 20;

#[test]
fn many_calls_about_volumes_leave_the_channel_its_own_budget() {
    // Its agent pings 20 times a second.
    let vms = started(&USUAL[..1], "[limits]\ncalls-per-second = 40");
    let a = vms.of("a");
    let answers = vms.guest("a").answers();
    // 160 of them may come at once; for more than a second the others use up whatever there is to use.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..30 {
                    a.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).unwrap();
                }
            });
        }
    });
    let vm = vms.lab.info("a");
    assert_eq!((&vm["session"], &vm["sessions"]), (&"connected".into(), &1.into()), "{vm}");
    assert!(vms.guest("a").answers() > answers, "its pings were answered meanwhile");
}

#[test]
fn what_a_guest_repeats_in_vain_fills_no_log() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    std::fs::remove_file(vms.file("fast", &id, "raw")).unwrap();
    for _ in 0..40 {
        assert_ne!(a.publish(&id, "a").unwrap_err().code(), Code::Ok);
    }
    let log = vms.lab.log();
    let lines = |level: &str| {
        log.lines().filter(|line| line.contains(level) && line.contains("cannot plug a volume")).count()
    };
    assert_eq!((lines("WARN"), lines("DEBUG")), (1, 39), "{log}");
}

/// A host half with a guest that asks all the time, and a neighbour of it that is pinged.
struct Busy {
    pings: Pings,
    ids: Vec<String>,
    vms: Machines,
}

impl Busy {
    /// The guest that asks has so many disks, each with as many holders as are kept.
    fn start(disks: u64) -> Self {
        let limits = "[limits]\ncalls-per-second = 100000\nevent-burst = 10000\nstate-bytes = 67108864\n\
                      bytes-per-second = 16777216";
        let vms = started(&USUAL, limits);
        for generation in 0..disks {
            let words = || "x".repeat(4);
            let holder = DiskHolder { name: words(), alias: words(), of: words() };
            let disk = Disk { generation, holders: vec![holder; 64], ..Disk::default() };
            vms.guest("a").happen(Kind::DiskAdded(DiskAdded { disk: Some(disk) }));
        }
        vms.lab.until_vm("a", |vm| {
            vm["state"]["disks"].as_array().map_or(0, Vec::len) == usize::try_from(disks).unwrap()
        });
        // What another node has is not taken from it: so the call only looks up which VMs are meant.
        let create = |number| vms.of("a").create(&format!("v{number}"), MIB).unwrap().volume_id;
        let ids: Vec<_> = (0..8).map(create).collect();
        for id in &ids {
            let published = vms.of("a").publish(id, "b");
            assert!(published.is_ok(), "{published:?}\n{}", vms.lab.log());
        }
        Self { pings: Pings::start(&vms.lab, "c"), ids, vms }
    }

    /// The time that 99 of 100 pings of the neighbour take, while the guest asks.
    fn p99(&self) -> Duration {
        let (enough, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
        let begun = Instant::now();
        let taken = std::thread::scope(|scope| {
            for id in &self.ids {
                let (a, enough, calls) = (self.vms.of("a"), &enough, &calls);
                scope.spawn(move || {
                    // Its end is sure, whatever becomes of the pings.
                    while !enough.load(Ordering::SeqCst) && begun.elapsed() < 2 * DEADLINE {
                        a.unpublish(id, "a").unwrap();
                        calls.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            let taken = self.pings.p99(100);
            enough.store(true, Ordering::SeqCst);
            taken
        });
        assert!(calls.load(Ordering::SeqCst) > 50);
        taken
    }
}

/// The same calls, of a guest with one disk and of one with 1,024: what the neighbour's pings take beside them is compared by
/// turns, because the machine has other work, and by the best of the turns so far. Copies of all disks for each call made it
/// 1.4 s in place of 40 ms, whichever turn it was.
#[test]
fn a_guest_with_many_disks_that_asks_all_the_time_does_not_slow_its_neighbour() {
    const TURNS: usize = 12;
    let (quiet, crowded) = (Busy::start(1), Busy::start(1024));
    let mut best = [Duration::MAX; 2];
    for turn in 1..=TURNS {
        for (best, busy) in best.iter_mut().zip([&quiet, &crowded]) {
            *best = busy.p99().min(*best);
        }
        if turn >= 3 && best[1] < 2 * best[0] {
            return;
        }
    }
    panic!("beside a guest with one disk, and with 1,024: {best:?}");
}

/// A guest, and a pool that hangs for longer than anybody waits here; in a mount namespace.
fn beside_a_hung_pool(folder: &Path) -> (Mirror, Machines) {
    let (mirror, pool) = Mirror::below(folder);
    let hung = format!("[[pool]]\nname = 'hung'\npath = '{}'\nanswer-seconds = 600", pool.display());
    let vms = started(&USUAL[..1], &hung);
    vms.of("a").create_in("first", MIB, Some("hung")).unwrap();
    mirror.hang(true);
    (mirror, vms)
}

#[test]
fn calls_that_wait_for_a_pool_that_hangs_leave_room_for_others() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mirror, vms) = beside_a_hung_pool(folder.path());
    let guest = vms.guest("a");
    let (refused, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..64 {
            let (asking, refused, done) = (vms.of("a"), &refused, &done);
            scope.spawn(move || match asking.create_in(&format!("v{number}"), MIB, Some("hung")) {
                Ok(_) => done.fetch_add(1, Ordering::SeqCst),
                Err(status) => {
                    assert!(status.message().contains("too many calls about volumes"), "{status}");
                    refused.fetch_add(1, Ordering::SeqCst)
                }
            });
        }
        // Those that get no place are told so, and the others wait.
        vms.lab.until("they are refused", || refused.load(Ordering::SeqCst) == 48);
        let answers = guest.answers();
        vms.lab.until("its pings are answered", || guest.answers() > answers + 20);
        assert_eq!((done.load(Ordering::SeqCst), &vms.lab.info("a")["callback"]), (0, &"open".into()));
        mirror.hang(false);
    });
    assert_eq!((done.load(Ordering::SeqCst), &vms.lab.info("a")["sessions"]), (16, &1.into()));
}

#[test]
fn calls_that_wait_keep_nothing_that_nobody_reads() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mirror, vms) = beside_a_hung_pool(folder.path());
    let before = vms.lab.memory("VmRSS");
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (asking, done) = (vms.of("a"), &done);
            scope.spawn(move || {
                // Seven bytes each on the wire.
                let secrets = (0..8000).map(|key| (format!("{key:x}"), String::new())).collect();
                let parameters = [("hostStorageClass".to_owned(), "hung".to_owned())].into();
                let request = wanted(&format!("v{number}"), MIB);
                asking.create_volume(CreateVolumeRequest { secrets, parameters, ..request }).unwrap();
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        // One more gets no place: all others wait.
        vms.lab.until("all places are taken", || {
            let refused = vms.of("a").delete("no-such-volume").err();
            refused.is_some_and(|status| status.message().contains("too many calls about volumes"))
        });
        // Kept, they took 18 MiB.
        let taken = vms.lab.memory("VmRSS").saturating_sub(before);
        assert!(taken < 8 << 20, "{} KiB", taken >> 10);
        assert_eq!(done.load(Ordering::SeqCst), 0);
        mirror.hang(false);
    });
    assert_eq!(done.load(Ordering::SeqCst), 16);
}

#[test]
fn a_volume_that_cannot_be_plugged_again_is_logged_once() {
    let mut vms = started(&USUAL[..1], "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.of("a").publish(&id, "a").unwrap();
    vms.end("a");
    let image = vms.file("fast", &id, "raw");
    std::fs::rename(&image, image.with_extension("away")).unwrap();
    vms.boot("a", 1);
    let lines = |vms: &Machines, level: &str| {
        let log = vms.lab.log();
        log.lines().filter(|line| line.contains(level) && line.contains("cannot be plugged again")).count()
    };
    for times in 1..=5 {
        vms.lab.until("it was tried", || lines(&vms, "") >= times);
        // It is looked at when the VM goes on.
        vms.qemu("a").event("STOP");
        vms.lab.until_vm("a", |vm| vm["power"] == "paused");
        vms.qemu("a").event("RESUME");
    }
    assert_eq!(lines(&vms, "WARN"), 1, "{}", vms.lab.log());
    std::fs::rename(image.with_extension("away"), &image).unwrap();
    vms.qemu("a").event("STOP");
    vms.lab.until_vm("a", |vm| vm["power"] == "paused");
    vms.qemu("a").event("RESUME");
    vms.lab.until("it is plugged again", || vms.qemu("a").devices().len() == 1);
}
