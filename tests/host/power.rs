//! What the hypervisor says, through a QMP socket.

use std::time::Duration;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, assert_fails, text, uuid};
use crate::qmp::Qmp;

fn lab() -> Lab {
    Lab::new()
        .vm("a", 1, "unix-socket = '@a.sock'\nqmp = '@a.qmp'")
        .vm("other", 2, "unix-socket = '@other.sock'")
        .start()
}

fn guest(lab: &Lab, manner: Manner, boot_id: &str) -> Guest {
    Guest::start(&lab.path("a.sock"), Door::Unix, manner, info(&uuid(1), boot_id))
}

#[test]
fn a_vm_that_is_off_is_not_dialled_until_it_runs() {
    let lab = lab();
    drop(std::os::unix::net::UnixListener::bind(lab.path("a.qmp")).unwrap());
    let vm = lab.until_session("a", "gone");
    std::fs::remove_file(lab.path("a.qmp")).unwrap();
    assert_eq!((&vm["power"], &vm["reason"]), (&"off".into(), &"the VM is off".into()));
    let guest = guest(&lab, Manner::Good, "boot-1");
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    assert_eq!(lab.until_session("a", "connected")["power"], "running");

    drop(qmp);
    let vm = lab.until_session("a", "gone");
    assert_eq!(vm["power"], "off");
    lab.until("the stream is closed", || guest.open() == 0);

    let _qmp = Qmp::start(&lab.path("a.qmp"), "paused");
    let vm = lab.until_session("a", "connected");
    assert_eq!((&vm["power"], &vm["sessions"]), (&"paused".into(), &2.into()));
}

#[test]
fn stop_and_continue_keep_the_session_and_a_reset_renews_it() {
    let lab = lab();
    let _other = Guest::start(&lab.path("other.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-1"));
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    let first = guest(&lab, Manner::Good, "boot-1");
    let before = lab.until_vm("a", |vm| vm["session"] == "connected" && vm["power"] == "running");
    lab.until_session("other", "connected");
    let watch = Watch::start(&lab, &["-o", "json"]);

    qmp.event("STOP");
    assert_eq!(watch.event("a", "power-changed")["power"], "paused");
    qmp.event("RESUME");
    assert_eq!(watch.event("a", "power-changed")["power"], "running");
    let after = lab.info("a");
    assert_eq!((&after["since"], &after["sessions"]), (&before["since"], &before["sessions"]));

    qmp.event("RESET");
    qmp.event("RESET");
    watch.event("a", "guest-reset");
    assert_eq!(watch.event("a", "session-closed")["reason"], "the guest was reset");
    assert_eq!(watch.event("a", "session-opened")["rebooted"], false, "this guest's agent has not noticed");
    drop(first);
    let _second = guest(&lab, Manner::Good, "boot-2");
    assert_eq!(watch.event("a", "session-opened")["rebooted"], true);
    let past = Watch::quiet(&lab, &["a", "--since", "1h", "-o", "json"]);
    let resets = std::cell::Cell::new(0);
    past.until(|line| {
        resets.set(resets.get() + line.matches("\"guest-reset\"").count());
        line.contains("\"rebooted\":true")
    });
    assert_eq!(resets.get(), 1, "QEMU tells one reset twice");

    qmp.event("POWERDOWN");
    qmp.event("SHUTDOWN");
    assert_eq!(watch.event("a", "power-changed")["power"], "off");
    assert_eq!(watch.event("a", "session-closed")["reason"], "the VM is off");
    lab.until_session("a", "gone");
}

#[test]
fn the_silence_of_a_paused_guest_means_nothing() {
    let lab = lab();
    let qmp = Qmp::start(&lab.path("a.qmp"), "paused");
    let _guest = guest(&lab, Manner::Mute, "boot-1");
    lab.until_vm("a", |vm| vm["session"] == "connected" && vm["power"] == "paused");
    std::thread::sleep(Duration::from_secs(4));
    let vm = lab.info("a");
    assert_eq!((&vm["session"], &vm["sessions"]), (&"connected".into(), &1.into()));
    qmp.event("RESUME");
    let vm = lab.until_vm("a", |vm| vm["reason"] != "");
    assert_eq!(vm["reason"], "no message from the agent for 2.5 s");
}

