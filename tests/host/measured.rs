//! What QEMU measures of VMs, as Prometheus reads it beside what their guests do.

use serde_json::{Value, json};

use guestlet::wire::proto::v1::{CollectMetricsResponse, MetricFamily, MetricSample};

use crate::csi::machine::Machine;
use crate::guest::{Door, Guest, Manner, info};
use crate::hypervisor::Hypervisor;
use crate::lab::{Lab, uuid};
use crate::metrics::ask;

/// The lines of a VM's own series on a page, without the beginning that all have.
fn lines_at(lab: &Lab, page: &str, vm: &str) -> Vec<String> {
    let answer = ask(lab, &format!("GET {page} HTTP/1.1"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let of_it = body.lines().filter(|line| line.contains(&format!("{{vm=\"{vm}\"")));
    of_it.map(|line| line.strip_prefix("guestlet_guest_").unwrap().to_owned()).collect()
}

/// What the hypervisor says of `a`.
fn measured(lab: &Lab) -> Vec<String> {
    let is_hypervisors = |line: &String| line.starts_with("vm_") && !line.starts_with("vm_info");
    lines_at(lab, "/metrics", "a").into_iter().filter(is_hypervisors).collect()
}

/// The value of the one series that begins so.
#[track_caller]
fn value(lines: &[String], series: &str) -> f64 {
    let found: Vec<_> = lines.iter().filter(|line| line.starts_with(series)).collect();
    assert_eq!(found.len(), 1, "{series}: {lines:#?}");
    found[0].rsplit(' ').next().unwrap().parse().unwrap()
}

/// How many calls of hypervisors have ended so.
fn calls(lab: &Lab, outcome: &str) -> f64 {
    let page = ask(lab, "GET /host/metrics HTTP/1.1");
    let series = format!("guestlet_host_hypervisor_calls_total{{outcome=\"{outcome}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&series)).unwrap().parse().unwrap()
}

/// A host half with the VM `a`, which has a QMP socket, and `b`, which has none.
fn lab() -> Lab {
    let sockets = "unix-socket = '@a.sock'\nqmp = '@a.qmp'";
    Lab::new().vm("a", 1, sockets).guest("b", 2)
}

/// The same with a made-up QEMU, and the guest of `a`, which says as much as it may.
fn started() -> (Lab, Hypervisor, Guest) {
    let lab = lab();
    let qemu = Hypervisor::start(&lab.path("a.qmp"), &["port1"]);
    let lab = lab.start();
    let mut said = info(&uuid(1), "boot-1");
    said.capabilities.push("metrics".to_owned());
    let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, said);
    lab.until_vm("a", |vm| vm["power"] == "running" && vm["session"] == "connected");
    let sample = |labels: Vec<String>, value| MetricSample { labels, value };
    let many = (0..2000).map(|number: u32| sample(vec![number.to_string()], 1.0)).collect();
    guest.machine().lock().metrics = Some(CollectMetricsResponse {
        families: vec![
            MetricFamily { name: "load1".to_owned(), samples: vec![sample(Vec::new(), 0.5)] },
            MetricFamily { name: "vm_cpus".to_owned(), samples: vec![sample(Vec::new(), 64.0)] },
            MetricFamily { name: "disk_reads".to_owned(), samples: many },
        ],
    });
    (lab, qemu, guest)
}

/// As QEMU has so many disks, of which each has done more than the one before.
fn many_disks(count: u64) -> Value {
    let disk = |at: u64| {
        let stats = json!({
            "rd_bytes": at * 512, "wr_bytes": 0, "rd_operations": at, "wr_operations": 0,
            "rd_total_time_ns": 0, "wr_total_time_ns": 0,
        });
        json!({"device": "", "qdev": format!("disk{at}"), "node-name": format!("node{at}"), "stats": stats})
    };
    (0..count).map(disk).collect()
}

/// A real QEMU: what is told is what it says, of the disk that has something in it, with the serial number that its guest reads.
#[test]
fn a_real_qemu_says_what_its_vm_does() {
    let lab = lab();
    let image = lab.path("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let drive = format!("if=none,id=drive1,format=raw,file={}", image.display());
    let serial = "0123456789abcdefghij-and-more";
    let qemu = Machine::start_with(
        &lab.path("a.qmp"),
        &[
            &["-smp", "3", "-device", "virtio-balloon-pci", "-drive", &drive][..],
            &["-device", &format!("virtio-blk-pci,id=disk1,drive=drive1,serial={serial}")],
            &["-device", "ide-cd,id=cd1"],
        ]
        .concat(),
    );
    let lab = lab.start();
    lab.until_vm("a", |vm| vm["power"] == "running");
    // What QEMU says to somebody else, before and after; firmware reads the first sector.
    let reads = || {
        let blocks = qemu.ask("query-blockstats");
        let of_disk = |block: &&Value| block["qdev"].as_str().is_some_and(|device| device.contains("disk1"));
        let block = blocks.as_array().unwrap().iter().find(of_disk).unwrap();
        block["stats"]["rd_operations"].as_f64().unwrap()
    };
    lab.until("the firmware reads the disk", || reads() > 0.0);
    let before = reads();
    let lines = measured(&lab);
    let after = reads();
    let disk = format!("{{vm=\"a\",qdev=\"disk1\",serial=\"{}\"}} ", &serial[..20]);
    let told = value(&lines, &format!("vm_disk_reads_total{disk}"));
    assert!((before..=after).contains(&told), "{before} {told} {after}");
    assert!(value(&lines, &format!("vm_disk_read_bytes_total{disk}")) >= 512.0, "{lines:#?}");
    assert!(value(&lines, &format!("vm_disk_read_time_seconds_total{disk}")) > 0.0, "{lines:#?}");
    assert!(value(&lines, &format!("vm_disk_written_bytes_total{disk}")).abs() < 0.5, "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("cd1")), "it has no medium: {lines:#?}");
    let expected = [
        ("vm_power_state{vm=\"a\",state=\"running\"} ", 1.0),
        ("vm_power_state{vm=\"a\",state=\"off\"} ", 0.0),
        ("vm_cpus{vm=\"a\"} ", 3.0),
        ("vm_memory_bytes{vm=\"a\"} ", 16_777_216.0),
        ("vm_balloon_bytes{vm=\"a\"} ", 16_777_216.0),
        ("vm_disks_left_out{vm=\"a\"} ", 0.0),
    ];
    for (series, expected) in expected {
        assert!((value(&lines, series) - expected).abs() < 0.5, "{series}: {lines:#?}");
    }
    drop(qemu);
    lab.until_vm("a", |vm| vm["power"] == "off");
    let lines = measured(&lab);
    assert_eq!(lines.len(), 3, "{lines:#?}");
    assert!((value(&lines, "vm_power_state{vm=\"a\",state=\"off\"} ") - 1.0).abs() < 0.5, "{lines:#?}");
}

#[test]
fn nobody_asks_qemu_unless_somebody_asks_for_it() {
    let (lab, qemu, guest) = started();
    // It would need the room.
    drop(guest);
    lab.until_session("a", "connecting");
    let questions = ["query-cpus-fast", "query-memory-size-summary", "query-balloon", "query-blockstats"];
    assert!(ask(&lab, "GET /host/metrics HTTP/1.1").contains("guestlet_host_info"));
    assert!(!qemu.commands().iter().any(|command| questions.contains(&command.as_str())));
    let lines = measured(&lab);
    let commands = qemu.commands();
    for question in questions {
        assert_eq!(commands.iter().filter(|command| *command == question).count(), 1, "{commands:?}");
    }
    assert!(!lines.iter().any(|line| line.starts_with("vm_balloon")), "it has none: {lines:#?}");
    let root = "{vm=\"a\",qdev=\"/machine/peripheral-anon/device[0]/virtio-backend\",serial=\"root-disk\"} ";
    assert!((value(&lines, &format!("vm_disk_reads_total{root}")) - 7.0).abs() < 0.5);
    assert!((value(&lines, &format!("vm_disk_read_time_seconds_total{root}")) - 1.5).abs() < 0.1);
    assert!((value(&lines, "vm_memory_bytes") - 1_074_790_400.0).abs() < 0.5, "{lines:#?}");
    assert!((value(&lines, "vm_cpus") - 2.0).abs() < 0.5, "what the guest says of it is not believed");
}

/// What the guest says of itself comes first.
#[test]
fn a_vm_with_a_thousand_disks_has_no_more_series_than_others() {
    let (lab, qemu, guest) = started();
    qemu.answer("query-blockstats", many_disks(1000));
    let all = lines_at(&lab, "/metrics", "a");
    assert!(all.len() <= 150 && all.len() > 140, "{}", all.len());
    let reads: Vec<_> = all.iter().filter(|line| line.starts_with("vm_disk_reads_total")).collect();
    assert_eq!(reads.len(), 0, "the guest needs the room: {reads:?}");
    assert!((value(&all, "vm_disks_left_out") - 1000.0).abs() < 0.5);
    // One that says little leaves some.
    drop(guest);
    lab.until_session("a", "connecting");
    lab.until("there is room", || {
        let lines = measured(&lab);
        let reads: Vec<_> = lines.iter().filter(|line| line.starts_with("vm_disk_reads_total")).collect();
        reads.len() == 16 && reads[0].contains("qdev=\"disk999\"")
    });
}

#[test]
fn what_cannot_be_understood_is_not_told_and_nothing_else_is_lost() {
    let (lab, qemu, guest) = started();
    let has_guest = || lines_at(&lab, "/metrics", "a").iter().any(|line| line.starts_with("load1"));
    let stats = |bytes: Value| {
        json!([{"qdev": "x", "node-name": "x", "stats": {
            "rd_bytes": bytes, "wr_bytes": 0, "rd_operations": 0, "wr_operations": 0,
            "rd_total_time_ns": 0, "wr_total_time_ns": 0,
        }}])
    };
    for (command, garbage) in [
        ("query-blockstats", json!("nonsense")),
        ("query-blockstats", json!([{"qdev": "x", "node-name": "x"}])),
        ("query-blockstats", stats(json!(-1))),
        ("query-blockstats", stats(json!("many"))),
        ("query-cpus-fast", json!({"count": 2})),
        ("query-memory-size-summary", json!([])),
    ] {
        qemu.answer(command, garbage.clone());
        lab.until("nothing is told", || measured(&lab).is_empty());
        assert!(has_guest(), "{command} {garbage}");
        let good = match command {
            "query-memory-size-summary" => json!({"base-memory": 1}),
            _ => json!([]),
        };
        qemu.answer(command, good);
        lab.until("all is told", || !measured(&lab).is_empty());
    }
    // Without the guest there is room for disks. Twice the same device would be twice the same series.
    drop(guest);
    lab.until_session("a", "connecting");
    let twice: Vec<_> =
        [many_disks(3), many_disks(3)].iter().flat_map(|all| all.as_array().unwrap().clone()).collect();
    qemu.answer("query-blockstats", Value::Array(twice));
    lab.until("each is told once", || {
        measured(&lab).iter().filter(|line| line.starts_with("vm_disk_reads_total")).count() == 3
    });
}

#[test]
fn a_qemu_that_hangs_costs_its_own_series_alone() {
    let (lab, qemu, _guest) = started();
    assert!(!measured(&lab).is_empty());
    let silent = calls(&lab, "silent");
    qemu.hang();
    lab.until("nothing is told", || {
        let all = lines_at(&lab, "/metrics", "a");
        assert!(all.iter().any(|line| line.starts_with("load1")), "its guest answers: {all:?}");
        all.iter().all(|line| !line.starts_with("vm_") || line.starts_with("vm_info"))
    });
    assert!(calls(&lab, "silent") > silent);
}
