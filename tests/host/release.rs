//! What the agent in a guest has to say when disks are attached and detached.

use serde_json::{Value, json};
use tonic::Code;

use crate::guest::{Door, Guest, Manner, info};
use crate::hypervisor::{self, Hypervisor};
use crate::lab::{Lab, assert_fails, uuid};

const ATTACH: [&str; 7] = ["disk", "attach", "a", "--size", "1M", "--serial", "data"];
const DETACH: [&str; 5] = ["disk", "detach", "a", "--serial", "data"];

/// A daemon with one VM, whose agent can do this.
fn started(capabilities: &[&str]) -> (Lab, Hypervisor, Guest) {
    let lab = Lab::new();
    let lab = lab.set("limits.busy-seconds = 1").vm(
        "a",
        1,
        "unix-socket = '@a.sock'
qmp = '@a.qmp'",
    );
    let qemu = Hypervisor::start(&lab.path("a.qmp"), &[]);
    let mut info = info(&uuid(1), "boot-1");
    info.capabilities = capabilities.iter().map(|&one| one.to_owned()).collect();
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info);
    let lab = lab.start();
    lab.until_vm("a", |vm| vm["power"] == "running" && vm["session"] == "connected");
    (lab, qemu, guest)
}

fn ask(lab: &Lab, arguments: &[&str]) -> Value {
    serde_json::from_str(&lab.words(&[&["-o", "json"], arguments].concat())).unwrap()
}

/// What the guest was asked since the last call.
fn asked(guest: &Guest) -> Vec<String> {
    std::mem::take(&mut guest.disks().asked)
}

#[test]
fn the_guest_says_that_it_sees_a_disk_and_releases_it() {
    let (lab, qemu, guest) = started(&["disks"]);
    let unseen = ask(&lab, &ATTACH);
    assert_eq!(unseen["guest_problem"], "it has not done so within 10 s");
    assert!(
        lab.words(&ATTACH)
            .ends_with("\nIt is not known whether the guest sees it: it has not done so within 10 s.\n")
    );
    guest.disks().seen.insert("data".to_owned(), "sdb\u{1b}".to_owned());
    assert_eq!(ask(&lab, &ATTACH)["guest_name"], "sdb\u{fffd}");
    guest.disks().seen.insert("data".to_owned(), "sdb".to_owned());
    assert!(lab.words(&ATTACH).ends_with("\nThe guest sees it as sdb.\n"));
    assert_eq!(asked(&guest), ["find data"; 4]);
    let listed = ask(&lab, &["disk", "ls", "a"]);
    assert_eq!(listed[1].get("guest_name"), None, "{listed}");

    assert_eq!(ask(&lab, &DETACH), json!({ "serial": "data", "was_attached": true }));
    assert_eq!(asked(&guest), ["release data"]);
    assert!(qemu.devices().is_empty());
    // Nobody is asked about a disk that is not there.
    assert_eq!(ask(&lab, &DETACH)["was_attached"], false);
    assert_eq!(asked(&guest), [""; 0]);
}

#[test]
fn a_disk_in_use_stays_unless_it_is_forced_away() {
    let (lab, qemu, guest) = started(&["events", "disks"]);
    lab.words(&ATTACH);
    for (code, words) in [
        (Code::FailedPrecondition, "the disk sdb is in use: mounted at /srv"),
        (Code::Aborted, "something is being done to it"),
        (Code::DeadlineExceeded, "it does not answer"),
        (Code::Internal, "cannot flush it"),
        (Code::Unimplemented, "no such call"),
    ] {
        guest.disks().refusal = Some((code, words.to_owned()));
        qemu.commands();
        let refused = format!("the guest does not release the disk \"data\": {words}; it stays attached");
        assert_fails(&lab.ctl(&DETACH), 1, &refused);
        assert!(!qemu.commands().contains(&"device_del".to_owned()), "{words}");
    }
    assert_eq!(qemu.devices().len(), 1);
    asked(&guest);
    let forced = ask(&lab, &[&DETACH[..], &["--force"]].concat());
    assert_eq!(forced, json!({ "serial": "data", "was_attached": true, "not_released": "no such call" }));
    assert_eq!((asked(&guest), qemu.devices()), (vec!["release data".to_owned()], vec![]));
}

