//! What is lost with a connection is not lost to the program and its client.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::lab::{ALL, Lab, code};
use crate::soak::steps;

/// Bytes whose place in the stream can be told.
fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

#[test]
fn every_byte_arrives_once_while_the_host_half_is_killed_again_and_again() {
    let length = steps(64 << 20, 1 << 30);
    let rounds = steps(4, 12);
    let mut lab = Lab::new();
    let mut command = lab.command(&["-i"], &["sh", "-c", "cat; exit 6"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut sink = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        for part in pattern(length).chunks(1 << 16) {
            sink.write_all(part).unwrap();
        }
    });
    let mut source = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::with_capacity(length);
        source.read_to_end(&mut all).unwrap();
        all
    });
    // Until it is said to run, nobody knows whether it does.
    crate::lab::until("it runs", || !lab.programs().is_empty());
    for round in 0..rounds {
        std::thread::sleep(Duration::from_millis(150 + 130 * round));
        lab.host.kill();
        lab.host.again();
    }
    let status = crate::host::wait(&mut child);
    let complaints = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(6), "{complaints}");
    writer.join().unwrap();
    let all = reader.join().unwrap();
    assert_eq!(all.len(), length, "{complaints}");
    assert!(all == pattern(length));
    let resumed = lab.agent_log().matches("(attach to ").count();
    assert!(resumed >= 2, "it was interrupted {resumed} times: send more");
}

/// A way from guestctl to the host half.
struct Way {
    path: PathBuf,
    /// While it is set, what guestctl sends is thrown away.
    is_deaf: Arc<AtomicBool>,
    /// The ends of the connections over it.
    streams: Arc<Mutex<Vec<UnixStream>>>,
}

impl Way {
    fn to(lab: &Lab) -> Self {
        let (path, host) = (lab.file("way"), lab.host.socket());
        let listener = UnixListener::bind(&path).unwrap();
        let this = Self { path, is_deaf: Arc::default(), streams: Arc::default() };
        let (is_deaf, streams) = (Arc::clone(&this.is_deaf), Arc::clone(&this.streams));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, host) = (client.unwrap(), UnixStream::connect(&host).unwrap());
                streams.lock().unwrap().extend([client.try_clone().unwrap(), host.try_clone().unwrap()]);
                let back = (host.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || carry(back, &AtomicBool::new(false)));
                let is_deaf = Arc::clone(&is_deaf);
                std::thread::spawn(move || carry((client, host), &is_deaf));
            }
        });
        this
    }

    /// `guestctl exec` over it.
    fn exec(&self, command: &[&str]) -> Command {
        crate::host::Lab::ctl_over(&self.path, &[&["exec", "web", "--"], command].concat())
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
    }
}

fn carry((mut from, mut to): (UnixStream, UnixStream), is_deaf: &AtomicBool) {
    let mut part = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut part) {
        if !is_deaf.load(Ordering::SeqCst) && to.write_all(&part[..length]).is_err() {
            break;
        }
    }
    drop(to.shutdown(Shutdown::Both));
}

/// Guards against a program that stood still for ever: its ring was full of output that guestctl had acknowledged over a connection
/// that broke, and guestctl would have acknowledged it again only with more output.
#[test]
fn what_was_acknowledged_over_a_connection_that_broke_is_acknowledged_again() {
    const RING: usize = 32 << 10;
    let lab = Lab::with(&format!("{ALL}[exec]\nring-bytes = {RING}\n"));
    let (way, begin) = (Way::to(&lab), lab.file("begin"));
    let script =
        format!("until test -e {}; do sleep 0.05; done; head -c 1000000 /dev/zero; exit 7", begin.display());
    let mut command = way.exec(&["sh", "-c", &script]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    crate::lab::until("it runs", || !lab.programs().is_empty());
    way.is_deaf.store(true, Ordering::SeqCst);
    std::fs::write(&begin, "").unwrap();
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut vec![0; RING]).unwrap();
    // What is acknowledged now is lost. (With less time it is acknowledged over the next connection, and this proves nothing.)
    std::thread::sleep(Duration::from_millis(500));
    way.is_deaf.store(false, Ordering::SeqCst);
    way.cut();
    let reader = std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()).unwrap());
    assert_eq!(crate::host::wait(&mut child).code(), Some(7));
    assert_eq!(reader.join().unwrap(), 1_000_000 - RING as u64);
}

