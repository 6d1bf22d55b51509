//! The input of a program that one client has begun with and another goes on with.

use std::io::{Read as _, Write as _};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::lab::{Lab, code, until};
use crate::resume::send;

/// More than a pipe holds: the rest of it waits in the agent.
const FIRST: usize = 100 << 10;
/// More than may be under way at a time.
const SECOND: usize = 200 << 10;

/// Starts a program that reads nothing until there is the file `go`, and sends it this. Its identifier, and its client.
fn started(lab: &Lab, input: &[u8]) -> (String, Child) {
    let script = format!("until test -e {}; do sleep 0.05; done; cat; exit 6", lab.file("go").display());
    let mut command = lab.command(&["-i"], &["sh", "-c", &script]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("it runs", || !lab.programs().is_empty());
    child.stdin.as_mut().unwrap().write_all(input).unwrap();
    // Until all of it is where it gets to.
    std::thread::sleep(Duration::from_millis(700));
    (lab.programs()[0]["id"].as_str().unwrap().to_owned(), child)
}

fn end(mut client: Child) {
    client.kill().unwrap();
    client.wait().unwrap();
}

fn attach(lab: &Lab, options: &[&str], id: &str, input: Vec<u8>) -> Output {
    let mut command = lab.host.ctl_command(&[&["attach"], options, &["web", id]].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut sink = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || drop(sink.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn input_goes_on_after_what_the_client_before_has_sent() {
    let lab = Lab::new();
    let (id, client) = started(&lab, &vec![b'a'; FIRST]);
    end(client);
    until("nobody is attached", || lab.programs()[0]["is_attached"] == false);
    let go = lab.file("go");
    let opened = std::thread::spawn(move || {
        // The other one sends as much as it may before anything is read.
        std::thread::sleep(Duration::from_secs(1));
        std::fs::write(go, "").unwrap();
    });
    let output = attach(&lab, &["-i"], &id, vec![b'b'; SECOND]);
    opened.join().unwrap();
    assert_eq!(code(&output), 6, "{}", String::from_utf8_lossy(&output.stderr));
    let expected = [vec![b'a'; FIRST], vec![b'b'; SECOND]].concat();
    assert_eq!(output.stdout.len(), expected.len());
    assert!(output.stdout == expected);
}

#[test]
fn a_client_whose_place_others_have_had_meanwhile_does_not_go_on() {
    let mut lab = Lab::new();
    let (id, mut client) = started(&lab, b"one\n");
    std::fs::write(lab.file("go"), "").unwrap();
    // It has no connection, and is not able to make one, while somebody else has the program.
    send(&client, Signal::SIGSTOP);
    lab.host.kill();
    lab.host.again();
    let mut command = lab.host.ctl_command(&["attach", "-i", "web", &id]);
    let mut other = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    writeln!(other.stdin.as_mut().unwrap(), "two").unwrap();
    let mut lines = [0; 8];
    other.stdout.as_mut().unwrap().read_exact(&mut lines).unwrap();
    assert_eq!(&lines, b"one\ntwo\n");
    end(other);
    client.stdin.as_mut().unwrap().write_all(b"three\n").unwrap();
    send(&client, Signal::SIGCONT);
    let output = client.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code(&output), 255, "{words}");
    assert!(words.contains("another client sent input") && words.contains("attach -i web"), "{words}");
    // The program is as the other one has left it.
    let output = attach(&lab, &["-i"], &id, b"four\n".to_vec());
    assert_eq!((code(&output), output.stdout.ends_with(b"two\nfour\n")), (6, true), "{output:?}");
}

#[test]
fn a_client_that_only_looks_on_leaves_the_input_alone() {
    let lab = Lab::new();
    let (id, client) = started(&lab, b"one\n");
    end(client);
    std::fs::write(lab.file("go"), "").unwrap();
    let mut command = lab.host.ctl_command(&["attach", "web", &id]);
    let mut looker = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 4];
    looker.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    assert_eq!(&line, b"one\n");
    // It has had the time to say that its input has ended.
    std::thread::sleep(Duration::from_millis(300));
    let output = attach(&lab, &["-i"], &id, b"two\n".to_vec());
    assert_eq!((code(&output), output.stdout.ends_with(b"two\n")), (6, true), "{output:?}");
    assert_eq!(crate::host::wait(&mut looker).code(), Some(255), "another client has attached");
}

#[test]
fn input_that_has_ended_is_not_added_to() {
    let lab = Lab::new();
    let (id, mut client) = started(&lab, b"all\n");
    drop(client.stdin.take());
    std::thread::sleep(Duration::from_millis(300));
    end(client);
    let refused = attach(&lab, &["-i"], &id, b"more\n".to_vec());
    let words = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(code(&refused), 125, "{words}");
    assert!(words.contains("its input has already been closed") && words.contains("leave out -i"), "{words}");
    std::fs::write(lab.file("go"), "").unwrap();
    let output = attach(&lab, &[], &id, b"more\n".to_vec());
    assert_eq!((code(&output), &output.stdout[..]), (6, &b"all\n"[..]), "{output:?}");
}

#[test]
fn what_a_program_does_not_have_is_not_asked_of_it() {
    let lab = Lab::new();
    let id = crate::lab::text(&lab.exec(&["--detach"], &["sleep", "1000"]));
    for (option, why) in [("-i", "it has no input"), ("-t", "it has no terminal")] {
        let refused = attach(&lab, &[option], id.trim(), Vec::new());
        let words = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(code(&refused), 125, "{words}");
        assert!(words.contains(why) && words.contains(&format!("leave out {option}")), "{words}");
    }
}
