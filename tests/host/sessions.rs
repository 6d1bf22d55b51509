//! Sessions come, go, and come back.

use std::time::Duration;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, uuid};

#[test]
fn a_guest_that_vanishes_is_dialled_again_and_a_new_boot_is_noticed() {
    let lab = Lab::new()
        .vm("a", 1, "vsock-socket = '@a.vsock'")
        .vm("other", 2, "unix-socket = '@other.sock'")
        .start();
    let start = |boot| Guest::start(&lab.path("a.vsock"), Door::Hybrid, Manner::Good, info(&uuid(1), boot));
    let _other = Guest::start(&lab.path("other.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-1"));
    let guest = start("boot-1");
    lab.until_session("a", "connected");
    let untouched = lab.until_session("other", "connected");
    let watch = Watch::start(&lab, &["-o", "json"]);

    drop(guest);
    let closed = watch.event("a", "session-closed");
    assert!(closed["reason"].as_str().unwrap().contains("connection"), "{closed}");
    let vm = lab.until_session("a", "connecting");
    assert_eq!(vm["guest"]["boot_id"], "boot-1", "what was last known stays");

    let guest = start("boot-1");
    assert_eq!(watch.event("a", "session-opened")["rebooted"], false, "only the agent had ended");
    watch.event("a", "agent-ready");
    drop(guest);
    let _guest = start("boot-2");
    assert_eq!(watch.event("a", "session-opened")["rebooted"], true);
    let vm = lab.until_vm("a", |vm| vm["session"] == "connected" && vm["sessions"] == 3);
    assert_eq!(vm["guest"]["boot_id"], "boot-2");
    assert_eq!(vm["reason"], "");

    let other = lab.info("other");
    assert_eq!((&other["since"], &other["sessions"]), (&untouched["since"], &untouched["sessions"]));
}

#[test]
fn nobody_listening_in_the_guest_is_a_reason() {
    let lab = Lab::new().vm("a", 1, "vsock-socket = '@a.vsock'").start();
    let door = Guest::start(&lab.path("a.vsock"), Door::HybridClosed, Manner::Good, info("", ""));
    lab.until_vm("a", |vm| vm["reason"] == "nothing listens in the guest");
    drop(door);
    let _guest = Guest::start(&lab.path("a.vsock"), Door::Hybrid, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_session("a", "connected");
}

/// What is not told proves nothing, and each side of "none" has to be expected.
#[test]
fn a_guest_without_a_dmi_uuid_is_taken_only_where_none_is_expected() {
    let lab = Lab::new()
        .vm("a", 1, "unix-socket = '@a.sock'")
        .vm("none", 2, "unix-socket = '@none.sock'\ndmi-uuid = 'none'")
        .vm("wrong", 3, "unix-socket = '@wrong.sock'\ndmi-uuid = 'none'")
        .vm("another", 4, &format!("unix-socket = '@another.sock'\ndmi-uuid = '{}'", uuid(5)))
        .start();
    let start = |name: &str, dmi: &str| {
        let path = lab.path(&format!("{name}.sock"));
        Guest::start(&path, Door::Unix, Manner::Good, info(dmi, "boot-1"))
    };
    let guest = start("a", "");
    let _others = [start("none", ""), start("wrong", &uuid(3)), start("another", &uuid(5))];
    let reason = |name: &str| lab.until_session(name, "refused")["reason"].as_str().unwrap().to_owned();
    let refused = reason("a");
    assert!(refused.starts_with("the guest reports no DMI UUID, expected"), "{refused}");
    assert!(refused.contains(&uuid(1)) && refused.contains("dmi-uuid = \"none\""), "{refused}");
    lab.until("the stream is closed", || guest.open() == 0);
    assert!(lab.info("a")["guest"].is_null());
    assert!(lab.words(&["ls"]).contains("the guest reports no DMI UUID"));
    assert_eq!(lab.until_session("none", "connected")["guest"]["dmi_uuid"], "");
    let refused = reason("wrong");
    assert!(refused.contains(&uuid(3)) && refused.contains("its VM has none"), "{refused}");
    let vm = lab.until_session("another", "connected");
    assert_eq!((&vm["uuid"], &vm["guest"]["dmi_uuid"]), (&uuid(4).into(), &uuid(5).into()));
}

#[test]
fn another_guest_than_the_expected_is_refused() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(9), "boot-1"));
    let vm = lab.until_session("a", "refused");
    let reason = vm["reason"].as_str().unwrap();
    assert!(reason.contains(&uuid(1)) && reason.contains(&uuid(9)), "{reason}");
    assert_eq!((&vm["sessions"], vm["guest"].is_null()), (&0.into(), true));
    lab.until("the stream is closed", || guest.open() == 0);
    assert!(lab.words(&["ls"]).contains("the guest's DMI UUID is"));
}

#[test]
fn a_uuid_in_capitals_is_the_same_one() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let info = info(&uuid(1).to_uppercase(), "boot-1");
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info);
    assert_eq!(lab.until_session("a", "connected")["guest"]["dmi_uuid"], uuid(1));
}

#[test]
fn silence_ends_a_session_and_the_stream() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Mute, info(&uuid(1), "boot-1"));
    lab.until_session("a", "connected");
    let vm = lab.until_vm("a", |vm| vm["reason"] != "");
    assert_eq!(vm["reason"], "no message from the agent for 2.5 s");
    lab.until_vm("a", |vm| vm["sessions"].as_u64().unwrap() >= 2);
    lab.until("the stream of the session before is closed", || guest.open() <= 1);
}

#[test]
fn a_guest_that_takes_the_stream_and_says_nothing_is_no_session() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Silent, info(&uuid(1), "boot-1"));
    lab.until_vm("a", |vm| vm["reason"] == "the agent does not answer");
    assert_eq!(lab.info("a")["sessions"], 0);
    lab.until("it is dialled again", || guest.open() == 1);
}

#[test]
fn a_guest_that_is_opened_and_closed_costs_little() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Fickle, info(&uuid(1), "boot-1"));
    let count = || lab.info("a")["sessions"].as_u64().unwrap();
    lab.until("it is dialled again and again", || count() >= 5);
    // By now the waits are at their greatest, up to 500 ms; eager ones would give some 24 sessions.
    let before = count();
    std::thread::sleep(Duration::from_secs(3));
    let more = count() - before;
    assert!(more < 15, "{more} sessions in 3 s");
}
