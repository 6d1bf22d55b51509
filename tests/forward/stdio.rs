//! One connection by standard input and output.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Output, Stdio};
use std::sync::mpsc;

use crate::forwarding::{lab, lab_of};
use crate::host::{DEADLINE, assert_fails, wait};
use crate::lab::Lab;
use crate::servers::{echo, pattern, tcp, unix};

fn start(lab: &Lab, target: &str) -> Child {
    let mut command = lab.host.ctl_command(&["forward", "web", target, "--stdio"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn run(lab: &Lab, target: &str, input: Vec<u8>) -> Output {
    let mut child = start(lab, target);
    let mut sink = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || sink.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn what_is_read_and_written_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("echo");
    unix(&path, echo);
    let port = tcp(echo);
    let lab = lab(&[port.to_string(), format!("unix:{}", path.display())]);
    for target in [port.to_string(), path.display().to_string()] {
        let sent = pattern(8 << 20);
        let output = run(&lab, &target, sent.clone());
        assert!(output.status.success() && output.stderr.is_empty(), "{:?}", output.stderr);
        assert!(output.stdout == sent, "{} bytes", output.stdout.len());
    }
}

#[test]
fn it_ends_with_the_target_whether_or_not_there_is_more_input() {
    let port = tcp(|mut client: TcpStream| client.write_all(b"bye").unwrap());
    let lab = lab_of(&[port]);
    let mut child = start(&lab, &port.to_string());
    let mut all = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut all).unwrap();
    assert_eq!(all, b"bye");
    // Standard input is still open.
    assert_eq!(wait(&mut child).code(), Some(0));
}

#[test]
fn input_that_a_target_takes_after_its_own_end_reaches_it() {
    let (sender, received) = mpsc::channel();
    let port = tcp(move |mut client: TcpStream| {
        let mut all = vec![0; 1];
        client.read_exact(&mut all).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        client.read_to_end(&mut all).unwrap();
        sender.send(all).unwrap();
    });
    let lab = lab_of(&[port]);
    // All of it is read from standard input before the target's end comes.
    let sent = pattern(20_000);
    assert!(run(&lab, &port.to_string(), sent.clone()).status.success());
    assert_eq!(received.recv_timeout(DEADLINE).unwrap().len(), sent.len());
}

#[test]
fn a_channel_that_is_lost_is_told_by_the_exit_code() {
    let port = tcp(echo);
    let mut lab = lab_of(&[port]);
    let mut child = start(&lab, &port.to_string());
    let mut back = [0; 4];
    child.stdin.as_mut().unwrap().write_all(b"ping").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut back).unwrap();
    lab.host.kill();
    let status = wait(&mut child);
    let complaint = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(255), "{complaint}");
    assert!(complaint.contains("lost the connection to web"), "{complaint}");
}

#[test]
fn errors_are_told_before_anything_is_read() {
    let lab = lab_of(&[22]);
    let output = run(&lab, "23", Vec::new());
    assert_fails(&output, 1, "cannot reach 23 in web: no grant lets");
    assert!(output.stdout.is_empty());
}
