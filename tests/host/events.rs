//! Events of guests: in order, without holes, and what they make of the state.

use std::time::Duration;

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{
    ClockJumped, Disk, DiskAdded, DiskRemoved, FileSystemMounted, Frozen, GuestState, InterfacesChanged,
    MountedFileSystem, NetworkInterface, SerialNumber, Thawed, UserLoggedIn, UserSession,
};
use serde_json::{Value, json};

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, Watch, assert_fails, uuid};
use crate::metrics::ask;
use crate::qmp::Qmp;

fn start(lab: &Lab, manner: Manner) -> Guest {
    let root =
        MountedFileSystem { mount_point: "/".into(), source: "/dev/vda1".into(), r#type: "ext4".into() };
    let state = GuestState { file_systems: vec![root], ..GuestState::default() };
    Guest::start_in(&lab.path("a.sock"), Door::Unix, manner, info(&uuid(1), "boot-1"), state)
}

fn interfaces() -> Kind {
    Kind::InterfacesChanged(InterfacesChanged {
        interfaces: vec![NetworkInterface {
            name: "eth0".into(),
            hardware_address: "52:54:00:12:34:56".into(),
            running: true,
            addresses: vec!["192.0.2.7/24".into(), "fe80::1/64".into()],
        }],
    })
}

#[test]
fn events_make_the_state_that_people_see() {
    let lab = Lab::new().guest("a", 1).start();
    let guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
    guest.happen(interfaces());
    guest.happen(Kind::FileSystemMounted(FileSystemMounted {
        file_system: Some(MountedFileSystem {
            mount_point: "/data".into(),
            source: "/dev/vdb".into(),
            r#type: "xfs".into(),
        }),
    }));
    guest.happen(Kind::UserLoggedIn(UserLoggedIn {
        session: Some(UserSession { id: "3".into(), user: "ann".into(), ..UserSession::default() }),
    }));
    let vm = lab.until_vm("a", |vm| vm["state"]["users"][0]["user"] == "ann");
    assert_eq!(vm["state"]["interfaces"][0]["addresses"], json!(["192.0.2.7/24", "fe80::1/64"]));
    let data = json!({"mount_point": "/data", "source": "/dev/vdb", "type": "xfs"});
    assert_eq!(vm["state"]["file_systems"][1], data);

    let described = lab.words(&["info", "a"]);
    for words in [
        "Interfaces:     eth0 192.0.2.7/24 fe80::1/64 [52:54:00:12:34:56]\n",
        "File systems:   / (ext4 from /dev/vda1)\n                /data (xfs from /dev/vdb)\n",
        "Users:          ann\n",
        "Callback:       open\n",
    ] {
        assert!(described.contains(words), "{words}\n{described}");
    }
    let wide = lab.words(&["ls", "-o", "wide"]);
    assert!(wide.contains("  192.0.2.7  -     -     6.1.0-30-cloud-amd64  boot-1   unix:"), "{wide}");

    drop(guest);
    let vm = lab.until_session("a", "connecting");
    assert_eq!(vm["state"]["users"][0]["user"], "ann", "what was last known stays");
}

#[test]
fn how_a_freeze_ended_is_seen_by_whoever_looks() {
    let lab = Lab::new().guest("a", 1).start();
    let guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
    guest.happen(Kind::Frozen(Frozen { file_systems: 3, holder: "libvirt".into(), deadline_seconds: 120 }));
    lab.until_vm("a", |vm| vm["state"]["freeze"]["file_systems"] == 3);
    let described = lab.words(&["info", "a"]);
    assert!(described.contains("Last freeze:    not over: 3 file systems for libvirt, for "), "{described}");
    guest.happen(Kind::Thawed(Thawed {
        by_itself: true,
        holder: "libvirt".into(),
        end: "deadline".into(),
        problem: "the freeze ended by itself after 120 s".into(),
        receipt: "0123456789abcdef0123456789abcdef".into(),
        level: "crash".into(),
    }));
    let vm = lab.until_vm("a", |vm| vm["state"]["freeze"]["end"] == "deadline");
    assert!(vm["state"]["freeze"]["ended"].is_string(), "{vm}");
    let described = lab.words(&["info", "a"]);
    let words = " ago by its deadline, for libvirt: the freeze ended by itself after 120 s; receipt \
                 0123456789abcdef0123456789abcdef: crash\n";
    assert!(described.contains(words), "{described}");
    // One that failed was never frozen.
    let watch = Watch::start(&lab, &["a", "--kind", "thawed"]);
    guest.happen(Kind::Thawed(Thawed {
        holder: "libvirt".into(),
        end: "failed".into(),
        problem: "the hook /hook failed".into(),
        receipt: "1123456789abcdef0123456789abcdef".into(),
        level: "crash".into(),
        ..Thawed::default()
    }));
    let words = "for libvirt: the hook /hook failed; receipt 1123456789abcdef0123456789abcdef: crash";
    watch.until(|line| line.contains(&format!("not frozen, {words}")));
    lab.until_vm("a", |vm| vm["state"]["freeze"]["end"] == "failed");
    let described = lab.words(&["info", "a"]);
    assert!(
        described.contains("Last freeze:    failed ") && described.contains(&format!(" ago, {words}\n")),
        "{described}"
    );
    let metrics = ask(&lab, "GET /metrics HTTP/1.1");
    for (end, count) in [("deadline", 1), ("asked", 0), ("failed", 1)] {
        let line = format!("\nguestlet_host_freezes_ended_total{{end=\"{end}\"}} {count}\n");
        assert!(metrics.contains(&line), "{metrics}");
    }
    assert!(metrics.contains("\nguestlet_host_receipts_total{level=\"crash\"} 2\n"), "{metrics}");
}

fn disk(generation: u64, serial: &str) -> Disk {
    Disk {
        name: "vdb".into(),
        file: "/dev/vdb".into(),
        generation,
        bus: "virtio".into(),
        pci_address: "0000:00:06.0".into(),
        serials: vec![SerialNumber { value: serial.into(), source: "virtio".into() }],
        bytes: 10 << 30,
        ..Disk::default()
    }
}

#[test]
fn the_disks_of_a_guest_as_people_see_them() {
    let lab = Lab::new().guest("a", 1).guest("off", 2).start();
    let guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
    let watch = Watch::start(&lab, &["a", "--kind", "disk-added,disk-removed", "-o", "json"]);
    guest.happen(Kind::DiskAdded(DiskAdded { disk: Some(disk(7, "data\u{1b}1")) }));
    let added = watch.event("a", "disk-added");
    // What a guest says must not steer a terminal.
    assert_eq!(added["disk"]["serials"], json!([{"value": "data\u{fffd}1", "source": "virtio"}]));
    guest.happen(Kind::FileSystemMounted(FileSystemMounted {
        file_system: Some(MountedFileSystem {
            mount_point: "/data".into(),
            source: "/dev/vdb".into(),
            r#type: "xfs".into(),
        }),
    }));
    lab.until_vm("a", |vm| vm["state"]["file_systems"].as_array().unwrap().len() == 2);
    assert_eq!(
        lab.words(&["disks", "a"]),
        "NAME  SIZE    BUS     AT            SERIAL  PARTITIONS  MOUNTED\n\
         vdb   10 GiB  virtio  0000:00:06.0  data\u{fffd}1  -           /data\n"
    );
    let listed: Value = serde_json::from_str(&lab.words(&["disks", "a", "-o", "json"])).unwrap();
    assert_eq!((&listed[0]["bytes"], &listed[0]["generation"]), (&json!(10_u64 << 30), &json!(7)));
    assert!(lab.words(&["info", "a"]).contains("Disks:          vdb (virtio, 10 GiB, serial number data"));

    guest.happen(Kind::DiskRemoved(DiskRemoved {
        disk: Some(disk(7, "data-1")),
        in_use: vec!["/data".into()],
    }));
    assert_eq!(watch.event("a", "disk-removed")["in_use"], json!(["/data"]));
    assert_eq!(lab.words(&["disks", "a", "-o", "json"]).trim(), "[]");

    guest.happen(Kind::DiskAdded(DiskAdded { disk: Some(disk(8, "data-2")) }));
    watch.event("a", "disk-added");
    drop(guest);
    lab.until_session("a", "connecting");
    let late = lab.ctl(&["disks", "a"]);
    let warning = String::from_utf8(late.stderr).unwrap();
    assert!(warning.contains("there is no session with a now"), "{warning}");
    assert!(String::from_utf8(late.stdout).unwrap().contains("data-2"));
    assert_fails(&lab.ctl(&["disks", "off"]), 1, "has not yet reported its disks");
    assert_fails(&lab.ctl(&["disks", "nobody"]), 4, "nobody");
}

#[test]
fn a_connection_that_breaks_loses_no_event() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let guest = start(&lab, Manner::Fickle);
    lab.until_vm("a", |vm| vm["sessions"].as_u64().unwrap() > 0);
    for milliseconds in 1..=20 {
        guest.happen(Kind::ClockJumped(ClockJumped { milliseconds }));
        std::thread::sleep(Duration::from_millis(60));
    }
    let watch = Watch::quiet(&lab, &["a", "--since", "1h", "--kind", "clock-jumped", "-o", "json"]);
    for milliseconds in 1..=20 {
        assert_eq!(watch.event("a", "clock-jumped")["milliseconds"], milliseconds);
    }
    let vm = lab.info("a");
    assert!(vm["sessions"].as_u64().unwrap() > 1, "{vm}");
    assert_eq!(vm["missed_events"], 0);
}

