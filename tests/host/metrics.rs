//! What Prometheus reads.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab, uuid};

pub fn ask(lab: &Lab, request: &str) -> String {
    let mut stream = UnixStream::connect(lab.path("run/metrics.sock")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "{request}\r\nHost: guestlet\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn sessions_dials_and_bytes_are_counted() {
    let lab = Lab::new().guest("a", 1).vm("b", 2, "unix-socket = '@b.sock'").start();
    let _a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_vm("a", |vm| vm["callback"] == "open");
    lab.until_vm("b", |vm| vm["reason"] != "");
    let answer = ask(&lab, "GET /metrics HTTP/1.1");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{answer}");
    let value = |name: &str| -> f64 {
        let line =
            answer.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}\n{answer}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    for (name, expected) in [
        ("guestlet_host_virtual_machines{session=\"connected\"}", 1.0),
        ("guestlet_host_virtual_machines{session=\"connecting\"}", 1.0),
        ("guestlet_host_callbacks_open", 1.0),
        ("guestlet_host_sessions_total", 1.0),
        ("guestlet_host_connect_seconds_count", 1.0),
    ] {
        assert!((value(name) - expected).abs() < f64::EPSILON, "{name}\n{answer}");
    }
    for name in ["dials", "dial_failures", "events", "callback_calls", "received_bytes", "sent_bytes"] {
        assert!(value(&format!("guestlet_host_{name}_total ")) > 0.0, "{name}\n{answer}");
    }
    assert!(ask(&lab, "GET /other HTTP/1.1").starts_with("HTTP/1.1 404 "));
    assert!(ask(&lab, "POST /metrics HTTP/1.1").starts_with("HTTP/1.1 405 "));
}
