//! The program around the protocol: options, settings, signals.

use std::process::Output;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::agent::launch::{AGENT, guestlet, without_usual_files};
use crate::agent::{Agent, Client, PATIENCE, settings_in};
use crate::namespace::{self, is_outside};

fn run(arguments: &[&str]) -> Output {
    without_usual_files(AGENT.as_ref()).args(arguments).output().unwrap()
}

#[test]
fn version_help_and_the_list_of_commands() {
    let version = String::from_utf8(run(&["-V"]).stdout).unwrap();
    assert!(version.starts_with(concat!("guestlet ", env!("CARGO_PKG_VERSION"))), "{version}");
    assert!(version.contains("QEMU Guest Agent 10.2"), "{version}");
    for option in ["-h", "--help"] {
        let help = String::from_utf8(run(&[option]).stdout).unwrap();
        for line in [
            "  -c, --config",
            "  -m, --method",
            "  -F[FILE], --fsf",
            "      --settings",
            "  -V, --v",
            "  -h, --help",
        ] {
            assert!(help.contains(&format!("\n{line}")), "{line:?} in {help}");
        }
        for option in "cmplftvdbaDrVh".chars() {
            assert!(help.contains(&format!("\n  -{option}, --")), "{option}");
        }
    }
    let commands = String::from_utf8(run(&["--block-rpcs=help"]).stdout).unwrap();
    assert!(commands.lines().any(|line| line == "guest-ping"), "{commands}");
}

#[test]
fn wrong_options_and_settings_are_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("agent.toml");
    std::fs::write(&settings, "[control]\nlisten = 'none'\nprot = 5\n").unwrap();
    let settings = settings.to_str().unwrap();
    let taken = folder.path().join("file");
    std::fs::write(&taken, "").unwrap();
    std::fs::create_dir(folder.path().join("other")).unwrap();
    std::fs::create_dir(folder.path().join("other/agent.d")).unwrap();
    let plain = folder.path().join("plain.toml");
    std::fs::write(&plain, settings_in(folder.path())).unwrap();
    let plain = plain.to_str().unwrap();
    let innocent = folder.path().join("other/agent.toml");
    std::fs::write(&innocent, settings_in(folder.path())).unwrap();
    std::fs::write(folder.path().join("other/agent.d/10.toml"), "[control]\nport = 5000\n").unwrap();
    let innocent = innocent.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--colour"], "--colour"),
        (&["stray"], "stray"),
        (
            &["-m", "pigeon"],
            "command line: unknown method \"pigeon\"; use virtio-serial, isa-serial, unix-listen",
        ),
        (&["--settings", plain, "-a", "guest-exce"], "allow-rpcs lists no known command"),
        (&["--settings", innocent], "agent.d/10.toml:2: control.port is 5000"),
        (&["-m", "unix-listen"], "needs the path of a socket"),
        (&["-b", "guest-ping;guest-info"], "separate names by commas"),
        (&["--settings", "/no/such/file.toml"], "/no/such/file.toml: cannot be read"),
        (&["--settings", settings], "agent.toml:3: unknown field `prot`"),
    ];
    for (arguments, expected) in cases {
        let output = run(arguments);
        let words = String::from_utf8(output.stderr).unwrap();
        assert!(words.contains(expected), "{arguments:?}: {words}");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
    assert!(taken.exists());
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("agent.toml");
    std::fs::write(&settings, settings_in(folder.path())).unwrap();
    let precious = folder.path().join("precious");
    std::fs::write(&precious, "data").unwrap();
    let output = run(&[
        "-m",
        "unix-listen",
        "-p",
        precious.to_str().unwrap(),
        "-t",
        folder.path().to_str().unwrap(),
        "--settings",
        settings.to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("exists and is not a socket"));
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "data");
}

#[test]
fn a_signal_ends_it_cleanly_with_a_client_connected() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut agent = Agent::start();
        let mut client = agent.client();
        client.call("guest-ping");
        let begun = Instant::now();
        kill(Pid::from_raw(agent.child.id().cast_signed()), signal).unwrap();
        assert!(agent.child.wait().unwrap().success());
        assert!(begun.elapsed() < PATIENCE);
        assert!(!agent.socket().exists(), "the socket is left behind");
    }
}

#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let size = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("agent.toml"), settings_in(folder.path())).unwrap();
    std::io::Write::write_all(&mut &writer, &vec![b'.'; usize::try_from(size).unwrap()]).unwrap();
    let mut child = guestlet()
        .args(["-v", "-m", "unix-listen", "-p"])
        .arg(file("qga.sock"))
        .arg("-t")
        .arg(folder.path())
        .arg("--settings")
        .arg(file("agent.toml"))
        .stdin(std::process::Stdio::null())
        .stderr(writer)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while std::os::unix::net::UnixStream::connect(file("qga.sock")).is_err() {
        assert!(begun.elapsed() < PATIENCE, "it waits for somebody to read its log");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut client = Client::connect(&file("qga.sock"));
    client.call("guest-get-host-name");
    let mut before = vec![0; usize::try_from(size).unwrap()];
    std::io::Read::read_exact(&mut reader, &mut before).unwrap();
    client.call("guest-get-host-name");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
    let mut log = String::new();
    std::io::Read::read_to_string(&mut reader, &mut log).unwrap();
    assert!(log.contains("entries were left out") && log.contains("guest-get-host-name"), "{log}");
}

/// As qemu-ga does, which looks at signals only between two commands.
#[test]
fn what_is_under_way_is_answered_before_the_agent_ends() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Only this test and its agent see this one in the place of the system's.
    namespace::run(&format!(
        "cd {}; mkfifo gate; touch chpasswd
         printf '#!/bin/sh\\ncat > /dev/null\\ncd %s\\n: > begun\\nread word < gate\\n: > ended\\n' $PWD > text
         install -m 755 text chpasswd; mount --bind chpasswd /usr/sbin/chpasswd; cmp text /usr/sbin/chpasswd",
        folder.display()
    ));
    let mut agent = Agent::start();
    let mut client = agent.client();
    let arguments = json!({"username": "root", "password": "eA==", "crypted": false});
    client.send(json!({"execute": "guest-set-user-password", "arguments": arguments}).to_string().as_bytes());
    let deadline = Instant::now() + PATIENCE;
    let wait = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(Instant::now() < deadline, "the agent's log:\n{}", agent.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    wait(&|| folder.join("begun").exists());
    kill(Pid::from_raw(agent.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    wait(&|| agent.log().contains("SIGTERM"));
    std::fs::write(folder.join("gate"), "go on\n").unwrap();
    assert_eq!(client.answer(), json!({"return": {}}));
    assert!(folder.join("ended").exists());
    assert!(client.finish().is_empty());
    assert!(agent.child.wait().unwrap().success());
    assert!(agent.log().contains("guest-set-user-password (root): done"), "{}", agent.log());
}

#[test]
fn a_killed_agents_socket_is_taken_over_and_a_living_ones_is_not() {
    let mut agent = Agent::start();
    let socket = agent.socket();
    let settings = agent.folder.path().join("agent.toml");
    let start = || {
        guestlet()
            .args(["-m", "unix-listen", "-p"])
            .arg(&socket)
            .arg("-t")
            .arg(agent.folder.path())
            .arg("--settings")
            .arg(&settings)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let second = start().wait_with_output().unwrap();
    assert!(String::from_utf8(second.stderr).unwrap().contains("in use by another process"));
    agent.kill_and_start();
    agent.client().call("guest-ping");
}
