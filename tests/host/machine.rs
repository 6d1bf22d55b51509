//! What people ask of the agent in a guest: whose word it is, what a guest can do to the host half by its answers or by none, and
//! what shows that a guest is down.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, assert_fails, uuid, wait};
use crate::qmp::Qmp;

const PING: &str = r#"{"execute":"guest-ping"}"#;

/// A guest whose agent answers what people ask.
fn guest(lab: &Lab, name: &str, number: u8, boot: &str) -> Guest {
    let mut said = info(&uuid(number), boot);
    said.capabilities.push("machine".into());
    let guest = Guest::start(&lab.path(&format!("{name}.sock")), Door::Unix, Manner::Good, said);
    lab.until_session(name, "connected");
    guest
}

#[test]
fn a_command_is_handed_on_with_its_caller_and_its_answer_shown_whatever_it_is() {
    let lab = Lab::new().guest("a", 1).guest("old", 2).start();
    let a = guest(&lab, "a", 1, "boot-1");
    a.machine().lock().answer = Some(b"{\"return\":{}}\n".to_vec());
    assert_eq!(lab.words(&["qga", "a", PING]), "{\"return\":{}}\n");
    let asked = a.machine().lock().asked.clone();
    assert_eq!(asked.len(), 1);
    assert!(asked[0].0 == PING && asked[0].1.starts_with("uid:0"), "{asked:?}");
    assert!(lab.log().contains("audit: uid:0 root: qga \"a\" \"guest-ping\": allowed, OK"), "{}", lab.log());

    // As qemu-ga says that something failed.
    let failure = r#"{"error":{"class":"GenericError","desc":"no"}}"#;
    a.machine().lock().answer = Some(format!("{failure}\n").into_bytes());
    let output = lab.ctl(&["qga", "a", PING]);
    assert_fails(&output, 1, "the guest answered: GenericError: no");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), failure);

    // What would steer a terminal is written so that it does not, and what is no answer is none.
    a.machine().lock().answer = Some("{\"return\":\"\u{9b}2J\u{202e}x\u{1f600}\"}\r\n".as_bytes().to_vec());
    assert_eq!(lab.words(&["qga", "a", PING]), "{\"return\":\"\\u009b2J\\u202ex\u{1f600}\"}\n");
    for garbage in [&b"\x1b[2J"[..], b"{\"return\":\"\x1b\"}", b"\xff\xfe", b"{\"return\""] {
        a.machine().lock().answer = Some(garbage.to_vec());
        assert_fails(&lab.ctl(&["qga", "a", PING]), 1, "what the guest answered is not JSON");
    }
    a.machine().lock().answer = Some(vec![b' '; 1 << 20]);
    assert_fails(&lab.ctl(&["qga", "a", PING]), 1, "too large");
    a.machine().lock().answer = Some(b"{\"return\":{}}\n".to_vec());
    assert_eq!(lab.words(&["qga", "a", PING]), "{\"return\":{}}\n", "the session has lasted");
    assert_eq!(lab.info("a")["sessions"], 1);
    assert_fails(&lab.ctl(&["suspend", "a", "--to", "both"]), 1, "suspended to both: no\u{fffd}[2J swap");

    assert_fails(&lab.ctl(&["qga", "old", PING]), 1, "there is no session with this guest now");
    let _old = Guest::start(&lab.path("old.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-1"));
    lab.until_session("old", "connected");
    assert_fails(&lab.ctl(&["qga", "old", PING]), 1, "the agent in the guest of \"old\" is too old for this");
    assert_fails(&lab.ctl(&["qga", "nobody", PING]), 4, "knows no VM named \"nobody\"");
}

