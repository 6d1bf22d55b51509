//! When udev in a real guest was done with a disk, and how much later the agent told of it.

use std::time::Duration;

use prost_types::Timestamp;
use serde_json::Value;

use crate::harness::vm::Vm;

/// What udev says, with times.
const LOG: &str = "/run/udev-words";

/// Notes from now on what udev says.
pub fn note(vm: &Vm) {
    let monitor = "stdbuf -oL udevadm monitor --udev --subsystem-match block";
    let begin = format!("systemd-run --quiet --property StandardOutput=file:{LOG} {monitor}");
    vm.run(&format!("{begin}; while ! grep -q UDEV {LOG}; do sleep 0.1; done")).unwrap();
}

/// How long after udev's word about its disk the agent told this event.
pub fn told_after(vm: &Vm, event: &Value) -> Duration {
    let disk = event["disk"]["name"].as_str().unwrap();
    // `UDEV  [71.123456] add      /devices/…/block/sda (block)`, in seconds since the boot.
    let lines = vm.run(&format!("grep -F '/block/{disk} (block)' {LOG} | grep -F '] add '")).unwrap();
    let line = lines.lines().last().unwrap();
    let seconds: f64 = line.split(['[', ']']).nth(1).unwrap().trim().parse().unwrap();
    let clocks = "mapfile -n 3 lines < /proc/timer_list; echo ${EPOCHREALTIME/[.,]/} ${lines[2]}";
    let clocks = vm.run(&format!("bash -c '{clocks}'")).unwrap();
    let words: Vec<_> = clocks.split_whitespace().collect();
    let [now, "now", "at", nanoseconds, ..] = words[..] else { panic!("{clocks}") };
    // Microseconds since 1970, on the guest's clock.
    let booted = now.parse::<u64>().unwrap() - nanoseconds.parse::<u64>().unwrap() / 1000;
    let processed = Duration::from_micros(booted) + Duration::from_secs_f64(seconds);
    let told: Timestamp = event["guest_time"].as_str().unwrap().parse().unwrap();
    let told = Duration::new(told.seconds.try_into().unwrap(), told.nanos.try_into().unwrap());
    // The two may be told at the same time.
    told.saturating_sub(processed)
}