#[test]
fn a_hole_in_the_events_costs_the_session_for_a_while_and_the_state_is_asked_for_anew() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'\nqmp = '@a.qmp'").start();
    let qmp = Qmp::start(&lab.path("a.qmp"), "running");
    // A VM that is seen to run would be dialled at once.
    lab.until_vm("a", |vm| vm["power"] == "running");
    let guest = start(&lab, Manner::Hole);
    lab.until_session("a", "connected");
    guest.happen(interfaces());
    let ready = Watch::quiet(&lab, &["--since", "1h", "--kind", "agent-ready,session-closed", "-o", "json"]);
    assert_eq!(ready.event("a", "agent-ready")["resumed"], false);
    let reason = "the agent sent event 2 in place of 1";
    assert_eq!(ready.event("a", "session-closed")["reason"], reason);
    let vm = lab.until_session("a", "refused");
    assert_eq!(vm["reason"], reason);
    // It is dialled again after half a minute: whoever watches sees nothing until then.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(lab.info("a")["sessions"], 1);
    assert_eq!(ready.so_far(), [""; 0]);
    // Or when it is another boot. (The place to resume at would still be good to the guest.)
    qmp.event("RESET");
    assert_eq!(ready.event("a", "agent-ready")["resumed"], false);
}

#[test]
fn a_guest_that_another_host_half_holds_is_refused_and_asked_again() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let guest = start(&lab, Manner::Held);
    let vm = lab.until_session("a", "refused");
    assert_eq!(vm["reason"], "held by host half other (1234), which answers");
    drop(guest);
    let _guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
}

