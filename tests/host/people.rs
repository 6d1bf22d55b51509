//! What people and programs read, and what they are told when something is wrong.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{AgentStopping, ShutdownRequested};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, assert_fails, text, uuid, wait};

#[test]
fn vms_are_listed_and_described_for_people_and_programs() {
    let lab = Lab::new()
        .vm("web-1", 1, "vsock-socket = '@web.vsock'\ncluster = 'dev'")
        .vm("db-1", 2, "unix-socket = '@db.sock'")
        .start();
    let _web = Guest::start(&lab.path("web.vsock"), Door::Hybrid, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_vm("web-1", |vm| vm["callback"] == "open");
    lab.until_vm("db-1", |vm| vm["reason"] != "");

    let list = lab.words(&["ls"]);
    let lines: Vec<Vec<&str>> = list
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    assert_eq!(
        lines[0],
        ["NAME", "CLUSTER", "POWER", "AGENT", "HOSTNAME", "OS", "VERSION", "SINCE", "REASON"],
        "{list}"
    );
    assert_eq!(lines[1][..7], ["db-1", "-", "unknown", "connecting", "-", "-", "-"], "{list}");
    assert!(lines[1][8].starts_with("there is no socket /"), "{list}");
    let words =
        ["web-1", "dev", "unknown", "connected", "web-1.example", "Debian GNU/Linux 12 (bookworm)", "0.1.0"];
    assert_eq!(lines[2][..7], words, "{list}");
    assert_eq!((lines.len(), lines[2].len()), (3, 8), "{list}");

    let values: Value = serde_json::from_str(&lab.words(&["-o", "json", "ls"])).unwrap();
    assert_eq!(values[0]["name"], "db-1");
    assert_eq!(values[0]["guest"], Value::Null);
    let mut web = values[1].clone();
    for key in ["since", "last_heard"] {
        let time = web[key].take();
        assert!(time.as_str().unwrap().parse::<prost_types::Timestamp>().is_ok(), "{time}");
    }
    let expected = json!({
        "name": "web-1", "uuid": uuid(1), "cluster": "dev", "labels": {}, "power": "unknown", "session": "connected",
        "reason": "", "guest_key": "", "dial": format!("hybrid:{}:970", text(&lab.path("web.vsock"))),
        "since": null, "last_heard": null, "sessions": 1,
        "guest": {
            "machine_id": "0123456789abcdef0123456789abcdef", "boot_id": "boot-1", "dmi_uuid": uuid(1),
            "host_name": "web-1.example",
            "os": {
                "id": "debian", "name": "Debian GNU/Linux",
                "pretty_name": "Debian GNU/Linux 12 (bookworm)", "version_id": "12",
            },
            "kernel_release": "6.1.0-30-cloud-amd64", "machine": "x86_64", "agent_version": "0.1.0",
            "capabilities": ["events", "qga", "callback"],
        },
        "power_problem": "", "callback": "open", "callback_reason": "", "missed_events": 0,
        "state": {
            "interfaces": [], "file_systems": [], "users": [], "disks": [],
            "topology": null, "node": null, "health": null, "freeze": null,
        },
        "state_cut": null, "io_errors": [], "recent": [],
    });
    let topology = web.as_object_mut().unwrap().remove("topology").unwrap();
    assert_eq!((&topology["wanted"]["zone"], &topology["acknowledged"]), (&json!(""), &Value::Null));
    assert_eq!(web, expected);

    let described = lab.words(&["info", "web-1"]);
    for words in [
        "Agent:          connected for ",
        "Capabilities:   events, qga, callback\n",
        "Boot ID:        boot-1\n",
    ] {
        assert!(described.contains(words), "{described}");
    }
}

#[test]
fn a_list_has_the_vms_that_are_asked_for_in_the_order_that_is_wanted() {
    let lab = Lab::new().guest("web-10", 1).guest("web-2", 2).guest("db-1", 3).start();
    let names = |arguments: &[&str]| {
        let table = lab.words(&[&["ls"], arguments].concat());
        let first = |line: &str| line.split_whitespace().next().unwrap().to_owned();
        table.lines().skip(1).map(first).collect::<Vec<_>>()
    };
    assert_eq!(names(&["web-2", "d*"]), ["db-1", "web-2"]);
    assert_eq!(names(&["--sort", "NAME"]), ["db-1", "web-2", "web-10"], "numbers count as numbers");
    assert_eq!(names(&["web-*", "--sort", "dial"]), ["web-2", "web-10"], "a column that is not shown");
    let found: Value =
        serde_json::from_str(&lab.words(&["ls", "web-*", "--sort", "name", "-o", "json"])).unwrap();
    assert_eq!((&found[0]["name"], &found[1]["name"]), (&json!("web-2"), &json!("web-10")));

    // What there is is shown before the complaint.
    let output = lab.ctl(&["ls", "db-1", "mail-*"]);
    assert_fails(&output, 4, "no VM matches \"mail-*\"");
    assert!(String::from_utf8_lossy(&output.stdout).contains("\ndb-1 "), "{output:?}");
    let wrong = lab.ctl(&["ls", "--sort", "age"]);
    assert_fails(
        &wrong,
        2,
        "[possible values: name, cluster, power, agent, hostname, os, version, since, heard,",
    );
    let help = |option| lab.words(&["ls", option]);
    assert!(help("--help").contains("--kubeconfig") && !help("-h").contains("--kubeconfig"));
}

#[test]
fn yaml_says_what_json_says() {
    let lab = Lab::new().guest("web-1", 1).guest("yes", 2).start();
    for arguments in [&["ls"][..], &["info", "yes"], &["doctor"], &["topology"], &["trust", "ls"]] {
        let said = |format| {
            let output = lab.ctl(&[arguments, &["-o", format]].concat());
            String::from_utf8(output.stdout).unwrap()
        };
        let (yaml, json) = (said("yaml"), said("json"));
        let mut yaml: Value = serde_saphyr::from_str(&yaml).unwrap_or_else(|error| panic!("{error}: {yaml}"));
        let mut json: Value = serde_json::from_str(&json).unwrap();
        // A session that is not there yet may be tried again between the two.
        for value in [&mut yaml, &mut json] {
            forget(value, &["since", "last_heard", "reason", "session"]);
        }
        assert_eq!(yaml, json, "{arguments:?}");
    }
}

/// Leaves out what has one of these keys, wherever it is.
fn forget(value: &mut Value, keys: &[&str]) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| forget(value, keys)),
        Value::Object(values) => {
            values.retain(|key, _| !keys.contains(&key.as_str()));
            values.values_mut().for_each(|value| forget(value, keys));
        }
        _ => {}
    }
}

