//! Labels of VMs: in the settings, in lists, and as what VMs are selected by.

use std::process::Command;

use serde_json::{Value, json};

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, assert_fails, uuid};

/// Three VMs without agents, two of which have labels.
fn lab() -> Lab {
    let labels = "labels = { tier = 'db', env = 'prod', 'example.com/spare' = '' }";
    Lab::new()
        .vm("db-1", 1, &format!("unix-socket = '@1.sock'\n{labels}"))
        .vm("db-2", 2, "unix-socket = '@2.sock'\n[vm.labels]\ntier = 'db'\nenv = 'test'")
        .vm("web-1", 3, "unix-socket = '@3.sock'")
        .start()
}

#[test]
fn vms_are_selected_by_their_labels() {
    let lab = lab();
    let names = |arguments: &[&str]| {
        let list: Value =
            serde_json::from_str(&lab.words(&[&["ls", "-o", "json"], arguments].concat())).unwrap();
        let name = |vm: &Value| vm["name"].as_str().unwrap().to_owned();
        list.as_array().unwrap().iter().map(name).collect::<Vec<_>>()
    };
    for (selector, expected) in [
        ("tier=db", &["db-1", "db-2"][..]),
        ("tier==db,env!=prod", &["db-2"]),
        ("env in (prod, test)", &["db-1", "db-2"]),
        ("tier notin (db)", &["web-1"]),
        ("!tier", &["web-1"]),
        ("example.com/spare", &["db-1"]),
        ("example.com/spare=", &["db-1"]),
        ("tier=web", &[]),
        ("", &["db-1", "db-2", "web-1"]),
    ] {
        assert_eq!(names(&["-l", selector]), expected, "{selector}");
    }
    assert_eq!(names(&["*-1", "--selector=tier=db"]), ["db-1"], "names and labels");

    let table = lab.words(&["ls", "--show-labels"]);
    let last = |line: &str| line.rsplit("  ").next().unwrap().to_owned();
    let labels: Vec<_> = table.lines().map(last).collect();
    assert_eq!(labels, ["LABELS", "env=prod,example.com/spare=,tier=db", "env=test,tier=db", "-"], "{table}");
    assert!(!lab.words(&["ls", "-o", "wide"]).contains("LABELS"));
    assert_eq!(lab.info("db-2")["labels"], json!({ "env": "test", "tier": "db" }));
    assert_eq!(lab.info("web-1")["labels"], json!({}));
    let described = lab.words(&["info", "db-1"]);
    let words: Vec<_> = described.split_whitespace().collect();
    let labels = ["Labels:", "env=prod", "example.com/spare=", "tier=db", "Power:"];
    assert!(words.windows(labels.len()).any(|some| some == labels), "{described}");
    assert!(!lab.words(&["info", "web-1"]).contains("Labels:"));
}

#[test]
fn mistakes_in_selectors_are_told_with_their_place() {
    let lab = lab();
    assert_fails(
        &lab.ctl(&["ls", "-l", "tier in db"]),
        2,
        "at character 9: expected values in parentheses, as in (x,y), but found \"db\"",
    );
    // What there is is shown before the complaint.
    let output = lab.ctl(&["ls", "-l", "tier=db", "db-1", "web-1"]);
    assert_fails(&output, 4, "no VM with the labels tier=db matches \"web-1\"; guestctl ls --show-labels");
    assert!(String::from_utf8_lossy(&output.stdout).contains("\ndb-1 "), "{output:?}");
}

#[test]
fn shells_are_told_the_labels_that_there_are() {
    let lab = lab();
    for (typed, expected) in [
        ("t", "tier=db\n"),
        ("env=", "env=prod\nenv=test\n"),
        ("!gpu,example", "!gpu,example.com/spare=\n"),
        ("x", ""),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_guestctl"));
        command.args(["__complete", "--", "guestctl", "ls", "-l", typed]);
        let output = command.env("GUESTLET_HOST_SOCKET", lab.socket()).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{typed}");
    }
}

#[test]
fn edited_labels_leave_the_session_as_it_is() {
    let mut lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'\nlabels = { tier = 'db' }").start();
    let a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    let before = lab.until_session("a", "connected");
    assert_eq!(before["labels"], json!({ "tier": "db" }));
    lab.edit("tier = 'db'", "tier = 'web', rack = '7'");
    let after = lab.until_vm("a", |vm| vm["labels"] != before["labels"]);
    assert_eq!(after["labels"], json!({ "rack": "7", "tier": "web" }));
    for key in ["session", "sessions", "since"] {
        assert_eq!(after[key], before[key], "{key}");
    }
    assert_eq!(a.open(), 1);

    // A mistake leaves all settings as they are.
    lab.edit("rack = '7'", "rack = 'a b'");
    let words = "labels of the VM \"a\": \"rack\" = \"a b\": a label may have letters";
    lab.until("people are warned", || String::from_utf8_lossy(&lab.ctl(&["ls"]).stderr).contains(words));
    assert_eq!(lab.info("a")["labels"], after["labels"]);
    lab.edit(", rack = 'a b'", "");
    lab.until_vm("a", |vm| vm["labels"] == json!({ "tier": "web" }));
}
