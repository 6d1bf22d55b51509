//! Freezes of real file systems by the real agent, in a small machine of namespaces and loop devices.

mod guestctl;
mod lab;
mod left;
mod platforms;
mod receipts;

use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::{Value, json};

use crate::agent::{Client, PATIENCE};
use lab::{
    Agent, FILE_SYSTEMS, PLACES, Writer, guardians, guestlet, inside, is_outside, make_dirty,
    nothing_is_frozen, status,
};

const FREEZE: &str = r#"{"execute":"guest-fsfreeze-freeze"}"#;
const THAW: &str = r#"{"execute":"guest-fsfreeze-thaw"}"#;

nix::ioctl_write_int_bad!(fifreeze, 0xc004_5877);

fn description(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

/// Answers that must not wait for anything.
#[track_caller]
fn answers_at_once(client: &mut Client) {
    let begun = Instant::now();
    assert_eq!(client.call("guest-ping"), json!({}));
    assert_eq!(client.ask(r#"{"execute":"guest-sync","arguments":{"id":7}}"#), json!({"return": 7}));
    client.call("guest-info");
    client.call("guest-fsfreeze-status");
    // Four answers on a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn stacked_file_systems_are_frozen_and_thawed() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    let (mut client, mut other) = (agent.client(), agent.client());
    assert_eq!(client.call("guest-fsfreeze-status"), "thawed");
    for round in 0..3 {
        make_dirty();
        assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS, "{round}");
        assert_eq!(client.call("guest-fsfreeze-status"), "frozen");
        let frozen = status();
        let order: Vec<_> =
            frozen["file_systems"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
        let place = |name| order.iter().position(|known| *known == name).unwrap();
        assert!(place("/inner") < place("/a") && place("/last") < place("/b"), "{order:?}");
        assert!(frozen["seconds_left"].as_u64().unwrap() > 60, "{frozen}");
        let mut writers = PLACES.map(Writer::to);
        for (writer, place) in writers.iter_mut().zip(PLACES) {
            assert!(writer.is_blocked(), "{place}");
        }
        answers_at_once(&mut client);
        answers_at_once(&mut other);
        // Nothing else may be called, by anybody.
        for client in [&mut client, &mut other] {
            let refused = client.ask(r#"{"execute":"guest-get-host-name"}"#);
            assert_eq!(refused["error"]["class"], "CommandNotFound");
            let second = client.ask(FREEZE);
            assert_eq!(second["error"]["class"], "CommandNotFound");
            assert!(description(&second).contains("requested a freeze"), "{second}");
        }
        let info = other.call("guest-info");
        let commands = info["supported_commands"].as_array().unwrap().iter();
        let enabled: Vec<_> =
            commands.filter(|it| it["enabled"] == true).map(|it| it["name"].as_str().unwrap()).collect();
        let always = [
            "guest-fsfreeze-status",
            "guest-fsfreeze-thaw",
            "guest-info",
            "guest-ping",
            "guest-sync",
            "guest-sync-delimited",
        ];
        assert_eq!(enabled, always);
        assert_eq!(other.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
        writers.into_iter().for_each(Writer::finishes);
        assert_eq!(client.call("guest-fsfreeze-status"), "thawed");
        assert_eq!(client.call("guest-fsfreeze-thaw"), 0);
        assert!(client.call("guest-get-host-name").is_object());
    }
    assert_eq!(guardians(), [0; 0]);

    // Some of them; one that another mount hides is not reached, and not taken for the other.
    let list = |names: Value| {
        json!({"execute": "guest-fsfreeze-freeze-list", "arguments": {"mountpoints": names}}).to_string()
    };
    assert_eq!(client.ask(&list(json!(["/bind", "/inner"]))), json!({"return": 2}));
    Writer::to("/b").finishes();
    assert!(Writer::to("/a").is_blocked());
    assert_eq!(client.call("guest-fsfreeze-thaw"), 2);
    let unknown = client.ask(&list(json!(["/a", "/nowhere"])));
    assert!(description(&unknown).contains("\"/nowhere\" is not a mount point"), "{unknown}");
    let wrong = client.ask(&list(json!(["/a", 7])));
    assert!(description(&wrong).contains("mountpoints[1]"), "{wrong}");
    inside("mount -t tmpfs over /inner");
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS - 1);
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS - 1);
    inside("umount /inner");
    nothing_is_frozen();

    // What is sent along with the thaw is meant for the time after it.
    client.call("guest-fsfreeze-freeze");
    client.send([THAW, r#"{"execute":"guest-get-host-name"}"#].concat().as_bytes());
    assert_eq!(client.answer(), json!({"return": FILE_SYSTEMS}));
    assert!(client.answer()["return"].is_object());
    nothing_is_frozen();
}

#[test]
fn a_freeze_ends_by_itself_and_nobody_takes_it_for_a_good_one() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("[qga.freeze]\ndeadline = 1");
    // Whoever froze has gone.
    agent.client().call("guest-fsfreeze-freeze");
    let begun = Instant::now();
    nothing_is_frozen();
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    let deadline = Instant::now() + PATIENCE;
    while status()["spoiled"] == "" {
        assert!(Instant::now() < deadline, "{}", status());
    }
    // Nor does a restart make it a good one.
    agent.kill();
    let agent = Agent::again();
    let late = agent.client().ask(THAW);
    assert!(
        description(&late).contains("ended by itself after 1 s: the snapshot is not consistent"),
        "{late}"
    );
    assert_eq!(agent.client().call("guest-fsfreeze-thaw"), 0);
    assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    assert_eq!(agent.client().call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    // A person who ends it.
    assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    assert_eq!(guestlet(&["thaw"]), (true, format!("thawed {FILE_SYSTEMS} file systems\n")));
    nothing_is_frozen();
    assert!(description(&agent.client().ask(THAW)).contains("by a person in the guest"));
}

#[test]
fn nobody_is_answered_before_the_start_has_succeeded() {
    if is_outside() {
        return;
    }
    // With its settings written, and nothing left of it.
    Agent::start("").kill();
    for _ in 0..12 {
        let _ = std::fs::remove_file("/run/qga.sock");
        let _ = std::fs::remove_file("/run/agent.sock");
        // The last socket that it makes cannot be made.
        std::fs::create_dir_all("/run/agent.sock/taken").unwrap();
        // The first one is there before it, with somebody who waits.
        let listener = UnixListener::bind("/run/qga.sock").unwrap();
        let mut client = Agent::first_stream();
        client.write_all(br#"{"execute":"guest-ping"}"#).unwrap();
        let mut agent = Agent::begin_with(&listener);
        drop(listener);
        assert!(!agent.child.wait().unwrap().success());
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        assert_eq!(answer, b"", "an agent that could not start has answered");
    }
}

/// A mount point has bytes, which may be no text.
#[test]
fn a_mount_point_that_is_no_text_is_frozen_like_any_other() {
    if is_outside() {
        return;
    }
    let bytes = |name: &[u8]| std::ffi::OsStr::from_bytes(name).to_owned();
    // Two of them that are the same in words.
    for (name, place) in [(&b"/caf\xe9"[..], "/inner"), (b"/caf\xe8", "/last")] {
        std::fs::create_dir(bytes(name)).unwrap();
        nix::mount::mount(
            Some(place),
            bytes(name).as_os_str(),
            None::<&str>,
            nix::mount::MsFlags::MS_MOVE,
            None::<&str>,
        )
        .unwrap();
    }
    let agent = Agent::start("");
    let mut client = agent.client();
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    assert!(status()["file_systems"].as_array().unwrap().contains(&json!("/caf\u{fffd}")), "{}", status());
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    // As they are listed, they can be named; both, because they are listed alike.
    let info = client.call("guest-get-fsinfo");
    let listed: Vec<_> =
        info.as_array().unwrap().iter().filter(|it| it["mountpoint"] == "/caf\u{fffd}").collect();
    assert_eq!(listed.len(), 2, "{info}");
    assert!(listed.iter().all(|it| it["total-bytes"].as_u64().unwrap() > 0), "{info}");
    let list = json!({
        "execute": "guest-fsfreeze-freeze-list",
        "arguments": {"mountpoints": [listed[0]["mountpoint"]]}
    });
    assert_eq!(client.ask(&list.to_string()), json!({"return": 2}));
    assert_eq!(client.call("guest-fsfreeze-thaw"), 2);
    // Whoever is killed leaves nothing frozen there, either.
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    agent.kill();
    for place in [&b"/caf\xe9/file"[..], b"/caf\xe8/file", b"/a/file"] {
        std::fs::write(bytes(place), "data").unwrap();
    }
}

/// A freeze that cannot go on because somebody else holds the disk below.
#[test]
fn a_freeze_that_hangs_holds_up_nobody_and_is_ended_by_a_thaw() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    let (mut client, mut other) = (agent.client(), agent.client());
    make_dirty();
    let below = std::fs::File::open("/a").unwrap();
    // SAFETY: FIFREEZE takes no argument that the kernel would read.
    unsafe { fifreeze(below.as_raw_fd(), 0) }.unwrap();
    client.send(FREEZE.as_bytes());
    let deadline = Instant::now() + PATIENCE;
    while status()["stage"] != "freezing" {
        assert!(Instant::now() < deadline, "{}", status());
    }
    // On its own stream whoever froze begins anew by guest-sync.
    assert_eq!(client.ask(r#"{"execute":"guest-sync","arguments":{"id":1}}"#), json!({"return": 1}));
    for _ in 0..5 {
        answers_at_once(&mut other);
        answers_at_once(&mut client);
    }
    let begun = Instant::now();
    let thawed = other.ask(THAW);
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    assert!(thawed["return"].as_u64().unwrap() >= 1, "{thawed}");
    nothing_is_frozen();
    assert_eq!(other.call("guest-fsfreeze-status"), "thawed");
}

#[test]
fn a_slow_hook_holds_up_nobody_and_the_one_who_froze_may_go() {
    if is_outside() {
        return;
    }
    mkfifo("/run/gate", Mode::S_IRWXU).unwrap();
    std::fs::write("/run/told", "").unwrap();
    std::fs::write("/bin/hook", "#!/bin/sh\necho $1 >> /run/told\n[ $1 = thaw ] || read word < /run/gate\n")
        .unwrap();
    inside("busybox chmod 755 /bin/hook");
    // Open in both directions it neither waits nor breaks.
    let mut gate = std::fs::File::options().read(true).write(true).open("/run/gate").unwrap();
    let told = |expected: &str| {
        let deadline = Instant::now() + PATIENCE;
        while std::fs::read_to_string("/run/told").unwrap() != expected {
            assert!(Instant::now() < deadline, "{}", std::fs::read_to_string("/run/told").unwrap());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let agent = Agent::start("fsfreeze-hook = '/bin/hook'");
    let (mut client, mut other) = (agent.client(), agent.client());
    client.send(FREEZE.as_bytes());
    told("freeze\n");
    answers_at_once(&mut other);
    nothing_is_frozen();
    drop(client);
    std::io::Write::write_all(&mut gate, b"\n").unwrap();
    let deadline = Instant::now() + PATIENCE;
    while status()["stage"] != "frozen" {
        assert!(Instant::now() < deadline, "{}", status());
    }
    answers_at_once(&mut other);
    assert_eq!(other.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    told("freeze\nthaw\n");
    nothing_is_frozen();

    // Whoever has waited for long and asks anew gets no late answer, and the freeze is there to be thawed.
    let mut client = agent.client();
    client.send(FREEZE.as_bytes());
    told("freeze\nthaw\nfreeze\n");
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(client.ask(r#"{"execute":"guest-sync","arguments":{"id":1}}"#), json!({"return": 1}));
    answers_at_once(&mut client);
    std::io::Write::write_all(&mut gate, b"\n").unwrap();
    while status()["stage"] != "frozen" {
        assert!(Instant::now() < deadline, "{}", status());
    }
    answers_at_once(&mut client);
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    for client in [client, other] {
        assert_eq!(client.finish(), b"");
    }
    nothing_is_frozen();
}

/// A ping overtook the freeze, and a client that sends without ids took its answer for the freeze's.
#[test]
fn answers_come_in_the_order_of_the_commands_and_a_thaw_ends_a_slow_freeze() {
    if is_outside() {
        return;
    }
    mkfifo("/run/gate", Mode::S_IRWXU).unwrap();
    std::fs::write("/bin/hook", "#!/bin/sh\n[ $1 = thaw ] || read word < /run/gate\n").unwrap();
    inside("busybox chmod 755 /bin/hook");
    let mut gate = std::fs::File::options().read(true).write(true).open("/run/gate").unwrap();
    let agent = Agent::start("fsfreeze-hook = '/bin/hook'");
    let mut client = agent.client();
    let ping = r#"{"execute":"guest-ping"}"#;
    let ask = r#"{"execute":"guest-fsfreeze-status"}"#;
    client.send([FREEZE, ping, ask].concat().as_bytes());
    // Longer than other commands may keep a ping waiting: the freeze is not answered before it is over.
    std::thread::sleep(Duration::from_millis(6500));
    std::io::Write::write_all(&mut gate, b"\n").unwrap();
    assert_eq!(client.answer(), json!({"return": FILE_SYSTEMS}));
    assert_eq!(client.answer(), json!({"return": {}}));
    assert_eq!(client.answer(), json!({"return": "frozen"}));
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);

    client.send(FREEZE.as_bytes());
    std::thread::sleep(Duration::from_millis(1100));
    client.send([ping, ask].concat().as_bytes());
    let begun = Instant::now();
    // It waits for the two before it; the next one does not have to.
    client.send(THAW.as_bytes());
    std::thread::sleep(Duration::from_millis(500));
    std::io::Write::write_all(&mut gate, b"\n").unwrap();
    assert_eq!(client.answer(), json!({"return": FILE_SYSTEMS}));
    assert_eq!((client.answer(), client.answer()), (json!({"return": {}}), json!({"return": "frozen"})));
    assert_eq!(client.answer(), json!({"return": FILE_SYSTEMS}));

    client.send(FREEZE.as_bytes());
    std::thread::sleep(Duration::from_millis(1100));
    client.send([THAW, ping].concat().as_bytes());
    let ended = client.answer();
    assert!(ended["error"].is_object(), "the freeze was ended: {ended}");
    assert!(client.answer()["return"].is_u64());
    assert_eq!(client.answer(), json!({"return": {}}));
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    nothing_is_frozen();
}
