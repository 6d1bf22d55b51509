//! What goes through a connection, and how it ends in each direction.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use nix::libc;
use nix::sys::socket::{setsockopt, sockopt};

use crate::forwarding::{Forwarding, lab, lab_of, until_broken};
use crate::host::DEADLINE;
use crate::servers::{echo, pattern, ping, round_trip, tcp, unix};

/// Has the connection broken instead of ended when it is closed.
fn break_it(stream: TcpStream) {
    setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
    drop(stream);
}

#[test]
fn ports_and_sockets_are_reached_from_ports_and_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let port = tcp(echo);
    unix(&folder.path().join("echo"), echo);
    let (six, six_port) = match TcpListener::bind("[::1]:0") {
        Ok(listener) => {
            let port = listener.local_addr().unwrap().port();
            std::thread::spawn(move || listener.incoming().for_each(|client| echo(client.unwrap())));
            (true, port)
        }
        Err(_) => (false, port),
    };
    let lab = lab(&[port.to_string(), six_port.to_string(), format!("unix:{}", path("echo"))]);
    let specs = [
        format!("0:{port}"),
        format!("127.0.0.1:0:127.0.0.1:{port}"),
        format!("0:{}", path("echo")),
        format!("{}:{}", path("a"), path("echo")),
        format!("{}:{port}", path("b")),
        // Where nothing listens at 127.0.0.1, ::1 is tried.
        format!("localhost:0:{six_port}"),
    ];
    let forwarding = Forwarding::start(&lab, &specs.each_ref().map(String::as_str));
    assert_eq!(forwarding.places[3..5], [path("a"), path("b")]);
    for place in &forwarding.places {
        let sent = pattern(300_000);
        if place.starts_with('/') {
            round_trip(&mut UnixStream::connect(place).unwrap(), &sent);
        } else {
            round_trip(&mut TcpStream::connect(place).unwrap(), &sent);
        }
    }
    assert!(six || six_port == port);
}

#[test]
fn every_byte_arrives_in_its_place_in_both_directions() {
    let port = tcp(echo);
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    round_trip(&mut forwarding.connect(), &pattern(64 << 20));
}

#[test]
fn a_server_may_speak_first_and_a_client_say_nothing() {
    let port = tcp(|mut client: TcpStream| client.write_all(b"220 ready\r\n").unwrap());
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let mut all = String::new();
    forwarding.connect().read_to_string(&mut all).unwrap();
    assert_eq!(all, "220 ready\r\n");
}

#[test]
fn each_direction_ends_by_itself() {
    let (sender, received) = mpsc::channel();
    let port = tcp(move |mut client: TcpStream| {
        client.write_all(b"hello").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        sender.send(all).unwrap();
    });
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let mut client = forwarding.connect();
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"hello");
    // The target has ended its direction, and still takes this.
    let sent = pattern(1 << 20);
    client.write_all(&sent).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert!(received.recv_timeout(DEADLINE).unwrap() == sent);
}

#[test]
fn a_connection_that_nobody_reads_from_stops_no_other() {
    let (sender, done) = mpsc::channel();
    let flood = tcp(move |mut client: TcpStream| {
        // More than all buffers on the way have room for.
        let sent = client.write_all(&vec![1; 64 << 20]);
        // Whoever asks may have gone.
        let _ = sender.send(sent.is_ok());
    });
    let port = tcp(echo);
    let lab = lab_of(&[flood, port]);
    let forwarding = Forwarding::start(&lab, &[&format!("0:{port}"), &format!("0:{flood}")]);
    let mut slow: Vec<_> = (0..8).map(|_| TcpStream::connect(&forwarding.places[1]).unwrap()).collect();
    for slow in &mut slow {
        slow.read_exact(&mut [0; 1]).unwrap();
    }
    for _ in 0..4 {
        round_trip(&mut forwarding.connect(), &pattern(2 << 20));
    }
    assert!(done.try_recv().is_err(), "those that nobody reads from wait");
    // What was held up goes on.
    let mut first = slow.remove(0);
    let mut rest = Vec::new();
    first.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), (64 << 20) - 1);
    assert!(done.recv_timeout(DEADLINE).unwrap());
}

#[test]
fn a_broken_connection_is_one_at_the_other_end() {
    let (sender, broke) = mpsc::channel();
    let port = tcp(move |mut client: TcpStream| {
        let mut word = [0; 4];
        client.read_exact(&mut word).unwrap();
        if &word == b"stay" {
            client.write_all(b"x").unwrap();
            sender.send(until_broken(&client)).unwrap();
        } else {
            client.write_all(&pattern(1 << 20)).unwrap();
            client.read_exact(&mut word).unwrap();
            break_it(client);
        }
    });
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let mut client = forwarding.connect();
    client.write_all(b"stay").unwrap();
    client.read_exact(&mut [0; 1]).unwrap();
    break_it(client);
    assert_eq!(broke.recv_timeout(DEADLINE).unwrap(), ErrorKind::ConnectionReset);

    let mut client = forwarding.connect();
    client.write_all(b"go!!").unwrap();
    let mut all = vec![0; 1 << 20];
    client.read_exact(&mut all).unwrap();
    assert!(all == pattern(1 << 20));
    client.write_all(b"now!").unwrap();
    assert_eq!(until_broken(&client), ErrorKind::ConnectionReset);
    let records = lab.agent_log();
    assert!(records.contains("broken by the client: 4 bytes to the target, 1 bytes from it"), "{records}");
    assert!(records.contains("broken by the target (Connection reset by peer"), "{records}");
}

#[test]
fn one_that_speaks_now_and_then_is_not_kept_waiting() {
    let port = tcp(echo);
    let lab = lab_of(&[port]);
    let forwarding = Forwarding::of(&lab, port);
    let mut client = forwarding.connect();
    for _ in 0..500 {
        ping(&mut client);
    }
}
