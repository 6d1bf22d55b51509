//! What is recorded of who did what.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{DEADLINE, Lab, assert_fails, terminate, text, uuid, wait};
use crate::namespace::{is_outside, run};

/// The user `daemon`.
const DAEMON: u32 = 1;

fn guest(lab: &Lab, name: &str, number: u8) -> Guest {
    let path = lab.path(&format!("{name}.sock"));
    Guest::start(&path, Door::Unix, Manner::Good, info(&uuid(number), "boot-1"))
}

/// A lab that writes to `audit.json`, with a rule for the user.
fn lab() -> Lab {
    let lab = Lab::new();
    let file = text(&lab.path("audit.json"));
    lab.set(&format!("[audit]\nfile = '{file}'\n[[access]]\nusers = ['daemon']\nverbs = ['ping']"))
        .guest("web-1", 1)
        .guest("db-1", 2)
        .start()
}

/// The records so far.
fn records(lab: &Lab) -> Vec<Value> {
    let text = std::fs::read_to_string(lab.path("audit.json")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn until_record(lab: &Lab, wanted: impl Fn(&Value) -> bool) -> Value {
    lab.until("the record is written", || records(lab).iter().any(&wanted));
    records(lab).into_iter().find(|record| wanted(record)).unwrap()
}

fn check(record: &Value, expected: &[(&str, &str)]) {
    for (key, value) in expected {
        assert_eq!(record[*key], *value, "{key}: {record}");
    }
}

#[test]
fn each_call_that_reaches_a_guest_or_changes_something_or_is_denied_is_recorded() {
    let lab = lab();
    let web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    let mode = std::fs::metadata(lab.path("audit.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for arguments in [&["ls"][..], &["info", "web-1"], &["disks", "web-1"], &["volumes", "ls"]] {
        lab.words(arguments);
    }
    lab.words(&["ping", "web-1", "-c", "2"]);
    assert!(lab.ctl_as(DAEMON, &["ping", "web-1", "-c", "1"]).output().unwrap().status.success());
    let denied =
        lab.ctl_as(DAEMON, &["disk", "attach", "db-1", "--serial", "s", "--file", "/etc/shadow"]).output();
    assert_fails(&denied.unwrap(), 1, "may not do \"disk attach --file\"");
    lab.words(&["disk", "rm", "db-1", "--serial", "../s"]);
    lab.words(&["trust", "forget", "db-1"]);
    until_record(&lab, |record| record["verb"] == "trust forget");

    let records = records(&lab);
    assert_eq!(records.len(), 5, "reading is not recorded: {records:#?}");
    let ids: Vec<_> = web.behalves().into_iter().filter_map(|behalf| behalf.audit_id).collect();
    let host =
        [("side", "host"), ("vm", "web-1"), ("role", "read"), ("verb", "ping"), ("decision", "allowed")];
    check(&records[0], &host);
    check(&records[0], &[("caller", "uid:0 root"), ("result", "OK"), ("id", &ids[0]), ("subject", "")]);
    check(&records[1], &[("caller", "uid:1 daemon"), ("result", "OK"), ("id", &ids[2])]);
    check(
        &records[2],
        &[("decision", "denied"), ("result", "PERMISSION_DENIED"), ("role", "files"), ("vm", "db-1")],
    );
    check(&records[2], &[("subject", "s (/etc/shadow)"), ("caller", "uid:1 daemon")]);
    check(
        &records[3],
        &[("decision", "allowed"), ("caller", "uid:0 root"), ("subject", "../s"), ("role", "disks")],
    );
    check(&records[3], &[("result", "OK"), ("vm", "db-1")]);
    check(&records[4], &[("result", "OK"), ("vm", "db-1"), ("role", "keys")]);
    for record in &records {
        assert!(record["time"].as_str().unwrap().parse::<prost_types::Timestamp>().is_ok(), "{record}");
        assert!(record["duration_usec"].is_u64() && record["host"] != "", "{record}");
    }
    // A ping of a second took one.
    assert!(records[0]["duration_usec"].as_u64().unwrap() > 900_000, "{}", records[0]);
    assert!(lab.log().contains(
        "audit: uid:1 daemon: disk attach --file \"db-1\" \"s (/etc/shadow)\": denied, PERMISSION_DENIED"
    ));
}

#[test]
fn a_call_that_is_given_up_is_recorded_as_such() {
    let lab = lab();
    let web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    let mut ping = lab.ctl_command(&["ping", "web-1", "-c", "10000"]).stdout(Stdio::null()).spawn().unwrap();
    lab.until("it has begun", || web.behalves().iter().any(|behalf| behalf.method == "Ping"));
    kill(Pid::from_raw(i32::try_from(ping.id()).unwrap()), Signal::SIGKILL).unwrap();
    ping.wait().unwrap();
    let record = until_record(&lab, |record| record["verb"] == "ping");
    check(&record, &[("result", "CANCELLED"), ("decision", "allowed"), ("caller", "uid:0 root")]);
}

#[test]
fn of_many_denials_some_are_recorded_and_the_rest_counted() {
    let mut lab = lab();
    lab.until("the first is denied", || !lab.ctl_as(DAEMON, &["ls"]).output().unwrap().status.success());
    let mut denied = 1;
    // One more may be written each second, so that this ends only on a machine that makes fewer.
    while !records(&lab).iter().any(|record| record["more"].is_u64()) {
        assert!(!lab.ctl_as(DAEMON, &["ls"]).output().unwrap().status.success());
        denied += 1;
    }
    assert!(lab.stop().success());
    let records = records(&lab);
    let more: u64 = records.iter().filter_map(|record| record["more"].as_u64()).sum();
    let written = records.iter().filter(|record| record["decision"] == "denied").count() as u64;
    assert_eq!(written + more, denied, "{records:#?}");
    assert!(more > 0 && written >= 20);
}

#[test]
fn without_room_for_records_calls_go_on_and_what_is_lost_is_counted() {
    let lab = Lab::new();
    let mut lab = lab.set("[audit]\nfile = '/dev/full'").guest("web-1", 1).start();
    let _web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    lab.words(&["ping", "web-1", "-c", "1"]);
    lab.until("it is said", || {
        lab.log().contains("audit records could not be written to their file lost=1 file=/dev/full")
    });
    assert!(lab.log().contains("audit: uid:0 root: ping \"web-1\": allowed, OK"));
    assert!(lab.stop().success());

    let missing = lab.path("no/audit.json");
    lab.edit("/dev/full", &text(&missing));
    let output = lab.daemon("log").output().unwrap();
    assert!(!output.status.success());
    let words = format!("cannot write audit records to {} (audit.file)", missing.display());
    assert!(
        lab.log().contains(&words) || String::from_utf8_lossy(&output.stderr).contains(&words),
        "{}",
        lab.log()
    );
}

#[test]
fn guestctl_shows_both_sides() {
    let lab = lab();
    let web = guest(&lab, "web-1", 1);
    lab.until_session("web-1", "connected");
    lab.words(&["ping", "web-1", "-c", "1"]);
    assert_fails(&lab.ctl(&["ping", "db-1"]), 1, "no session");
    until_record(&lab, |record| record["vm"] == "db-1");
    let id = web.behalves().into_iter().find_map(|behalf| behalf.audit_id).unwrap();

    let table = lab.words(&["audit"]);
    let row = table.lines().find(|line| line.ends_with(&id)).unwrap_or_else(|| panic!("{table}"));
    let columns: Vec<_> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        (&columns[1..6], columns.len()),
        (&["uid:0 root", "ping", "web-1", "-", "allowed, OK"][..], 8),
        "{table}"
    );
    assert!(table.contains("allowed, FAILED_PRECONDITION"), "{table}");
    assert_eq!(lab.words(&["audit", "--vm", "web-1"]).lines().count(), 2);
    assert_eq!(lab.words(&["audit", "--since", "0s"]).lines().count(), 1);

    let of_guest = lab.path("guest.json");
    let time = records(&lab)[0]["time"].as_str().unwrap().to_owned();
    let line = |id: &str, verb: &str| {
        format!(
            "{{\"time\":\"{time}\",\"id\":\"{id}\",\"verb\":\"{verb}\",\"decision\":\"denied\",\"result\":\"PERMISSION_DENIED\"}}\n"
        )
    };
    std::fs::write(&of_guest, line(&id, "Ping") + &line("other", "guest-exec\\u001b[2J") + "torn").unwrap();
    let output = lab.ctl(&["audit", "--guest-file", &text(&of_guest)]);
    let (table, warning) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let row = table.lines().find(|line| line.ends_with(&id)).unwrap();
    assert!(row.contains("allowed, OK") && row.contains("Ping: denied, PERMISSION_DENIED"), "{table}");
    assert!(table.contains("guest-exec\u{fffd}[2J: denied") && !table.contains('\u{1b}'), "{table}");
    assert!(warning.contains("guest.json: 1 lines are not records, and are ignored"), "{warning}");
    let calls: Value =
        serde_json::from_str(&lab.words(&["audit", "-o", "json", "--guest-file", &text(&of_guest)])).unwrap();
    let call = calls.as_array().unwrap().iter().find(|call| call["id"] == id.as_str()).unwrap();
    assert_eq!((&call["host"]["result"], &call["guest"][0]["decision"]), (&"OK".into(), &"denied".into()));
}

#[test]
fn without_an_audit_file_people_learn_how_to_have_one() {
    let lab = Lab::new().start();
    assert_fails(&lab.ctl(&["audit"]), 1, "guestlet-host writes no audit file; set one in its settings");
}

#[test]
fn the_journal_has_fields_for_programs() {
    if is_outside() {
        return;
    }
    run("mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal");
    let journal = UnixDatagram::bind("/run/systemd/journal/socket").unwrap();
    journal.set_read_timeout(Some(DEADLINE)).unwrap();
    let lab = Lab::new().guest("web-1", 1);
    lab.write();
    let mut command = lab.daemon("log");
    let log = std::fs::metadata(lab.path("log")).unwrap();
    let mut daemon = command.env("JOURNAL_STREAM", format!("{}:{}", log.dev(), log.ino())).spawn().unwrap();
    lab.until("the daemon answers", || lab.ctl(&["ls"]).status.success());
    lab.words(&["disk", "rm", "web-1", "--serial", "a"]);
    let mut buffer = vec![0; 64 * 1024];
    let entry = loop {
        let length = journal.recv(&mut buffer).unwrap();
        let entry = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if entry.contains("GUESTLET_AUDIT_ID=") {
            break entry;
        }
    };
    terminate(&daemon);
    assert!(wait(&mut daemon).success());
    for field in [
        "SYSLOG_IDENTIFIER=guestlet-host",
        "GUESTLET_CALLER=uid:0 root",
        "GUESTLET_UID=0",
        "GUESTLET_VM=web-1",
        "GUESTLET_ROLE=disks",
        "GUESTLET_VERB=disk rm",
        "GUESTLET_SUBJECT=a",
        "GUESTLET_DECISION=allowed",
        "GUESTLET_RESULT=OK",
    ] {
        assert!(entry.lines().any(|line| line == field), "{field}: {entry}");
    }
    let took = entry.lines().find_map(|line| line.strip_prefix("GUESTLET_DURATION_USEC=")).unwrap();
    assert!(took.parse::<u64>().is_ok(), "{entry}");
    assert!(entry.contains("audit: uid:0 root: disk rm \"web-1\" \"a\": allowed, OK"), "{entry}");
}