#[test]
fn a_guest_whose_disk_stays_after_all_finds_it_again() {
    let (lab, qemu, guest) = started(&["disks"]);
    lab.words(&ATTACH);
    asked(&guest);
    qemu.guest_is(hypervisor::Manner::Stubborn);
    assert_fails(&lab.ctl(&DETACH), 1, "the guest refuses to release");
    assert_eq!(asked(&guest), ["release data", "find data"]);
    // What goes late is gone soon: nobody should use it until then.
    qemu.guest_is(hypervisor::Manner::Slow);
    assert_fails(&lab.ctl(&[&DETACH[..], &["--wait", "1"]].concat()), 1, "the guest has not released");
    assert_eq!(asked(&guest), ["release data"]);
}

#[test]
fn where_nobody_can_be_asked_a_disk_is_only_forced_away() {
    let (lab, qemu, guest) = started(&["events", "qga"]);
    let old = "the agent in this guest is too old: it lacks the capability \"disks\"";
    assert_eq!(ask(&lab, &ATTACH)["guest_problem"], old);
    assert_fails(&lab.ctl(&DETACH), 1, old);
    assert_eq!(asked(&guest), [""; 0]);
    drop(guest);
    lab.until_session("a", "connecting");
    let none = "there is no session with an agent in this guest";
    assert_eq!(ask(&lab, &ATTACH)["guest_problem"], none);
    assert_fails(&lab.ctl(&DETACH), 1, &format!("{none}; it stays attached unless --force is given"));
    assert_eq!(qemu.devices().len(), 1);
    let forced = lab.words(&[&DETACH[..], &["--force"]].concat());
    assert_eq!(forced, format!("data: detached\nThe guest had not released it: {none}\n"));
    assert!(qemu.devices().is_empty());
}

#[test]
fn a_serial_number_of_a_kubernetes_volume_is_whole_on_scsi() {
    let (lab, qemu, guest) = started(&["disks"]);
    let serial = "pvc-11111111-2222-3333-4444-555555555555";
    let attach = |serial: &'static str, rest: &[&'static str]| {
        [&["disk", "attach", "a", "--size", "1M", "--serial", serial], rest].concat()
    };
    assert_eq!(ask(&lab, &attach(serial, &[]))["serial"], serial);
    let device = &qemu.devices()[0];
    assert_eq!([&device["serial"], &device["device_id"]], [&serial[..36], serial]);
    // It is read back in full, and is the one that was attached.
    assert_eq!(ask(&lab, &attach(serial, &[]))["serial"], serial);
    assert_eq!(ask(&lab, &["disk", "ls", "a"])[1]["serial"], serial);
    assert_eq!(asked(&guest), [format!("find {serial}"), format!("find {serial}")]);
    let other = "pvc-11111111-2222-3333-4444-555555555566";
    ask(&lab, &attach(other, &[]));
    assert_eq!(qemu.devices().len(), 2);
    // A guest could not tell it from the beginnings of the others.
    assert_fails(&lab.ctl(&attach("pvc-11111111-2222-3333-4444-55555555", &[])), 1, "is in use: guestlet-");
    assert_fails(
        &lab.ctl(&attach(serial, &["--bus", "virtio"])),
        1,
        "has 40 bytes, but a guest can read only 20",
    );
    for serial in [serial, other] {
        assert_eq!(ask(&lab, &["disk", "detach", "a", "--serial", serial])["was_attached"], true);
    }
    assert!(qemu.devices().is_empty() && qemu.nodes().is_empty());
}
