//! The clients of docs/api that run programs in a guest.

use std::io::Read as _;
use std::process::Stdio;

use crate::clients::Clients;
use crate::host::{assert_fails, text, wait};
use crate::lab::{Lab, until};

#[test]
fn a_program_runs_and_its_outputs_and_its_end_are_those_of_the_client() {
    let lab = Lab::new();
    let clients = Clients::new("exec");
    let socket = text(&lab.host.socket());
    let script = "printf '%s|' \"$@\"; printf errors >&2; exit 7";
    for (kind, mut client) in clients.each(&[&socket, "web", "sh", "-c", script, "sh", "a b", "", "ü\n\"'$x"])
    {
        let output = client.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b||ü\n\"'$x|", "{kind}: {output:?}");
        assert_fails(&output, 7, "errors");
    }
    for (_, mut client) in clients.each(&[&socket, "web", "sh", "-c", "kill -KILL $$"]) {
        assert_fails(&client.output().unwrap(), 137, "");
    }
    for (_, mut client) in clients.each(&[&socket, "web", "/nonexistent/program"]) {
        assert_fails(&client.output().unwrap(), 127, "/nonexistent/program");
    }
    for (_, mut client) in clients.each(&[&socket, "nobody", "true"]) {
        assert_fails(&client.output().unwrap(), 125, "there is no such VM");
    }
    until("their ends were told", || lab.programs().is_empty());
}

#[test]
fn no_byte_is_lost_with_a_connection() {
    const LENGTH: usize = 8 << 20;
    let mut lab = Lab::new();
    let clients = Clients::new("exec");
    let socket = text(&lab.host.socket());
    // Longer than everything on the way has room for, so that it waits for its reader.
    let script = "seq -w 100000000 | head -c 8388608; exit 3";
    for (kind, mut client) in clients.each(&[&socket, "web", "sh", "-c", script]) {
        let mut child = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut source = child.stdout.take().unwrap();
        let mut all = vec![0; 1 << 16];
        source.read_exact(&mut all).unwrap();
        let attached = lab.agent_log().matches("(attach to ").count();
        lab.host.kill();
        lab.host.again();
        let reader = std::thread::spawn(move || {
            source.read_to_end(&mut all).unwrap();
            all
        });
        until("another call goes on with it", || lab.agent_log().matches("(attach to ").count() > attached);
        let status = wait(&mut child);
        let words = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(status.code(), Some(3), "{kind}: {words}");
        let all = reader.join().unwrap();
        assert_eq!(all.len(), LENGTH, "{kind}: {words}");
        let mut lines = all.chunks(10).zip(1..);
        let is_right = |(line, number): (&[u8], u32)| format!("{number:09}\n").as_bytes().starts_with(line);
        let right = lines.all(is_right);
        assert!(right, "{kind}");
    }
}
