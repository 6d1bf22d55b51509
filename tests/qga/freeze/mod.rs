//! Freezes of real file systems by the real agent, in a small machine of namespaces and loop devices.

mod lab;

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
            assert!(description(&second).contains("has asked for a freeze"), "{second}");
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
    assert!(description(&unknown).contains("\"/nowhere\" is no mount point"), "{unknown}");
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
fn whenever_the_agent_is_killed_nothing_stays_frozen() {
    if is_outside() {
        return;
    }
    std::fs::write("/bin/hook", "#!/bin/sh\necho $1 >> /run/told\n").unwrap();
    inside("busybox chmod 755 /bin/hook");
    // With the guardian alone, with what the service manager runs alone, and with the next run of the agent alone.
    for round in 0..30_u64 {
        std::fs::write("/run/told", "").unwrap();
        make_dirty();
        let agent = Agent::start("fsfreeze-hook = '/bin/hook'");
        let mut client = agent.client();
        client.send(FREEZE.as_bytes());
        // From before the hooks to after the answer.
        let restricted = round / 3 >= 8;
        if restricted {
            assert_eq!(client.answer(), json!({"return": FILE_SYSTEMS}));
        } else {
            std::thread::sleep(Duration::from_millis(round / 3 * 20));
        }
        let signal = |id: i32, signal| kill(Pid::from_raw(id), signal);
        if round % 3 != 0 {
            signal(agent.child.id().cast_signed(), Signal::SIGSTOP).unwrap();
            // One may be on its way.
            for _ in 0..3 {
                for guardian in guardians() {
                    let _ = signal(guardian, Signal::SIGKILL);
                }
            }
        }
        agent.kill();
        if round % 3 == 1 {
            let (success, said) = guestlet(&["thaw", "--if-crashed"]);
            assert!(success, "{said}");
            assert_eq!(guestlet(&["thaw", "--if-crashed"]), (true, String::new()));
        }
        if round % 3 == 2 {
            let agent = Agent::again();
            let mut client = agent.client();
            if restricted {
                assert_eq!(client.call("guest-fsfreeze-status"), "frozen");
                assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
            } else {
                client.ask(THAW);
            }
            nothing_is_frozen();
            continue;
        }
        nothing_is_frozen();
        let deadline = Instant::now() + PATIENCE;
        let told = || std::fs::read_to_string("/run/told").unwrap();
        while told().contains("freeze") && !told().contains("thaw") {
            assert!(Instant::now() < deadline, "the hook was not told: {}", told());
            std::thread::sleep(Duration::from_millis(5));
        }
        while std::path::Path::new("/run/qga.state.isfrozen").exists() {
            assert!(Instant::now() < deadline, "the marker is left behind");
            std::thread::sleep(Duration::from_millis(5));
        }
        let agent = Agent::again();
        assert_eq!(agent.client().call("guest-fsfreeze-status"), "thawed");
        let late = agent.client().ask(THAW);
        if restricted {
            assert!(description(&late).contains("the agent crashed"), "{round}: {late}");
        }
    }
}

#[test]
fn a_thaw_that_waits_for_the_agents_next_run_is_told_the_truth() {
    if is_outside() {
        return;
    }
    for round in 0..12 {
        let agent = Agent::start("");
        assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        let signal = |id: i32, signal| kill(Pid::from_raw(id), signal);
        signal(agent.child.id().cast_signed(), Signal::SIGSTOP).unwrap();
        // In half of the rounds it is still frozen when the next run begins.
        let frozen = round % 2 == 0;
        for guardian in guardians() {
            signal(guardian, Signal::SIGKILL).unwrap();
        }
        agent.kill();
        if !frozen {
            assert!(guestlet(&["thaw", "--if-crashed"]).0);
        }
        std::fs::remove_file("/run/qga.sock").unwrap();
        let _agent = Agent::begin();
        let mut client = Client::over(Agent::first_stream());
        let second = round % 4 >= 2;
        if second {
            let refused = client.ask(FREEZE);
            if frozen {
                assert_eq!(refused["error"]["class"], "CommandNotFound", "{round}: {refused}");
            } else {
                assert_eq!(refused, json!({"return": FILE_SYSTEMS}));
            }
        }
        let answer = client.ask(THAW);
        if frozen || second {
            assert_eq!(answer, json!({"return": FILE_SYSTEMS}), "{round}");
        } else {
            assert!(description(&answer).contains("the agent crashed"), "{round}: {answer}");
        }
        nothing_is_frozen();
    }
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

#[test]
fn the_agents_end_waits_for_the_thaw() {
    if is_outside() {
        return;
    }
    let mut agent = Agent::start("");
    let mut client = agent.client();
    assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
    kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    answers_at_once(&mut client);
    assert!(agent.child.try_wait().unwrap().is_none());
    assert!(Writer::to("/a").is_blocked());
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
    let deadline = Instant::now() + PATIENCE;
    while agent.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the agent does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    nothing_is_frozen();
}

nix::ioctl_write_int_bad!(fifreeze, 0xc004_5877);

/// The thread holds the descriptors of the killed process, so that the guardian's pipe has no end.
#[test]
fn an_agent_killed_while_it_hangs_in_a_frozen_write_is_thawed_for_at_once() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    let (mut client, mut other) = (agent.client(), agent.client());
    let file = json!({"execute": "guest-file-open", "arguments": {"path": "/inner/held", "mode": "w"}});
    let handle = client.ask(&file.to_string())["return"].as_u64().unwrap();
    let held = std::fs::File::open("/inner").unwrap();
    // SAFETY: FIFREEZE takes no argument that the kernel would read.
    unsafe { fifreeze(held.as_raw_fd(), 0) }.unwrap();
    let write =
        json!({"execute": "guest-file-write", "arguments": {"handle": handle, "buf-b64": "ZGF0YQ=="}});
    client.send(write.to_string().as_bytes());
    let process = agent.child.id();
    let hangs = || {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
        let stats = threads.map(|thread| std::fs::read_to_string(thread.path().join("stat")));
        stats.flatten().any(|stat| stat.contains(") D "))
    };
    let deadline = Instant::now() + PATIENCE;
    while !hangs() {
        assert!(Instant::now() < deadline, "no thread of the agent waits for the frozen file system");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(other.call("guest-fsfreeze-freeze"), FILE_SYSTEMS - 1);
    assert!(Writer::to("/a").is_blocked());

    let begun = Instant::now();
    kill(Pid::from_raw(process.cast_signed()), Signal::SIGKILL).unwrap();
    let writers = PLACES.map(Writer::to);
    let thawed = writers.map(|writer| writer.finishes_before(begun + Duration::from_secs(10)));
    eprintln!("thawed after {:?}", begun.elapsed());
    // Whatever comes of it, nothing stays frozen.
    let left = guestlet(&["thaw", "--if-crashed"]);
    assert_eq!(thawed, [true; PLACES.len()], "the guardian waits for the hanging thread: {left:?}");
    agent.kill();
    let agent = Agent::again();
    let late = agent.client().ask(THAW);
    assert!(description(&late).contains("the agent crashed"), "{late}");
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
