//! The callback: the guest asks, for as long as its session lasts.

use std::time::Duration;

use guestlet::wire::proto::v1::GuestInfo;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, uuid};
use crate::qmp::Qmp;

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let path = lab.path(&format!("{name}.sock"));
    Guest::start(&path, Door::Unix, Manner::Good, info(&uuid(number), "boot-1"))
}

/// Nothing is open, and nothing is answered any more.
fn assert_silent(lab: &Lab, guest: &Guest) {
    lab.until("the stream is closed", || guest.open() == 0);
    let answers = guest.answers();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((guest.answers(), guest.open()), (answers, 0));
}

#[test]
fn a_guest_learns_who_it_is_from_the_connection() {
    let lab =
        Lab::new().vm("web-1", 1, "vsock-socket = '@web.vsock'\ncluster = 'dev'").guest("db-1", 2).start();
    let web = Guest::start(&lab.path("web.vsock"), Door::Hybrid, Manner::Good, info(&uuid(1), "boot-1"));
    let db = guest(&lab, "db-1", 2);
    lab.until("both know", || web.answers() > 0 && db.answers() > 0);
    let (one, other) = (web.identity().unwrap(), db.identity().unwrap());
    assert_eq!((one.vm_name.as_str(), one.cluster.as_str(), one.namespace.as_str()), ("web-1", "dev", ""));
    assert_eq!((one.vm_uid.clone(), one.provider_id), (uuid(1), format!("guestlet://{}", uuid(1))));
    assert_eq!((other.vm_name.as_str(), other.vm_uid), ("db-1", uuid(2)));
    assert_eq!(one.host, other.host, "one run of the host half");
    assert_eq!(one.host.unwrap().instance_id.len(), 32);
    assert_eq!(lab.info("web-1")["callback"], "open");
}

/// What an agent of the first release says of itself.
#[test]
fn an_agent_that_has_no_callback_is_talked_to_all_the_same() {
    let lab = Lab::new().guest("a", 1).start();
    let old = GuestInfo { capabilities: vec!["events".into(), "qga".into()], ..info(&uuid(1), "boot-1") };
    let a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, old);
    let vm = lab.until_vm("a", |vm| vm["callback_reason"].as_str().unwrap().contains("the agent is too old"));
    assert_eq!((&vm["session"], &vm["callback"]), (&"connected".into(), &"none".into()));
    assert!(lab.words(&["ping", "-c", "1", "a"]).contains("1 pings, min"));
    assert_eq!((&lab.info("a")["sessions"], a.answers()), (&1.into(), 0));
}

/// What the settings of a guest do not give is said, and neither ends the session nor is asked for again.
#[test]
fn a_guest_that_gives_no_more_than_status_keeps_its_session() {
    let lab = Lab::new().set("topology = { zone = 'a' }").guest("a", 1).start();
    let able = GuestInfo {
        capabilities: ["events", "callback", "topology"].map(str::to_owned).to_vec(),
        ..info(&uuid(1), "boot-1")
    };
    let a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Narrow, able);
    let vm = lab.until_vm("a", |vm| vm["callback_reason"] == "no grant gives the role disks");
    assert_eq!((&vm["session"], &vm["callback"]), (&"connected".into(), &"none".into()));
    lab.until("people see that it is not told where it runs", || {
        lab.words(&["topology"]).contains("no grant gives the role topology")
    });
    // Long enough for another try of either, which come within a second.
    std::thread::sleep(Duration::from_secs(2));
    let tries = {
        let places = a.places();
        (places.callbacks_denied, places.told.len())
    };
    assert_eq!(tries, (1, 1));
    assert_eq!((&lab.info("a")["sessions"], &lab.info("a")["session"]), (&1.into(), &"connected".into()));
    assert!(lab.words(&["ping", "-c", "1", "a"]).contains("1 pings, min"));
}

#[test]
fn keys_of_the_first_release_are_ignored_and_said() {
    let keys = "unix-socket = '@a.sock'\ncallback-socket = '@a.sock.callback'";
    let lab = Lab::new().vm("a", 1, keys).start();
    let a = guest(&lab, "a", 1);
    lab.until("it asks", || a.answers() > 0);
    assert!(lab.log().contains("callback-socket no longer has any effect"), "{}", lab.log());
}

#[test]
fn when_the_session_ends_nothing_is_served_any_more() {
    let mut lab = Lab::new()
        .vm("off", 1, "unix-socket = '@off.sock'\nqmp = '@off.qmp'")
        .guest("removed", 2)
        .guest("stays", 3)
        .start();
    let qmp = Qmp::start(&lab.path("off.qmp"), "running");
    let (off, removed, stays) = (guest(&lab, "off", 1), guest(&lab, "removed", 2), guest(&lab, "stays", 3));
    lab.until("all ask", || off.answers() > 0 && removed.answers() > 0 && stays.answers() > 0);
    assert_eq!((off.open(), removed.open(), stays.open()), (1, 1, 1));

    lab.until_vm("off", |vm| vm["power"] == "running");
    drop(qmp);
    assert_silent(&lab, &off);
    let uuid = uuid(2);
    let folder = lab.path("");
    let folder = folder.display();
    let vm = format!("[[vm]]\nname = 'removed'\nuuid = '{uuid}'\nunix-socket = '{folder}removed.sock'\n");
    lab.edit(&vm, "");
    assert_silent(&lab, &removed);

    let answers = stays.answers();
    lab.until("the other guest is served", || stays.answers() > answers);
    assert_eq!((stays.open(), &lab.info("stays")["sessions"]), (1, &1.into()));
    lab.stop();
    assert_silent(&lab, &stays);
}
