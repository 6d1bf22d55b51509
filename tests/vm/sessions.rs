//! The host half and its sessions with guests that are reset, killed, and not who they should be.

use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use prost_types::Timestamp;
use serde_json::Value;

use crate::harness::host::{HostHalf, Listed};
use crate::harness::vm::{BOOT, FAST_READY, SOON, Vm};
use crate::{fast, starting};

fn connected(vm: &Vm) -> (HostHalf, Value) {
    let host = HostHalf::start(&[Listed::of(vm)]).unwrap();
    let (seen, took) = host.wait_connected(vm.name(), BOOT).unwrap();
    println!("{} is connected after {took:?}", vm.name());
    (host, seen)
}

#[test]
fn two_vms_are_listed_as_they_are() {
    let vms = [starting("web-1"), starting("web-2")];
    let host = HostHalf::start(&[Listed::of(&vms[0]), Listed::of(&vms[1])]).unwrap();
    for vm in &vms {
        host.wait_connected(vm.name(), BOOT).unwrap();
        vm.wait_booted(FAST_READY, 1).unwrap();
    }
    let list = host.list().unwrap();
    assert_eq!(list.len(), 2);
    for (vm, seen) in vms.iter().zip(&list) {
        assert_eq!(seen["name"], vm.name());
        assert_eq!(seen["uuid"], vm.uuid());
        assert_eq!(seen["guest"]["dmi_uuid"], vm.uuid());
        assert_eq!(seen["guest"]["host_name"], vm.name());
        assert_eq!(seen["guest"]["boot_id"], vm.boot_id().unwrap());
        assert_eq!(seen["guest"]["machine_id"], vm.run("cat /etc/machine-id").unwrap().trim());
        assert_eq!(seen["power"], "running");
        assert_eq!(seen["cluster"], "test");
    }
    let table = host.ctl(&["ls"]).unwrap();
    assert!(table.contains("web-1") && table.contains("web-2"), "{table}");
    let error = host.ctl(&["info", "web-3"]).unwrap_err().to_string();
    assert!(error.contains("web-3"), "{error}");
}

#[test]
fn a_reset_guest_is_back_with_a_new_boot_id() {
    let vm = fast("reset");
    let (host, before) = connected(&vm);
    let watch = host.watch("reset", &["-o", "json"]).unwrap();
    let (after, took) = host.reset(&vm).unwrap();
    assert_ne!(after["guest"]["boot_id"], before["guest"]["boot_id"]);
    println!("back {took:?} after the reset");
    vm.wait_booted(FAST_READY, 2).unwrap();
    let agent_started = agent_started(&vm);
    assert_eq!(after["guest"]["boot_id"], vm.boot_id().unwrap());
    let mut seen = Vec::new();
    while let Some(line) = watch.next(Duration::from_secs(1)) {
        let event: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["name"], "reset");
        seen.push(event);
    }
    println!("{} events of the reset were watched", seen.len());
    let of = |kind: &str| seen.iter().filter(|event| event["event"] == kind).collect::<Vec<_>>();
    assert_eq!(
        of("guest-reset").len(),
        1,
        "QEMU tells one reset twice, and people hear of it once: {seen:?}"
    );
    let opened = of("session-opened");
    let opened = opened.iter().find(|event| event["rebooted"] == true);
    let opened = opened.unwrap_or_else(|| panic!("{seen:?}"))["time"].as_str().unwrap();
    let opened = SystemTime::try_from(opened.parse::<Timestamp>().unwrap()).unwrap();
    let after = opened.duration_since(agent_started).unwrap_or_default();
    println!("back at most {after:?} after its agent was started");
}

/// When the agent was started, on this machine's clock, or a little before.
fn agent_started(vm: &Vm) -> SystemTime {
    let before = SystemTime::now();
    let told = vm.run("cat /proc/uptime /proc/$(pidof guestlet)/stat").unwrap();
    let (uptime, stat) = told.split_once('\n').unwrap();
    let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
    // The 22nd field of proc_pid_stat(5), in hundredths of a second; the second one may have spaces.
    let began = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap();
    let began = began.parse::<f64>().unwrap() / 100.0;
    before - Duration::from_secs_f64(uptime - began)
}

#[test]
fn a_killed_vm_is_gone() {
    let vm = fast("killed");
    let (host, _) = connected(&vm);
    vm.qemu().signal(Signal::SIGKILL).unwrap();
    let (seen, took) = host.wait("killed", "gone", SOON, |now| now["session"] == "gone").unwrap();
    println!("gone {took:?} after the kill");
    assert_eq!(seen["power"], "off");
}

#[test]
fn sessions_are_back_when_the_host_half_restarts() {
    let vm = fast("patient");
    let (mut host, before) = connected(&vm);
    host.restart().unwrap();
    let (after, took) = host.wait_connected("patient", SOON).unwrap();
    println!("back {took:?} after the restart");
    assert_eq!(after["guest"]["boot_id"], before["guest"]["boot_id"]);
    // The same after a crash, which leaves a socket file behind.
    host.kill().unwrap();
    host.wait_connected("patient", SOON).unwrap();
}

#[test]
fn a_guest_that_is_not_the_expected_one_is_refused() {
    let vm = fast("clone");
    let other = "00000000-1111-4222-8333-444444444444";
    let host = HostHalf::start(&[Listed::of(&vm).uuid(other)]).unwrap();
    let (seen, _) = host.wait("clone", "refused", SOON, |now| now["session"] == "refused").unwrap();
    let reason = seen["reason"].as_str().unwrap();
    assert!(reason.contains(vm.uuid()), "the reason says which guest answered: {reason:?}");
}
