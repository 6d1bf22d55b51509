//! What goes through, and what is lost.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;
use std::sync::mpsc;

use nix::sys::signal::Signal;

use crate::guest::{FLOOD, GREETING};
use crate::host::DEADLINE;
use crate::lab::{Lab, until};

#[test]
fn a_guest_is_seen_from_its_first_byte_on_and_answers_without_an_agent() {
    let lab = Lab::new();
    let mut client = lab.client(&[]);
    let words = client.complaint();
    assert!(words.contains(&format!("console of web at {}", lab.host.path("console").display())), "{words}");
    lab.qemu.go();
    client.until(GREETING);
    client.write(b"abc");
    client.until("bcd");
    // The end of the input is none of the console's.
    client.write(b"HAL\x1d");
    client.end_input();
    client.until("IBM\x1e");
    client.signal(Signal::SIGTERM);
    assert_eq!(client.code(), Some(143));
    assert_eq!(lab.host.info("web")["session"], "connecting");
}

#[test]
fn a_client_that_reads_nothing_does_not_stop_its_guest_and_is_told_what_it_has_missed() {
    let lab = Lab::new();
    let mut command = lab.host.ctl_command(&["console", "web"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("connected to the console"));
    lab.qemu.go();
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(b"F").unwrap();
    until("the guest has written everything", || lab.qemu.debug() == b"D");
    // More than all that is kept on the way.
    let words = " bytes of the guest's output were dropped here: they came faster than they were read";
    let (send, counts) = mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).all(|line| send.send(line).is_ok()));
    let mut output = child.stdout.take().unwrap();
    let (more, parts) = mpsc::channel();
    std::thread::spawn(move || {
        let mut part = vec![0; 1 << 16];
        while let Ok(length @ 1..) = output.read(&mut part) {
            drop(more.send(part[..length].to_vec()));
        }
    });
    let mut seen = Vec::new();
    while !seen.ends_with(b"D") {
        seen.extend(
            parts
                .recv_timeout(DEADLINE)
                .unwrap_or_else(|_| panic!("{:?}", counts.try_iter().collect::<Vec<_>>())),
        );
    }
    assert!(seen.starts_with(GREETING.as_bytes()));
    let seen = seen.len() - GREETING.len() - 1;
    let mut missing = 0;
    while seen + missing < FLOOD {
        let line = counts.recv_timeout(DEADLINE).unwrap();
        let count = line.strip_prefix("guestctl: ").and_then(|line| line.strip_suffix(words));
        missing += count.unwrap_or_else(|| panic!("{line}")).parse::<usize>().unwrap();
    }
    assert!(seen + missing == FLOOD && missing > 0, "{seen} {missing}");
    // What is seen next comes next.
    keys.write_all(b"a").unwrap();
    assert_eq!(parts.recv_timeout(DEADLINE).unwrap(), b"b");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn input_is_taken_as_fast_as_the_guest_reads() {
    let lab = Lab::new();
    let mut client = lab.client(&[]);
    lab.qemu.go();
    client.until(GREETING);
    // More than is under way at a time, 64 KiB.
    let input: Vec<u8> = (0..80_000_u32).map(|at| b'a' + u8::try_from(at % 23).unwrap()).collect();
    let expected: Vec<u8> = input.iter().map(|byte| byte + 1).collect();
    client.write(&input);
    until("all is answered", || client.output.lock().unwrap().len() >= GREETING.len() + expected.len());
    assert!(client.output.lock().unwrap()[GREETING.len()..] == expected, "{}", client.complaint());
}

#[test]
fn output_that_nobody_reads_ends_the_client_and_not_the_console() {
    let lab = Lab::new();
    let mut command = lab.host.ctl_command(&["console", "web"]);
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It has the other end of the pipe as well.
    drop(command);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("connected to the console"));
    drop(reader);
    lab.qemu.go();
    assert_eq!(crate::host::wait(&mut child).code(), Some(0));
    drop(lab.client(&[]));
}