#[test]
fn a_program_of_an_agent_that_is_gone_is_lost() {
    let mut lab = Lab::new();
    let child =
        lab.command(&[], &["sleep", "1000"]).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    crate::lab::until("it runs", || !lab.programs().is_empty());
    let number = lab.programs()[0]["process_id"].as_u64().unwrap();
    let group = std::fs::read_to_string(format!("/proc/{number}/cgroup")).unwrap();
    lab.kill_agent();
    lab.start_agent();
    if group.contains("guestlet-exec-") {
        // Nobody has its pipes any more. The agent of another test, in the same group, may have been the first to find it.
        crate::lab::until("what was left is ended", || {
            !crate::lab::is_running(u32::try_from(number).unwrap())
        });
    }
    let output = child.wait_with_output();
    let output = output.unwrap();
    assert_eq!(code(&output), 255, "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("lost the connection to the program"),
        "{output:?}"
    );
}

#[test]
fn a_client_that_is_gone_leaves_its_place_to_another() {
    let lab = Lab::new();
    let script = "echo one; read line; echo $line; exit 3";
    let mut command = lab.command(&["-i"], &["sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    let id = lab.programs()[0]["id"].as_str().unwrap().to_owned();
    child.kill().unwrap();
    child.wait().unwrap();
    crate::lab::until("nobody is attached", || lab.programs()[0]["is_attached"] == false);
    let mut command = lab.host.ctl_command(&["attach", "-i", "web", &id]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"two\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 3);
    assert!(output.stdout.ends_with(b"two\n"), "{output:?}");
}

#[test]
fn input_that_was_lost_comes_before_what_was_typed_meanwhile() {
    let mut lab = Lab::new();
    let mut command = lab.command(&["-i"], &["sh", "-c", "cat; exit 6"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut keys = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    for round in 0..3 {
        let mut line = [0; 8];
        writeln!(keys, "begun-{round}").unwrap();
        output.read_exact(&mut line).unwrap();
        assert_eq!(line[..], format!("begun-{round}\n").as_bytes()[..]);
        // A host half that takes input and passes on nothing: that is lost with it.
        lab.host.signal(Signal::SIGSTOP);
        writeln!(keys, "lost-{round}").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        lab.host.kill();
        writeln!(keys, "typed-{round}").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        lab.host.again();
        let expected = format!("lost-{round}\ntyped-{round}\n");
        let mut lines = vec![0; expected.len()];
        output.read_exact(&mut lines).unwrap();
        assert_eq!(String::from_utf8_lossy(&lines), expected);
    }
    // The end of the input is no more lost than the rest.
    lab.host.kill();
    keys.write_all(b"last").unwrap();
    drop(keys);
    std::thread::sleep(Duration::from_millis(300));
    lab.host.again();
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    let complaints = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!((&rest[..], crate::host::wait(&mut child).code()), (&b"last"[..], Some(6)), "{complaints}");
}

#[test]
fn a_client_that_has_no_connection_is_ended_by_signals_and_the_program_is_not() {
    let mut lab = Lab::new();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut command = lab.command(&[], &["sleep", "1000"]);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        crate::lab::until("it runs", || !lab.programs().is_empty());
        let program = lab.programs().remove(0);
        let (id, number) = (program["id"].as_str().unwrap(), program["process_id"].as_u64().unwrap());
        lab.host.kill();
        std::thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        send(&child, signal);
        assert_eq!(crate::host::wait(&mut child).code(), Some(255), "{signal}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert!(words.contains(&format!("guestctl attach web {id} attaches to it again")), "{words}");
        assert!(crate::lab::is_running(u32::try_from(number).unwrap()));
        lab.host.again();
        lab.host.until_session("web", "connected");
        lab.host.words(&["kill", "web", id, "--signal", "KILL"]);
        assert_eq!(code(&lab.host.ctl(&["attach", "web", id])), 137);
    }
}

#[test]
fn a_client_that_waits_for_the_host_half_is_ended_by_signals() {
    let lab = Lab::new();
    lab.host.signal(Signal::SIGSTOP);
    let mut command = lab.command(&[], &["true"]);
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let begun = Instant::now();
    send(&child, Signal::SIGINT);
    let status = crate::host::wait(&mut child);
    lab.host.signal(Signal::SIGCONT);
    assert_eq!(status.code(), Some(130));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(words.contains("it is not known whether the program was started"), "{words}");
}

#[test]
fn a_host_half_that_does_not_know_the_vm_any_more_is_not_asked_for_ever() {
    let mut lab = Lab::new();
    let mut command = lab.command(&[], &["sleep", "1000"]);
    let child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    crate::lab::until("it runs", || !lab.programs().is_empty());
    lab.host.kill();
    lab.host.edit("name = 'web'", "name = 'db'");
    lab.host.again();
    // By itself the program would wait for 10 minutes.
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 125, "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("knows no VM named \"web\""), "{output:?}");
}

pub fn send(child: &std::process::Child, signal: Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, signal).unwrap();
}
