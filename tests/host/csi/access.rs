//! Which users of the host may do what to volumes, and what is recorded of who did.

use std::process::Output;

use serde_json::Value;
use tonic::Code;

use super::{Machines, USUAL, serial, started};
use crate::lab::{assert_fails, text};

/// The user `daemon`.
const DAEMON: u32 = 1;
const MIB: i64 = 1 << 20;

fn records(vms: &Machines) -> Vec<Value> {
    let text = std::fs::read_to_string(vms.lab.path("audit.json")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Machines whose records go to `audit.json`.
fn recorded(settings: &str) -> Machines {
    let folder = tempfile::tempdir().unwrap();
    let file = text(&folder.path().join("audit.json"));
    let vms = started(&USUAL, &format!("[audit]\nfile = '{file}'\n{settings}"));
    std::fs::hard_link(file, vms.lab.path("audit.json")).unwrap();
    vms
}

/// The last `count` records, when there are as many as `all`.
fn until(vms: &Machines, all: usize) -> Vec<Value> {
    vms.lab.until("the records are written", || records(vms).len() >= all);
    let records = records(vms);
    assert_eq!(records.len(), all, "{records:#?}");
    records
}

#[test]
fn what_guests_do_to_volumes_is_recorded_as_theirs() {
    let vms = recorded("[cluster.dev]\ncontrollers = ['a']");
    let a = vms.of("a");
    let id = a.create("pvc-1", 20 * MIB).unwrap().volume_id;
    a.publish(&id, "b").unwrap();
    a.all();
    a.expand(&id, 30 * MIB).unwrap();
    a.unpublish(&id, "b").unwrap();
    a.delete(&id).unwrap();
    assert_eq!(vms.of("b").create("pvc-2", 20 * MIB).unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(a.expand("none", 30 * MIB).unwrap_err().code(), Code::NotFound);

    let records = until(&vms, 7);
    let told = |key: &str| -> Vec<&str> { records.iter().map(|one| one[key].as_str().unwrap()).collect() };
    assert_eq!(told("caller"), ["vm:a", "vm:a", "vm:a", "vm:a", "vm:a", "vm:b", "vm:a"]);
    let verbs = ["create", "attach", "expand", "detach", "rm", "create", "expand"]
        .map(|verb| format!("volumes {verb}"));
    assert_eq!(told("verb"), verbs);
    assert_eq!(told("subject"), ["pvc-1", &id, &id, &id, &id, "pvc-2", "none"]);
    assert_eq!(told("vm"), ["", "b", "", "b", "", "", ""]);
    assert_eq!(told("result"), ["OK", "OK", "OK", "OK", "OK", "PERMISSION_DENIED", "NOT_FOUND"]);
    assert_eq!(told("decision")[4..], ["allowed", "denied", "allowed"]);

    // Its guest was asked to let go of the disk as part of the same call.
    let behalves = vms.guest("b").behalves();
    let release = behalves.iter().find(|behalf| behalf.method == "ReleaseDisk").unwrap();
    assert_eq!(release.caller.as_deref(), Some("vm:a"));
    assert_eq!(release.audit_id.as_deref(), records[3]["id"].as_str());
}

#[test]
fn a_guest_is_told_which_user_takes_its_disk() {
    let vms = recorded("[[access]]\nusers = ['daemon']\nroles = ['disks', 'volumes']");
    let run = |arguments: &[&str]| -> Output { vms.lab.ctl_as(DAEMON, arguments).output().unwrap() };
    let made = run(&["-o", "json", "volumes", "create", "v", "--cluster", "dev", "--size", "20M"]);
    assert!(made.status.success(), "{made:?}");
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    let id = made["id"].as_str().unwrap();
    for arguments in [
        &["volumes", "attach", id, "a"][..],
        &["volumes", "detach", id],
        &["disk", "attach", "a", "--serial", "s", "--size", "1M"],
        &["disk", "detach", "a", "--serial", "s"],
    ] {
        let output = run(arguments);
        assert!(output.status.success(), "{output:?}");
    }
    let records = until(&vms, 5);
    assert_eq!((&records[1]["vm"], &records[0]["subject"]), (&"a".into(), &"dev/v".into()));
    let behalves = vms.guest("a").behalves();
    let asked: Vec<_> = behalves.iter().filter(|behalf| behalf.method.ends_with("Disk")).collect();
    let methods: Vec<_> = asked.iter().map(|behalf| behalf.method).collect();
    assert_eq!(methods, ["ReleaseDisk", "FindDisk", "ReleaseDisk"]);
    for (behalf, record) in asked.iter().zip(&records[2..]) {
        assert_eq!(behalf.caller.as_deref(), Some("uid:1 daemon"));
        assert_eq!(behalf.audit_id.as_deref(), record["id"].as_str());
    }
}

#[test]
fn a_user_does_to_volumes_what_the_rules_cover() {
    let vms =
        started(&USUAL, "[[access]]\nusers = ['daemon']\nroles = ['all']\nvms = ['a']\nclusters = ['dev']");
    let (a, c) = (vms.of("a"), vms.of("c"));
    let [of_a, of_b, free] =
        ["pvc-1", "pvc-2", "pvc-3"].map(|name| a.create(name, 20 * MIB).unwrap().volume_id);
    let of_c = c.create("pvc-4", 20 * MIB).unwrap().volume_id;
    a.publish(&of_a, "a").unwrap();
    a.publish(&of_b, "b").unwrap();
    c.publish(&of_c, "c").unwrap();
    let run = |arguments: &[&str]| vms.lab.ctl_as(DAEMON, arguments).output().unwrap();
    let list: Value = serde_json::from_slice(&run(&["-o", "json", "volumes", "ls"]).stdout).unwrap();
    let seen: Vec<_> = list.as_array().unwrap().iter().map(|volume| volume["id"].as_str().unwrap()).collect();
    assert_eq!(seen, [&of_a]);
    for id in [&of_b, &of_c, &free] {
        for verb in [&["volumes", "attach", id, "a"][..], &["volumes", "detach", id], &["volumes", "rm", id]]
        {
            assert_fails(&run(verb), 1, &format!("with the volume {id:?}"));
        }
    }
    // The one that the VM has goes, but to no other VM.
    assert_fails(&run(&["volumes", "attach", &of_a, "b"]), 1, "and the VM \"b\": no [[access]] table");
    assert!(run(&["volumes", "expand", &of_a, "--size", "40M"]).status.success());
    assert!(run(&["volumes", "detach", &of_a]).status.success());
    assert_fails(&run(&["volumes", "attach", &of_a, "a"]), 1, "may not do \"volumes attach\"");
    assert!(vms.files("fast").iter().any(|file| file.contains(serial(&free))));
}
