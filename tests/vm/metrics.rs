//! What is wrong in a real guest, seen on the host: a program that waits for memory and one that was killed for want of it, a file system
//! that is full and one that has become read-only, one with an error, a unit that has failed. And which alerts Prometheus would raise.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::process::RunFolder;
use crate::harness::vm::SOON;
use crate::harness::wait_for;
use crate::samples::{Sample, find, value};
use crate::{host_with, real};

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/prometheus/guestlet.rules.yml");

/// File systems in files: one with few inodes, one in which there will be an error, and one that will be read-only.
const MOUNTS: &str = "cd /root && truncate -s 32M full hurt sealed && mkfs.ext4 -q -b 4096 -N 64 full && mkfs.ext4 -q hurt && mkfs.ext4 -q sealed &&
     mkdir /srv/full /srv/hurt /srv/sealed && mount -o loop full /srv/full && mount -o loop,errors=continue hurt /srv/hurt &&
     mount -o loop sealed /srv/sealed";
/// In a unit with little memory one program is killed for want of it. The next one has what is left, and waits for more all the time.
const WRONG: &str = "(i=0; while : > /srv/full/$i; do i=$((i + 1)); done) 2> /dev/null
     cat /dev/zero > /srv/full/0 2> /dev/null
     echo test > /sys/fs/ext4/$(basename $(findmnt -n -o SOURCE /srv/hurt))/trigger_fs_error
     mount -o remount,ro /srv/sealed
     systemd-run --quiet --unit broken false
     systemd-run --quiet --unit hungry -p MemoryMax=32M -p MemorySwapMax=0 -p OOMPolicy=continue sh -c \
     'tail /dev/zero; cd /sys/fs/cgroup/system.slice/hungry.service; echo 16M > memory.high; echo max > memory.max; exec tail /dev/zero'";

/// A page, with its lines by their series.
struct Page {
    samples: Vec<Sample>,
    series: BTreeMap<String, f64>,
}

impl Page {
    fn of(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            (series.to_owned(), value.parse().unwrap())
        });
        Self { samples: Sample::of_page(text), series: series.collect() }
    }

    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        value(&self.samples, name, labels)
    }

    /// Seconds in which everything waited for memory, of all so far; and all, by the guest's clock.
    fn stalled(&self) -> (f64, f64) {
        let stalled = self.value("pressure_stalled_seconds_total", &[("resource", "memory")]);
        (stalled, self.value("uptime_seconds", &[]))
    }
}

/// Ten minutes as before, and then twenty as between these two: gauges as they are, and counters that go on as fast.
fn prolonged(before: &Page, [first, last]: [&Page; 2]) -> Vec<Value> {
    let minutes = (last.stalled().1 - first.stalled().1) / 60.0;
    let all: BTreeSet<_> = before.series.keys().chain(last.series.keys()).collect();
    let values = |series: &String| {
        let value = |page: &Page| page.series.get(series).copied();
        let is_counter = series.split('{').next().is_some_and(|name| name.ends_with("_total"));
        let more = value(first).zip(value(last)).map_or(0.0, |(first, last)| (last - first) / minutes);
        let word = |value: Option<f64>| value.map_or("_".to_owned(), |value| value.to_string());
        let earlier = (0..10).map(|_| word(value(before)));
        let later = (0..20).map(|minute| {
            let more = if is_counter { more * f64::from(minute) } else { 0.0 };
            word(value(last).map(|value| value + more))
        });
        earlier.chain(later).collect::<Vec<_>>().join(" ")
    };
    all.into_iter().map(|series| json!({ "series": series, "values": values(series) })).collect()
}

/// Asserts that promtool finds these alerts firing by these minutes, and no others.
fn assert_alerts(series: &[Value], expected: &[(&str, &[&str])]) {
    let folder = RunFolder::new().unwrap();
    let test = |(at, labels): &(&str, &[&str])| {
        let samples: Vec<_> = labels.iter().map(|labels| json!({ "labels": labels, "value": 1 })).collect();
        let firing = "count by (alertname, mountpoint, resource) (ALERTS{alertstate=\"firing\"})";
        json!({ "expr": firing, "eval_time": at, "exp_samples": samples })
    };
    // promtool reads YAML, of which JSON is a part.
    let tests = json!({
        "rule_files": [RULES],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": expected.iter().map(test).collect::<Vec<_>>(),
        }],
    });
    let file = folder.file("alerts.yml");
    std::fs::write(&file, tests.to_string()).unwrap();
    let tools = std::env::var_os("PROMETHEUS").expect("PROMETHEUS must name a directory; make test sets it");
    let promtool = std::path::Path::new(&tools).join("promtool");
    let output = Command::new(promtool).args(["test", "rules"]).arg(file).output().unwrap();
    assert!(output.status.success(), "{output:#?}\n{series:#?}");
}

