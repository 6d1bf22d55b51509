//! What is lost with a connection is not lost to the program and its client.

use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::Duration;

use crate::lab::{Lab, code};

/// Bytes whose place in the stream can be told.
fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

#[test]
fn every_byte_arrives_once_while_the_host_half_is_killed_again_and_again() {
    const LENGTH: usize = 64 << 20;
    let mut lab = Lab::new();
    let mut command = lab.command(&["-i"], &["sh", "-c", "cat; exit 6"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut sink = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        for part in pattern(LENGTH).chunks(1 << 16) {
            sink.write_all(part).unwrap();
        }
    });
    let mut source = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::with_capacity(LENGTH);
        source.read_to_end(&mut all).unwrap();
        all
    });
    for round in 0..4u64 {
        std::thread::sleep(Duration::from_millis(150 + 130 * round));
        lab.host.kill();
        lab.host.again();
    }
    let status = crate::host::wait(&mut child);
    let complaints = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(6), "{complaints}");
    writer.join().unwrap();
    let all = reader.join().unwrap();
    assert_eq!(all.len(), LENGTH, "{complaints}");
    assert!(all == pattern(LENGTH));
    let resumed = lab.agent_log().matches("(attach to ").count();
    assert!(resumed >= 2, "it was interrupted {resumed} times: send more");
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
        // Nobody has its pipes any more.
        crate::lab::until("what was left is ended", || {
            !crate::lab::is_running(u32::try_from(number).unwrap())
        });
        assert!(lab.agent_log().contains("an earlier run of the agent has left"), "{}", lab.agent_log());
    }
    let output = child.wait_with_output();
    let output = output.unwrap();
    assert_eq!(code(&output), 255, "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("lost the program"), "{output:?}");
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
    let mut command = lab.host.ctl_command(&["attach", "web", &id]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"two\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 3);
    assert!(output.stdout.ends_with(b"two\n"), "{output:?}");
}