#[test]
fn what_happens_is_told_in_words_and_heartbeats_only_on_demand() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").vm("b", 2, "unix-socket = '@b.sock'").start();
    let a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    let _b = Guest::start(&lab.path("b.sock"), Door::Unix, Manner::Good, info(&uuid(2), "boot-1"));
    lab.until_session("a", "connected");
    lab.until_session("b", "connected");
    let (all, one) = (Watch::start(&lab, &[]), Watch::start(&lab, &["a"]));
    all.until(|line| line.ends_with("Z  b  heartbeat"));
    a.happen(Kind::ShutdownRequested(ShutdownRequested { mode: "powerdown".into() }));
    a.happen(Kind::AgentStopping(AgentStopping {}));
    for watch in [&all, &one] {
        watch.until(|line| line.ends_with("Z  a  shutdown requested: powerdown"));
        watch.until(|line| line.ends_with("Z  a  agent stopping"));
    }
    drop(a);
    all.until(|line| line.contains("Z  a  session closed: "));
    one.until(|line| line.contains("Z  a  session closed: "));

    // Nothing says when this one has begun to watch, so the guest comes and goes until it is seen.
    let quiet = Watch::quiet(&lab, &["a", "-o", "json"]);
    let mut seen: Vec<Value> = Vec::new();
    for boot in 2.. {
        let boot_id = format!("boot-{boot}");
        let _a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), &boot_id));
        all.until(|line| line.contains("Z  a  session opened after ") && line.ends_with(" s (new boot)"));
        all.until(|line| line.ends_with("Z  a  heartbeat"));
        seen.extend(quiet.so_far().iter().map(|line| serde_json::from_str::<Value>(line).unwrap()));
        // The second boot that it sees began after the heartbeat of the first.
        if seen.iter().filter(|event| event["event"] == "session-opened").count() > 1 {
            break;
        }
        assert!(boot < 1000, "{seen:#?}");
    }
    assert!(seen.iter().all(|event| event["name"] == "a" && event["event"] != "heartbeat"), "{seen:#?}");
}