#[test]
fn the_past_comes_first_and_kinds_are_chosen() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").vm("b", 2, "unix-socket = '@b.sock'").start();
    let guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
    guest.happen(interfaces());
    lab.until_vm("a", |vm| vm["state"]["interfaces"] != json!([]));
    let watch = Watch::quiet(&lab, &["--since", "5m", "-o", "json"]);
    let kinds: Vec<Value> = ["session-opened", "agent-ready", "interfaces-changed"]
        .iter()
        .map(|kind| watch.event("a", kind)["event"].clone())
        .collect();
    assert_eq!(kinds.len(), 3);
    let chosen = Watch::quiet(&lab, &["--since", "5m", "--kind", "interfaces-changed"]);
    let line = chosen.until(|_| true);
    assert!(line.ends_with("a  interfaces changed: eth0 192.0.2.7/24 fe80::1/64"), "{line}");
}

#[test]
fn round_trips() {
    let lab = Lab::new().vm("a", 1, "unix-socket = '@a.sock'").start();
    let _guest = start(&lab, Manner::Good);
    lab.until_session("a", "connected");
    let words = lab.words(&["ping", "a", "-c", "2"]);
    let lines: Vec<_> = words.lines().collect();
    assert!(lines[0].starts_with("a: 1 in ") && lines[1].starts_with("a: 2 in "), "{words}");
    assert!(lines[2].starts_with("2 pings, min/avg/max = ") && lines[2].ends_with(" ms"), "{words}");
    let value: Value = serde_json::from_str(&lab.words(&["ping", "a", "-c", "1", "-o", "json"])).unwrap();
    assert_eq!(value["number"], 1);
    assert!(value["milliseconds"].as_f64().unwrap() > 0.0, "{value}");
}
