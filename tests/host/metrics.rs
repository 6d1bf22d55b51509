//! What Prometheus reads.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use guestlet::wire::proto::v1::{CollectMetricsResponse, MetricFamily, MetricSample};

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

/// A guest can neither speak for another one, nor break the page, nor make it long; and one that says nothing is not waited for
/// again and again.
#[test]
fn guests_lie_about_themselves_alone() {
    let lab = Lab::new().guest("liar", 1).guest("silent", 2).guest("old", 3).start();
    let start = |name: &str, number, capability: &str| {
        let mut said = info(&uuid(number), "boot-1");
        said.capabilities.push(capability.to_owned());
        let guest = Guest::start(&lab.path(&format!("{name}.sock")), Door::Unix, Manner::Good, said);
        lab.until_session(name, "connected");
        guest
    };
    let liar = start("liar", 1, "metrics");
    let _silent = start("silent", 2, "metrics");
    let _old = start("old", 3, "machine");
    let sample = |labels: &[&str], value| MetricSample {
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        value,
    };
    let family = |name: &str, samples| MetricFamily { name: name.to_owned(), samples };
    let many = (0..2000).map(|number| sample(&[&number.to_string()], 1.0)).collect();
    liar.machine().lock().metrics = Some(CollectMetricsResponse {
        families: vec![
            family("load1", vec![sample(&[], 0.5), sample(&["x"], 7.0)]),
            family("load5", vec![sample(&[], f64::NAN)]),
            family("up", vec![sample(&[], 7.0)]),
            family("x\nguestlet_guest_up{vm=\"old\"} 7", vec![sample(&[], 7.0)]),
            family(
                "unit_failed",
                vec![
                    sample(&["\"} 7\nguestlet_guest_load1{vm=\"old"], 1.0),
                    sample(&[&"y".repeat(9999)], 1.0),
                ],
            ),
            family("disk_reads", many),
        ],
    });
    for _ in 0..2 {
        let answer = ask(&lab, "GET /metrics HTTP/1.1");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let lines: Vec<_> = body.lines().filter(|line| line.starts_with("guestlet_guest_")).collect();
        let ups: Vec<_> =
            lines.iter().filter(|line| line.starts_with("guestlet_guest_up")).copied().collect();
        let expected =
            ["liar\"} 1", "old\"} 1", "silent\"} 0"].map(|rest| format!("guestlet_guest_up{{vm=\"{rest}"));
        assert_eq!(ups, expected);
        assert!(lines.contains(&"guestlet_guest_load1{vm=\"liar\"} 0.5"), "{body}");
        let of_liar = lines.iter().filter(|line| line.contains("{vm=\"liar\"")).count();
        assert!(of_liar > 100 && of_liar <= 150, "{of_liar}");
        assert!(lines.iter().all(|line| line.len() < 300 && !line.contains("NaN")), "{body}");
        // Each has its own name, and the fact that it is there, or not.
        assert!(lines.iter().filter(|line| !line.contains("vm=\"liar\"")).count() == 4, "{body}");
        assert!(
            body.contains(
                "unit_failed{vm=\"liar\",unit=\"\\\"} 7\u{fffd}guestlet_guest_load1{vm=\\\"old\"} 1\n"
            ),
            "{body}"
        );
    }
    let answer = ask(&lab, "GET /host/metrics HTTP/1.1");
    assert!(answer.contains("guestlet_host_guest_metrics_total{outcome=\"late\"} "), "{answer}");
    assert!(!answer.contains("guestlet_host_guest_metrics_total{outcome=\"late\"} 0\n"), "{answer}");
}
