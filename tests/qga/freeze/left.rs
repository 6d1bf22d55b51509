//! Agents that end, or are killed, while file systems are frozen.

use super::*;

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

/// The next run wrote to that disk before it looked after the freeze, and neither a thaw nor the deadline ended it.
#[test]
fn a_next_run_that_keeps_its_state_on_a_frozen_disk_thaws_it() {
    if is_outside() {
        return;
    }
    Agent::start("").kill();
    let settings = std::fs::read_to_string("/run/agent.toml").unwrap();
    std::fs::write("/run/agent.toml", settings.replace("statedir = '/run'", "statedir = '/a/state'"))
        .unwrap();
    std::fs::create_dir("/a/state").unwrap();
    for by_deadline in [false, true] {
        if by_deadline {
            let settings = std::fs::read_to_string("/run/agent.toml").unwrap();
            std::fs::write("/run/agent.toml", settings + "[qga.freeze]\ndeadline = 2\n").unwrap();
        }
        let agent = Agent::again();
        assert_eq!(agent.client().call("guest-fsfreeze-freeze"), FILE_SYSTEMS);
        kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGSTOP).unwrap();
        for guardian in guardians() {
            kill(Pid::from_raw(guardian), Signal::SIGKILL).unwrap();
        }
        agent.kill();
        let agent = Agent::again();
        let mut client = agent.client();
        assert_eq!(client.call("guest-fsfreeze-status"), "frozen");
        assert!(Writer::to("/a").is_blocked());
        answers_at_once(&mut client);
        if !by_deadline {
            assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS);
        }
        nothing_is_frozen();
        let deadline = Instant::now() + PATIENCE;
        while std::path::Path::new("/a/state/qga.state.isfrozen").exists() {
            assert!(Instant::now() < deadline, "the marker is left behind");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(client);
        agent.kill();
        let agent = Agent::again();
        assert_eq!(agent.client().call("guest-fsfreeze-status"), "thawed");
    }
}