#[test]
fn what_is_wrong_in_a_guest_is_seen_on_the_host_and_raises_alerts() {
    let vm = real("unwell");
    let host = host_with(&vm, &["status", "topology", "metrics"]);
    vm.run(MOUNTS).unwrap();
    let page = || Page::of(&host.page("/guests/unwell/metrics").unwrap());
    let before = page();
    let kills = before.value("oom_kills_total", &[]);
    assert!(before.value("filesystem_readonly", &[("mountpoint", "/srv/sealed")]) < 0.5);

    vm.run(WRONG).unwrap();
    let mut first = before;
    let mut pages = Vec::new();
    let hungry = ("unit", "hungry.service");
    let waits = wait_for("everything to be wrong", SOON * 2, || {
        let last = page();
        let ((stalled, at), (stalled_then, then)) = (last.stalled(), first.stalled());
        let killed = find(&last.samples, "unit_oom_kills_total", &[hungry]);
        if killed.is_empty() || killed[0].value < 0.5 || at - then < 5.0 {
            std::thread::sleep(std::time::Duration::from_secs(1));
            return None;
        }
        let is_waiting = (stalled - stalled_then) / (at - then) > 0.2;
        pages.push(std::mem::replace(&mut first, last));
        // What has happened once is over between two.
        (is_waiting && pages.len() > 1).then_some(())
    });
    waits.unwrap_or_else(|error| panic!("{error}: {:#?}", first.series));
    let (before, last) = (&pages[0], &first);
    let first = pages.last().unwrap();
    assert!(
        (last.value("oom_kills_total", &[]) - kills - 1.0).abs() < 0.5,
        "one was killed, and is counted once"
    );
    assert!((last.value("unit_oom_kills_total", &[hungry]) - 1.0).abs() < 0.5);
    assert!(last.value("unit_pressure_waiting_seconds_total", &[hungry, ("resource", "memory")]) > 1.0);
    assert!((last.value("units_failed", &[]) - before.value("units_failed", &[]) - 1.0).abs() < 0.5);
    last.value("unit_failed", &[("unit", "broken.service")]);
    let full = [("mountpoint", "/srv/full"), ("fstype", "ext4")];
    assert!(last.value("filesystem_available_bytes", &full) < 0.5);
    assert!(last.value("filesystem_inodes_free", &full) < 0.5);
    let sealed = [("mountpoint", "/srv/sealed"), ("fstype", "ext4")];
    assert!((last.value("filesystem_readonly", &sealed) - 1.0).abs() < 0.5);
    let hurt = [("mountpoint", "/srv/hurt"), ("fstype", "ext4")];
    assert!(last.value("filesystem_errors_total", &hurt) > before.value("filesystem_errors_total", &hurt));

    // The same for people and for programs.
    let told = host.ctl(&["metrics", "unwell"]).unwrap();
    for series in [
        "unit_failed{vm=\"unwell\",unit=\"broken.service\"} 1",
        "filesystem_readonly{vm=\"unwell\",mountpoint=\"/srv/sealed\",fstype=\"ext4\"} 1",
    ] {
        assert!(told.contains(&format!("guestlet_guest_{series}")), "{told}");
    }
    let top: Value = serde_json::from_str(&host.ctl(&["top", "--once", "-o", "json"]).unwrap()).unwrap();
    assert_eq!(
        (&top[0]["answers"], &top[0]["fullest_mount_point"]),
        (&json!(true), &json!("/srv/full")),
        "{top:#}"
    );
    assert!(
        top[0]["fullest_ratio"].as_f64() > Some(0.99) && top[0]["units_failed"].as_f64() >= Some(1.0),
        "{top:#}"
    );
    assert!(top[0]["waiting_memory_ratio"].as_f64() > Some(0.0), "{top:#}");

    let at_once = [
        "{alertname=\"GuestFileSystemErrors\",mountpoint=\"/srv/hurt\"}",
        "{alertname=\"GuestFileSystemFull\",mountpoint=\"/srv/full\"}",
        "{alertname=\"GuestFileSystemOutOfInodes\",mountpoint=\"/srv/full\"}",
        "{alertname=\"GuestFileSystemTurnedReadOnly\",mountpoint=\"/srv/sealed\"}",
        "{alertname=\"GuestStalledForMemory\",resource=\"memory\"}",
    ];
    let early = [&at_once[..], &["{alertname=\"GuestOutOfMemoryKill\"}"]].concat();
    let late = [&at_once[..], &["{alertname=\"GuestUnitsFailed\"}"]].concat();
    assert_alerts(&prolonged(before, [first, last]), &[("9m", &[]), ("18m", &early), ("22m", &late)]);
}
