//! What the host half serves to Prometheus.

use std::collections::BTreeSet;

use guestlet::metrics::{MOST_SERIES, PREFIX};
use nix::sys::signal::Signal;

use crate::lab::{Lab, Sample, find, value};

const OPEN: &str = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4";

#[test]
fn all_guests_are_on_one_page_and_each_on_its_own() {
    let lab = Lab::new();
    let samples = lab.scrape("/metrics");
    for vm in ["web", "db"] {
        assert!((value(&samples, "up", &[("vm", vm)]) - 1.0).abs() < f64::EPSILON);
        assert!(value(&samples, "memory_total_bytes", &[("vm", vm)]) > 0.0);
        let own: Vec<_> =
            samples.iter().filter(|one| one.labels.get("vm").is_some_and(|of| of == vm)).collect();
        assert!(own.len() > 30 && own.len() <= MOST_SERIES, "{}", own.len());
    }
    let uuid = crate::host::uuid(1);
    assert_eq!(find(&samples, "vm_info", &[("vm", "web"), ("uuid", &uuid)]).len(), 1);
    assert!(samples.iter().any(|one| one.name == "guestlet_host_info"));

    let one = lab.scrape("/guests/db/metrics");
    assert!(
        one.iter().all(|sample| sample.labels["vm"] == "db" && sample.name.starts_with(PREFIX)),
        "{one:?}"
    );
    assert!(find(&one, "load1", &[]).len() == 1);
    let host = lab.scrape("/host/metrics");
    assert!(host.iter().all(|sample| sample.name.starts_with("guestlet_host_")), "{host:?}");
    assert!(lab.get("/guests/nobody/metrics", OPEN).0.starts_with("HTTP/1.1 404 "));

    // Two that ask within a second cost one question; on a machine that is busy two may be further apart.
    let asked = || {
        let answered = |one: &&Sample| one.labels.get("outcome").is_some_and(|outcome| outcome == "answered");
        lab.scrape("/host/metrics").iter().find(answered).unwrap().value
    };
    lab.host.until("two scrapes within a second", || {
        let before = asked();
        let twice = [lab.scrape("/guests/web/metrics"), lab.scrape("/guests/web/metrics")];
        assert_eq!(twice.each_ref().map(|one| find(one, "load1", &[]).len()), [1, 1]);
        asked() - before < 1.5
    });
}

/// OpenMetrics 1.0: each family in one piece, after its type, samples named as that says, and the end told.
#[test]
fn who_accepts_openmetrics_gets_it() {
    let lab = Lab::new();
    let (head, body) = lab.get("/metrics", OPEN);
    assert!(
        head.to_lowercase().contains("content-type: application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    crate::exposition::check(&body);
    let (head, _) = lab.get("/healthz", OPEN);
    assert!(head.to_lowercase().contains("content-type: text/plain"), "{head}");
}

/// A guest that does not answer is missing, and no other.
#[test]
fn a_guest_that_does_not_answer_delays_its_own_series_alone() {
    let lab = Lab::new();
    lab.signal("web", Signal::SIGSTOP);
    for _ in 0..2 {
        let samples = lab.scrape("/metrics");
        assert!(value(&samples, "up", &[("vm", "web")]).abs() < f64::EPSILON);
        assert!((value(&samples, "up", &[("vm", "db")]) - 1.0).abs() < f64::EPSILON);
        assert!(find(&samples, "load1", &[("vm", "web")]).is_empty(), "absent, and not what it was");
        assert_eq!(find(&samples, "load1", &[("vm", "db")]).len(), 1);
    }
    let host = lab.scrape("/host/metrics");
    let outcome = |name: &str| {
        let of_it = |one: &&Sample| one.labels.get("outcome").is_some_and(|outcome| outcome == name);
        host.iter().find(of_it).unwrap().value
    };
    assert!(outcome("late") + outcome("failed") >= 1.0, "{host:?}");
    lab.signal("web", Signal::SIGCONT);
    lab.host.until("it is back", || {
        let samples = lab.scrape("/guests/web/metrics");
        let names: BTreeSet<_> = samples.iter().map(|one| one.name.as_str()).collect();
        names.contains("guestlet_guest_load1")
    });
}