#[test]
fn a_call_to_a_paused_guest_is_refused_at_once() {
    let lab = lab();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    let _guest = guest(&lab, Manner::Good, "boot-1");
    lab.until_vm("a", |vm| vm["session"] == "connected" && vm["power"] == "running");
    lab.words(&["ping", "a", "-c", "1"]);
    qmp.event("STOP");
    lab.until_vm("a", |vm| vm["power"] == "paused");
    assert_fails(&lab.ctl(&["ping", "a", "-c", "1"]), 1, "the VM is paused: its guest cannot answer");
    qmp.event("RESUME");
    lab.until_vm("a", |vm| vm["power"] == "running");
    lab.words(&["ping", "a", "-c", "1"]);
}

#[test]
fn a_reset_ends_the_wait_of_a_refused_guest() {
    let lab = lab();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    let clone = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(7), "boot-1"));
    lab.until_vm("a", |vm| vm["session"] == "refused" && vm["power"] == "running");
    drop(clone);
    let _guest = guest(&lab, Manner::Good, "boot-1");
    let asked = std::time::Instant::now();
    qmp.event("RESET");
    lab.until_session("a", "connected");
    assert!(asked.elapsed() < Duration::from_secs(25), "it waited for its next turn");
}

#[test]
fn a_monitor_that_is_not_there_or_held_by_another_keeps_nobody_from_the_guest() {
    let lab = lab();
    let _guest = guest(&lab, Manner::Good, "boot-1");
    let vm = lab.until_session("a", "connected");
    assert_eq!(vm["power"], "unknown", "no socket yet");
    let qmp = lab.path("a.qmp");
    let vm = lab.until_vm("a", |vm| vm["power_problem"] != "");
    let words = format!("{}: the QMP socket has not appeared yet: No such file", text(&qmp));
    assert!(vm["power_problem"].as_str().unwrap().starts_with(&words), "{vm}");
    assert_eq!((&vm["session"], &vm["reason"]), (&"connected".into(), &"".into()));
    assert!(lab.words(&["info", "a"]).contains(&format!("Power:          unknown: {words}")));
    assert!(lab.words(&["ls"]).contains(&format!("  {words}")));
    assert_eq!(lab.info("other")["power_problem"], "", "it has no QMP socket");
    lab.until("the problem is logged", || {
        lab.log().lines().any(|line| line.contains("WARN") && line.contains(qmp.to_str().unwrap()))
    });
    // Takes clients, and never greets them: as QEMU does while another one has its attention.
    let held = std::os::unix::net::UnixListener::bind(&qmp).unwrap();
    let vm = lab.until_vm("a", |vm| vm["power_problem"].as_str().unwrap().contains("does not answer"));
    assert_eq!((&vm["session"], &vm["sessions"]), (&"connected".into(), &1.into()));
    drop(held);
    assert_eq!(lab.until_session("a", "gone")["power_problem"], "");
    std::fs::remove_file(&qmp).unwrap();
    let _qmp = Qmp::start(&qmp, "running");
    assert_eq!(lab.until_vm("a", |vm| vm["power"] == "running")["power_problem"], "");
}

#[test]
fn what_a_guest_drives_fills_no_log() {
    let lab = lab();
    let began = std::time::Instant::now();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    lab.until_vm("a", |vm| vm["power"] == "running");
    for _ in 0..50 {
        qmp.event("STOP");
        qmp.event("RESUME");
    }
    let count = |level: &str| {
        let log = lab.log();
        log.lines().filter(|line| line.contains(level) && line.contains("power=")).count()
    };
    lab.until("all is logged", || count("INFO") + count("DEBUG") == 101);
    let seconds = usize::try_from(began.elapsed().as_secs()).unwrap();
    assert!(count("INFO") <= seconds + 1, "{}", lab.log());
}