#[test]
fn a_guest_that_does_not_answer_keeps_up_only_those_who_ask_it() {
    let lab = Lab::new().guest("hangs", 1).guest("well", 2).start();
    let hangs = guest(&lab, "hangs", 1, "boot-1");
    let well = guest(&lab, "well", 2, "boot-1");
    well.machine().lock().answer = Some(b"{\"return\":{}}\n".to_vec());
    let ask = || {
        let mut command: Command = lab.ctl_command(&["qga", "hangs", PING, "--timeout", "20s"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut asking: Vec<_> = (0..40).map(|_| ask()).collect();
    lab.until("as many as may wait do, and more are refused", || {
        lab.log().matches("qga \"hangs\" \"guest-ping\": allowed, RESOURCE_EXHAUSTED").count() >= 8
    });
    assert!(hangs.machine().lock().asked.len() <= 3, "so many are asked of one guest at a time");
    let begun = Instant::now();
    assert_eq!(lab.words(&["qga", "well", PING]), "{\"return\":{}}\n");
    assert!(lab.words(&["ping", "-c", "1", "hangs"]).contains("1 pings"), "its session is well");
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    let mut late = 0;
    for child in &mut asking {
        assert_eq!(wait(child).code(), Some(1));
        let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        late +=
            usize::from(words.contains("no answer within 20 s: it is not known whether the guest did it"));
        assert!(words.contains("no answer within") || words.contains("32 calls of this guest"), "{words}");
    }
    assert_eq!(late, 32);
    // Those who have given up keep nobody up.
    hangs.machine().lock().answer = Some(b"{\"return\":{}}\n".to_vec());
    assert_eq!(lab.words(&["qga", "hangs", PING]), "{\"return\":{}}\n");
}

/// It would run the program without a session, and nobody would notice.
#[test]
fn an_agent_that_opens_no_sessions_is_not_asked_to() {
    let lab = Lab::new().guest("a", 1).start();
    let a = guest(&lab, "a", 1, "boot-1");
    assert_fails(
        &lab.ctl(&["exec", "--login", "a", "--", "true"]),
        125,
        "the agent in the guest of \"a\" is too old for this",
    );
    assert!(a.machine().lock().asked.is_empty());
}

/// However fast people ask, a guest is not taken for one that says too much.
#[test]
fn many_large_answers_do_not_end_a_session() {
    let lab = Lab::new().set("limits = { bytes-per-second = 262144 }").guest("a", 1).start();
    let a = guest(&lab, "a", 1, "boot-1");
    let answer = format!("{{\"return\":\"{}\"}}\n", "x".repeat(150 << 10));
    a.machine().lock().answer = Some(answer.clone().into_bytes());
    // 3.6 MB, of which a guest may send 2 at once.
    for _ in 0..24 {
        assert_eq!(lab.words(&["qga", "a", PING]), answer);
    }
    assert_eq!(lab.info("a")["sessions"], 1, "{}", lab.log());
}

#[test]
fn a_role_of_this_host_is_needed_for_each_of_them() {
    let lab = Lab::new()
        .set("[[access]]\nusers = ['4000001']\nroles = ['power']\nvms = ['a']\n[[access]]\nusers = ['4000001']\nverbs = ['fs']")
        .guest("a", 1)
        .guest("b", 2)
        .start();
    let a = guest(&lab, "a", 1, "boot-1");
    let ask = |arguments: &[&str]| lab.ctl_as(4_000_001, arguments).output().unwrap();
    assert!(ask(&["shutdown", "a"]).status.success());
    assert_eq!(a.machine().lock().asked[0].1, "uid:4000001");
    assert_fails(&ask(&["shutdown", "b"]), 1, "verbs = [\"shutdown\"], vms = [\"b\"]");
    assert_fails(&ask(&["freeze", "a"]), 1, "verbs = [\"freeze\"], vms = [\"a\"]");
    assert_fails(&ask(&["qga", "a", PING]), 1, "verbs = [\"qga\"], vms = [\"a\"]");
    assert!(ask(&["reboot", "a"]).status.success());
    assert_eq!(a.machine().lock().asked.len(), 2);
}

/// STOP is also what a pause of an administrator, and an error of a disk, look like.
#[test]
fn a_wait_for_a_suspension_takes_nothing_else_for_one() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'\nqmp = '@a.qmp'").start();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    let a = guest(&lab, "a", 1, "boot-1");
    lab.until_vm("a", |vm| vm["power"] == "running");
    let suspend = |to: &str| {
        let asked = a.machine().lock().asked.len();
        let mut command = lab.ctl_command(&["suspend", "a", "--to", to, "--wait"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        lab.until("the guest is asked", || a.machine().lock().asked.len() > asked);
        child
    };
    // What comes before the guest has refused shows nothing of what was asked.
    let mut refused = suspend("both");
    qmp.event("SUSPEND");
    assert_eq!(wait(&mut refused).code(), Some(1));
    qmp.event("WAKEUP");
    lab.until_vm("a", |vm| vm["power"] == "running");

    for to in ["memory", "disk"] {
        let mut wait_for_it = suspend(to);
        qmp.event("STOP");
        lab.until_vm("a", |vm| vm["power"] == "paused");
        std::thread::sleep(Duration::from_millis(500));
        assert!(wait_for_it.try_wait().unwrap().is_none(), "{to}");
        qmp.event("RESUME");
        lab.until_vm("a", |vm| vm["power"] == "running");
        if to == "memory" {
            qmp.event("SUSPEND");
            assert!(wait(&mut wait_for_it).success());
            qmp.event("WAKEUP");
            lab.until_vm("a", |vm| vm["power"] == "running");
            continue;
        }
        // Off, and nothing has said why.
        qmp.event("SHUTDOWN");
        assert_eq!(wait(&mut wait_for_it).code(), Some(1));
        let words = std::io::read_to_string(wait_for_it.stderr.take().unwrap()).unwrap();
        assert!(words.contains("has not reported that the guest suspended itself to its disk"), "{words}");
    }
    qmp.event("RESUME");
    lab.until_session("a", "connected");
    let mut wait_for_it = suspend("disk");
    qmp.event("SUSPEND_DISK");
    std::thread::sleep(Duration::from_millis(300));
    assert!(wait_for_it.try_wait().unwrap().is_none(), "it is not off yet");
    qmp.event("SHUTDOWN");
    assert!(wait(&mut wait_for_it).success());
}

#[test]
fn a_wait_ends_only_when_something_shows_that_the_guest_is_down() {
    let lab = Lab::new()
        .vm("a", 1, "unix-socket = '@a.sock'\nqmp = '@a.qmp'")
        .vm("blind", 2, "unix-socket = '@blind.sock'")
        .start();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    let a = guest(&lab, "a", 1, "boot-1");
    lab.until_vm("a", |vm| vm["power"] == "running");
    let run = |arguments: &[&str]| {
        let mut command = lab.ctl_command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let until_asked = |guest: &Guest, count: usize| {
        lab.until("the guest is asked", || guest.machine().lock().asked.len() == count);
    };

    // Accepted, and nothing more.
    assert_eq!(lab.words(&["shutdown", "a"]), "a: the guest has accepted the shutdown\n");
    let output = lab.ctl(&["shutdown", "a", "--wait", "--timeout", "2s"]);
    assert_fails(&output, 1, "no sign within 2 s that a is off: the guest has accepted the shutdown; ");
    assert_fails(&output, 1, "the hypervisor reports running, the session is connected");

    // A lost session ends no wait for a shutdown; another boot does one for a reboot.
    let mut off = run(&["shutdown", "a", "--wait"]);
    until_asked(&a, 3);
    let mut reboot = run(&["reboot", "a", "--wait", "-o", "json"]);
    until_asked(&a, 4);
    drop(a);
    lab.until_vm("a", |vm| vm["session"] != "connected");
    std::thread::sleep(Duration::from_millis(300));
    assert!(off.try_wait().unwrap().is_none() && reboot.try_wait().unwrap().is_none());
    let a = guest(&lab, "a", 1, "boot-2");
    assert!(wait(&mut reboot).success());
    let seen: Value = serde_json::from_reader(reboot.stdout.take().unwrap()).unwrap();
    assert_eq!((&seen["accepted"], &seen["seen"]), (&true.into(), &true.into()));
    assert_eq!(wait(&mut off).code(), Some(1));
    let words = std::io::read_to_string(off.stderr.take().unwrap()).unwrap();
    assert!(words.contains("the guest has rebooted instead"), "{words}");

    let mut suspend = run(&["suspend", "a", "--wait"]);
    until_asked(&a, 1);
    qmp.event("SUSPEND");
    assert!(wait(&mut suspend).success());
    qmp.event("WAKEUP");
    lab.until_vm("a", |vm| vm["power"] == "running");

    // QEMU's end.
    let mut off = run(&["shutdown", "a", "--wait"]);
    until_asked(&a, 2);
    drop(qmp);
    assert!(wait(&mut off).success());
    assert_eq!(std::io::read_to_string(off.stdout.take().unwrap()).unwrap(), "a is off\n");

    // Where nothing would show it, nothing is done.
    assert_fails(
        &lab.ctl(&["suspend", "blind", "--wait"]),
        1,
        "guestlet-host cannot see whether blind is running",
    );
    let blind = guest(&lab, "blind", 2, "boot-1");
    assert_fails(
        &lab.ctl(&["shutdown", "blind", "--wait"]),
        1,
        "guestlet-host cannot see whether blind is running",
    );
    assert_eq!(blind.machine().lock().asked.len(), 0);
}
