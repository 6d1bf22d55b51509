//! Tests of the `[[scrape]]` tables, which name exporters in guests.

use std::time::Duration;

use super::*;

#[test]
fn jobs_of_all_fragments_add_up() {
    let first = "[[scrape]]\njob = 'node'\ntarget = 'localhost:9100'\n";
    let second = "[[scrape]]\njob = 'DCGM_4.5'\ntarget = 'unix:/run/dcgm.sock'\npath = '/m?x=1'\nvms = ['gpu-*']\ninterval-seconds = 60\n\
         timeout-seconds = 9\nmax-bytes = 1024\nmax-series = 7\n";
    let settings = check(&[first, second]).unwrap();
    let pattern = |text: &str| vec![text.parse().unwrap()];
    let expected = [
        ScrapeSettings {
            job: "node".into(),
            target: "9100".parse().unwrap(),
            path: "/metrics".into(),
            vms: pattern("*"),
            interval: None,
            timeout: Duration::from_secs(5),
            max_bytes: 4 << 20,
            max_series: 5000,
        },
        ScrapeSettings {
            job: "DCGM_4.5".into(),
            target: "unix:/run/dcgm.sock".parse().unwrap(),
            path: "/m?x=1".into(),
            vms: pattern("gpu-*"),
            interval: Some(Duration::from_secs(60)),
            timeout: Duration::from_secs(9),
            max_bytes: 1024,
            max_series: 7,
        },
    ];
    assert_eq!(settings.scrapes, expected);
}

#[test]
fn what_is_no_job_is_refused_with_its_place() {
    let job = |rest: &str| vec![format!("[[scrape]]\njob = 'node'\ntarget = '9100'\n{rest}\n")];
    let twice = vec![job("").concat(), job("").concat()];
    assert_wrong(vec![
        ("no job", vec!["[[scrape]]\ntarget = '9100'\n".into()], "0.toml:1: [[scrape]] has no job"),
        ("no target", vec!["[[scrape]]\njob = 'a'\n".into()], "0.toml:1: [[scrape]] has no target"),
        (
            "a name",
            vec!["[[scrape]]\njob = 'a/b'\ntarget = '1'\n".into()],
            "0.toml:2: job \"a/b\" is not a valid name",
        ),
        (
            "a host name",
            vec!["[[scrape]]\njob = 'a'\ntarget = 'web:1'\n".into()],
            "0.toml:3: target = \"web:1\"",
        ),
        ("the same job", twice, "1.toml:2:"),
        ("a path", job("path = 'metrics'"), "0.toml:4: path = \"metrics\""),
        ("no VM", job("vms = []"), "0.toml:4: vms is empty"),
        ("too long", job("timeout-seconds = 61"), "0.toml:4: scrape.timeout-seconds = 61: use 1 to 60"),
        ("too large", job("max-bytes = 16777217"), "0.toml:4: scrape.max-bytes"),
        ("no series", job("max-series = 0"), "0.toml:4: scrape.max-series"),
        ("no time between", job("interval-seconds = 0"), "0.toml:4: scrape.interval-seconds"),
    ]);
}
