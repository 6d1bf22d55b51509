//! Who may sit at a console, and what is written down.

use std::process::Stdio;

use serde_json::Value;

use crate::guest::GREETING;
use crate::host::{self, assert_fails, text};
use crate::lab::{Client, Lab, SOCKET};

/// The users `daemon` and `bin`, each in a group of the same name.
const DAEMON: u32 = 1;
const BIN: u32 = 2;

fn lab(rules: &str) -> Lab {
    let host = host::Lab::new();
    let file = text(&host.path("audit.json"));
    let host = host.set(rules).set(&format!("[audit]\nfile = '{file}'"));
    Lab::of(host, SOCKET, &[], "cluster = 'dev'")
}

fn records(lab: &Lab) -> Vec<Value> {
    let lines = std::fs::read_to_string(lab.host.path("audit.json")).unwrap_or_default();
    let all = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|record| record["verb"] == "console").collect()
}

#[test]
fn the_beginning_and_the_end_of_each_are_written_down() {
    let lab = lab("[[access]]\nusers = ['daemon']\nroles = ['read']");
    let mut client = lab.client(&[]);
    lab.qemu.go();
    client.until(GREETING);
    assert_fails(&lab.ctl(&[]), 1, "in use");
    client.write(b"ab");
    client.until("bc");
    drop(client);
    assert_fails(
        &lab.host.ctl_as(DAEMON, &["console", "web"]).stdin(Stdio::null()).output().unwrap(),
        1,
        "uid:1 daemon may not do \"console\" with the VM \"web\"",
    );
    lab.host.until("all is written", || records(&lab).len() == 4);
    let records = records(&lab);
    let told: Vec<_> = records
        .iter()
        .map(|record| {
            let word = |key: &str| record[key].as_str().unwrap().to_owned();
            (word("caller"), word("subject"), word("decision"), word("result"))
        })
        .collect();
    let output = GREETING.len() + 2;
    let closed = format!("closed; output {output}, of it lost 0, input 2 bytes");
    let expected = [
        ("uid:0 root", "open", "allowed", "OK"),
        ("uid:0 root", "open", "allowed", "ABORTED"),
        ("uid:0 root", &closed, "allowed", "CANCELLED"),
        ("uid:1 daemon", "open", "denied", "PERMISSION_DENIED"),
    ];
    let expected = expected.map(|(caller, subject, decision, result)| {
        (caller.to_owned(), subject.to_owned(), decision.to_owned(), result.to_owned())
    });
    assert_eq!(told, expected);
    assert!(records.iter().all(|record| record["vm"] == "web" && record["role"] == "console"), "{records:?}");
    assert_eq!(records[0]["id"], records[2]["id"]);
}

#[test]
fn whoever_may_no_longer_is_ended_and_nobody_takes_a_console_from_root() {
    let mut lab = lab("[[access]]\nusers = ['daemon', 'bin']\nroles = ['console']\nclusters = ['dev']");
    let mut first = Client::start(lab.host.ctl_as(DAEMON, &["console", "web"]));
    let mut second = Client::start(lab.host.ctl_as(BIN, &["console", "web", "--force"]));
    assert_eq!(first.code(), Some(7));
    first.until_complaint("uid:2 bin has taken the console of web over");
    let mut third = lab.client(&["--force"]);
    assert_eq!(second.code(), Some(7));
    for (options, words) in [
        (&[][..], "the console is in use by uid:0 root"),
        (&["--force"], "the console is in use by uid:0 root, and only root may take it over from root"),
    ] {
        let command = [&["console", "web"], options].concat();
        let output = lab.host.ctl_as(BIN, &command).stdin(Stdio::null()).output().unwrap();
        assert_fails(&output, 1, words);
    }
    lab.qemu.go();
    third.until(GREETING);
    third.write(b"a");
    third.until("b");
    drop(third);

    let mut fourth = Client::start(lab.host.ctl_as(DAEMON, &["console", "web"]));
    // Other rules change nothing for it.
    lab.host.edit("'daemon', 'bin'", "'daemon'");
    fourth.write(b"c");
    fourth.until("d");
    lab.host.edit("clusters = ['dev']", "clusters = ['prod']");
    assert_eq!(fourth.code(), Some(255));
    fourth
        .until_complaint("no [[access]] table in the settings of guestlet-host allows this console any more");
}
