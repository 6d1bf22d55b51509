//! The callback channel: the guest asks, for as long as its session lasts.

use std::time::Duration;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, uuid};
use crate::qmp::Qmp;

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let path = lab.path(&format!("{name}.sock"));
    Guest::start(&path, Door::Unix, Manner::Good, info(&uuid(number), "boot-1"))
}

/// Nothing is open, and nothing is answered any more.
fn assert_silent(lab: &Lab, guest: &Guest) {
    lab.until("both streams are closed", || guest.open() == 0);
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

#[test]
fn a_guest_without_a_callback_channel_is_talked_to_all_the_same() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").guest("b", 2).start();
    let _a = guest(&lab, "a", 1);
    let b = guest(&lab, "b", 2);
    std::fs::remove_file(lab.path("b.sock.callback")).unwrap();
    let vm = lab.until_vm("a", |vm| vm["callback_reason"] == "no callback-socket is set");
    assert_eq!((&vm["session"], &vm["callback"]), (&"connected".into(), &"none".into()));
    let vm = lab.until_vm("b", |vm| vm["session"] == "connected");
    if b.answers() == 0 {
        let vm = lab.until_vm("b", |vm| {
            vm["callback_reason"].as_str().unwrap().contains("no socket") || vm["callback"] == "open"
        });
        assert_eq!(vm["session"], "connected");
    }
    assert_eq!(vm["sessions"], 1);
}

#[test]
fn when_the_session_ends_nothing_is_served_any_more() {
    let mut lab = Lab::new()
        .vm("off", 1, "unix-socket = '@off.sock'\ncallback-socket = '@off.sock.callback'\nqmp = '@off.qmp'")
        .guest("removed", 2)
        .guest("stays", 3)
        .start();
    let qmp = Qmp::start(&lab.path("off.qmp"), "running");
    let (off, removed, stays) = (guest(&lab, "off", 1), guest(&lab, "removed", 2), guest(&lab, "stays", 3));
    lab.until("all ask", || off.answers() > 0 && removed.answers() > 0 && stays.answers() > 0);
    assert_eq!((off.open(), removed.open(), stays.open()), (2, 2, 2));

    lab.until_vm("off", |vm| vm["power"] == "running");
    drop(qmp);
    assert_silent(&lab, &off);
    let uuid = uuid(2);
    let folder = lab.path("");
    let folder = folder.display();
    let vm = format!(
        "[[vm]]\nname = 'removed'\nuuid = '{uuid}'\nunix-socket = '{folder}removed.sock'\n\
         callback-socket = '{folder}removed.sock.callback'\n"
    );
    lab.edit(&vm, "");
    assert_silent(&lab, &removed);

    let answers = stays.answers();
    lab.until("the other guest is served", || stays.answers() > answers);
    assert_eq!((stays.open(), &lab.info("stays")["sessions"]), (2, &1.into()));
    lab.stop();
    assert_silent(&lab, &stays);
}
