//! What `guestctl metrics` shows is what this machine says.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;
use serde_json::Value;

use crate::host::{Watch, assert_fails, wait};
use crate::lab::{Lab, find, value};

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// The number in a column, from 0, of the line that begins with these words.
fn column(file: &str, begin: &str, column: usize) -> f64 {
    let lines = file.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let line = lines.into_iter().find(|words| words.join(" ").starts_with(begin)).unwrap();
    line[column].trim_start_matches("total=").parse().unwrap()
}

/// Its name and labels, and what it is now.
type Counter<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a dyn Fn() -> f64);

#[test]
#[allow(clippy::float_cmp, reason = "these are whole numbers")]
fn values_are_those_that_the_kernel_tells() {
    let lab = Lab::new();
    let counters: [Counter; 8] = [
        ("pressure_waiting_seconds_total", &[("resource", "cpu")], &|| {
            column(&read("/proc/pressure/cpu"), "some", 4) / 1e6
        }),
        ("pressure_waiting_seconds_total", &[("resource", "memory")], &|| {
            column(&read("/proc/pressure/memory"), "some", 4) / 1e6
        }),
        ("pressure_stalled_seconds_total", &[("resource", "io")], &|| {
            column(&read("/proc/pressure/io"), "full", 4) / 1e6
        }),
        ("oom_kills_total", &[], &|| column(&read("/proc/vmstat"), "oom_kill", 1)),
        ("major_page_faults_total", &[], &|| column(&read("/proc/vmstat"), "pgmajfault", 1)),
        ("cpu_seconds_total", &[("mode", "user")], &|| column(&read("/proc/stat"), "cpu ", 1) / 100.0),
        ("context_switches_total", &[], &|| column(&read("/proc/stat"), "ctxt", 1)),
        ("uptime_seconds", &[], &|| column(&read("/proc/uptime"), "", 0)),
    ];
    let before: Vec<_> = counters.iter().map(|(_, _, now)| now()).collect();
    let samples = lab.metrics("web");
    for ((name, labels, now), before) in counters.iter().zip(before) {
        let (told, after) = (value(&samples, name, labels), now());
        assert!((before..=after).contains(&told), "{name} {labels:?}: {before} {told} {after}");
    }

    let memory = read("/proc/meminfo");
    for (name, begin) in [("memory_total_bytes", "MemTotal:"), ("swap_total_bytes", "SwapTotal:")] {
        assert_eq!(value(&samples, name, &[]), column(&memory, begin, 1) * 1024.0);
    }
    let processors = read("/proc/stat").lines().filter(|line| line.starts_with("cpu")).count() - 1;
    assert_eq!(value(&samples, "cpus", &[]), f64::from(u32::try_from(processors).unwrap()));
    let boot = read("/proc/sys/kernel/random/boot_id");
    assert_eq!(value(&samples, "info", &[("boot_id", boot.trim())]), 1.0);

    // Each file system that is told has the size that it has; the counters of each disk and interface have only gone up since.
    let file_systems = find(&samples, "filesystem_size_bytes", &[]);
    for one in &file_systems {
        let now = statvfs(one.labels["mountpoint"].as_str()).unwrap();
        #[allow(clippy::cast_precision_loss)]
        let size = (now.blocks() * now.fragment_size()) as f64;
        assert_eq!(one.value, size, "{one:?}");
    }
    let statistics = read("/proc/diskstats");
    for disk in find(&samples, "disk_written_bytes_total", &[]) {
        let device = &disk.labels["device"];
        let line =
            statistics.lines().find(|line| line.split_ascii_whitespace().nth(2) == Some(device)).unwrap();
        let now = line.split_ascii_whitespace().nth(9).unwrap().parse::<f64>().unwrap() * 512.0;
        assert!(disk.value <= now, "{disk:?} {now}");
    }
    assert!(find(&samples, "network_received_bytes_total", &[("device", "lo")]).is_empty());

    let text = lab.host.words(&["metrics", "web"]);
    assert!(text.starts_with("# HELP guestlet_guest_info ") && text.ends_with("# EOF\n"), "{text}");
    assert!(text.contains("\nguestlet_guest_load1{vm=\"web\"} "), "{text}");
    assert_fails(&lab.host.ctl(&["metrics", "nobody"]), 4, "knows no VM named");
}

/// The owner of the guest says who reads them.
#[test]
fn without_the_role_a_host_half_is_told_nothing_and_does_not_ask_again_at_once() {
    let lab = Lab::with("[[grant]]\nhost = \"plain\"\nroles = [\"status\"]\n");
    assert_fails(&lab.host.ctl(&["metrics", "web"]), 1, "role metrics");
    for _ in 0..3 {
        let samples = lab.scrape("/metrics");
        for vm in ["web", "db"] {
            assert!((value(&samples, "up", &[("vm", vm)]) - 1.0).abs() < f64::EPSILON);
            assert!(find(&samples, "load1", &[("vm", vm)]).is_empty());
        }
    }
    let samples = lab.scrape("/host/metrics");
    let denied =
        samples.iter().find(|one| one.labels.get("outcome").is_some_and(|outcome| outcome == "denied"));
    assert!((denied.unwrap().value - 2.0).abs() < f64::EPSILON, "{denied:?}");
}

#[test]
fn every_so_often_it_asks_again_until_nobody_reads_it() {
    let lab = Lab::new();
    let words = ["metrics", "web", "--every", "1s", "-o", "json"];
    let watch = Watch::of(lab.host.ctl_command(&words));
    let uptime = || {
        let all: Value = serde_json::from_str(&watch.until(|_| true)).unwrap();
        let is_it = |one: &&Value| one["name"] == "guestlet_guest_uptime_seconds";
        all.as_array().unwrap().iter().find(is_it).unwrap()["value"].as_f64().unwrap()
    };
    let (first, second) = (uptime(), uptime());
    // The kernel tells hundredths of a second.
    assert!(second - first >= 0.98, "{first} {second}");

    // A guest that is gone may come back: it says why, and goes on.
    let said = lab.host.path("said");
    let mut command = lab.host.ctl_command(&words);
    command.stdout(Stdio::piped()).stderr(File::create(&said).unwrap());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    lab.signal("web", Signal::SIGKILL);
    lab.host.until("it says why nothing comes", || !std::fs::read_to_string(&said).unwrap().is_empty());
    assert!(child.try_wait().unwrap().is_none());
    // Nobody reads it any more.
    drop(lines);
    assert!(wait(&mut child).success());
    assert_fails(&lab.host.ctl(&["metrics", "nobody", "--every", "1s"]), 4, "nobody");
}