#[test]
fn a_reader_that_goes_away_is_no_reason_to_complain() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let _a = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut watch = lab.ctl_command(&["watch", "--heartbeats"]);
    let output = watch.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn without_a_daemon_people_learn_how_to_start_it() {
    let lab = Lab::new();
    let words = format!(
        "guestlet-host is not running (no socket at {}); start it with: systemctl start guestlet-host",
        text(&lab.socket())
    );
    for arguments in [&["ls"][..], &["info", "a"], &["watch"], &["ping", "a"]] {
        assert_fails(&lab.ctl(arguments), 3, &words);
    }
    std::fs::create_dir(lab.path("run")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(lab.socket()).unwrap());
    assert_fails(&lab.ctl(&["ls"]), 3, "guestlet-host is not running (nobody answers at ");
}

#[test]
fn unknown_vms_and_wrong_usage_have_their_own_exit_codes() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    assert_fails(&lab.ctl(&["info", "b"]), 4, "guestlet-host knows no VM named \"b\"; guestctl ls lists");
    assert_fails(&lab.ctl(&["watch", "b"]), 4, "guestlet-host knows no VM named \"b\"");
    assert_fails(&lab.ctl(&["ping", "b"]), 4, "guestlet-host knows no VM named \"b\"");
    assert_fails(&lab.ctl(&["ping", "a"]), 1, "there is no session with this guest now");
    assert_fails(&lab.ctl(&["ping", "a", "-c", "10001"]), 2, "10001");
    assert_fails(&lab.ctl(&["watch", "--kind", "nonsense"]), 2, "clock-jumped");
    assert_fails(&lab.ctl(&["watch", "--since", "soon"]), 2, "such as 5m");
    assert_fails(&lab.ctl(&["info"]), 2, "Usage");
    assert!(lab.words(&["--help"]).contains(guestlet::config::host::DEFAULT_SOCKET));
    assert_fails(&lab.ctl(&["-o", "xml", "ls"]), 2, "possible values: table, wide, json, yaml");
}

#[test]
fn a_watch_ends_when_nobody_reads_it_any_more() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    // Nothing happens that it could fail to write.
    let mut watch =
        lab.ctl_command(&["watch", "--kind", "guest-reset"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(watch.try_wait().unwrap(), None, "it waits");
    drop(watch.stdout.take());
    assert!(wait(&mut watch).success());
}

#[test]
fn pings_that_are_interrupted_are_summed_up() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let _guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, info(&uuid(1), "boot-1"));
    lab.until_session("a", "connected");
    let mut ping = lab.ctl_command(&["ping", "a", "-c", "10000"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(ping.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().starts_with("a: 1 in "));
    kill(Pid::from_raw(i32::try_from(ping.id()).unwrap()), Signal::SIGINT).unwrap();
    let last = lines.last().unwrap();
    assert!(last.contains(" pings, min/avg/max = "), "{last}");
    assert!(wait(&mut ping).success());
}
