//! Both channels, and the events on them, of real guests that are paused, moved, saved, and changed from inside.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::host::{HostHalf, Listed, Watch};
use crate::harness::snapshot::Saved;
use crate::harness::vm::{SOON, Vm};
use crate::{installed, real, restored};

fn connected(vm: &Vm) -> (HostHalf, Value) {
    let host = HostHalf::start(&[Listed::of(vm)]).unwrap();
    let (seen, took) = host.wait_connected(vm.name(), SOON).unwrap();
    println!("{} is connected after {took:?}", vm.name());
    (host, seen)
}

/// The next event that `wanted` says is the one.
fn event(watch: &Watch, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + SOON;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        let Some(line) = watch.next(left) else { break };
        let event: Value = serde_json::from_str(&line).unwrap();
        if wanted(&event) {
            return event;
        }
    }
    panic!("no event {what:?}");
}

fn status(vm: &Vm) -> Value {
    serde_json::from_str(&vm.run("guestlet status -o json").unwrap()).unwrap()
}

#[test]
fn what_happens_in_the_guest_is_seen_on_the_host() {
    let vm = real("events");
    let (host, _) = connected(&vm);
    let watch = host.watch("events", &["-o", "json"]).unwrap();

    vm.run("ip link add lan0 type dummy && ip address add 192.0.2.7/24 dev lan0 && ip link set lan0 up")
        .unwrap();
    event(&watch, "address", |event| {
        event["event"] == "interfaces-changed" && event.to_string().contains("192.0.2.7/24")
    });
    vm.run("truncate -s 64M /root/disk && mkfs.ext4 -q /root/disk && mkdir -p /data && mount -o loop /root/disk /data")
        .unwrap();
    event(&watch, "mount", |event| {
        event["event"] == "file-system-mounted" && event.to_string().contains("\"/data\"")
    });
    let info = host.info("events").unwrap().to_string();
    assert!(info.contains("192.0.2.7/24") && info.contains("\"/data\""), "{info}");
    let mut client = vm.qga().unwrap();
    let frozen = client.execute("guest-fsfreeze-freeze-list", json!({ "mountpoints": ["/data"] })).unwrap();
    assert_eq!(frozen, 1);
    event(&watch, "freeze", |event| event["event"] == "frozen" && event["file_systems"] == 1);
    assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 1);
    event(&watch, "thaw", |event| event["event"] == "thawed" && event["by_itself"] == false);
    drop(client);
    vm.run("umount /data").unwrap();
    event(&watch, "unmount", |event| {
        event["event"] == "file-system-unmounted" && event.to_string().contains("\"/data\"")
    });
    vm.run("date -s '+1 hour'").unwrap();
    let jumped = event(&watch, "clock", |event| event["event"] == "clock-jumped");
    let milliseconds = jumped["milliseconds"].as_i64().unwrap();
    assert!((3_590_000..3_610_000).contains(&milliseconds), "{jumped}");
}

#[test]
fn a_guest_knows_what_its_host_calls_it() {
    let vm = real("identity");
    let (_host, seen) = connected(&vm);
    let status = status(&vm);
    assert_eq!(status["identity"]["vm_name"], "identity");
    assert_eq!(status["identity"]["cluster"], "test");
    assert_eq!(status["identity"]["vm_uid"], vm.uuid());
    assert_eq!(seen["name"], "identity");
    vm.run("test -s /run/guestlet/identity.json").unwrap();
}

#[test]
fn a_paused_guest_keeps_its_session() {
    let vm = real("paused");
    let (host, before) = connected(&vm);
    vm.qmp().execute("stop", json!({})).unwrap();
    host.wait("paused", "paused", SOON, |now| now["power"] == "paused").unwrap();
    // Longer than the silence that ends a session of a guest that runs.
    std::thread::sleep(Duration::from_secs(27));
    vm.qmp().execute("cont", json!({})).unwrap();
    let (after, _) = host
        .wait("paused", "running again", SOON, |now| {
            now["power"] == "running" && now["session"] == "connected"
        })
        .unwrap();
    assert_eq!(after["sessions"], before["sessions"], "the session was lost");
}

#[test]
fn a_guest_that_moves_to_another_vsock_device_is_back() {
    let mut vm = real("moved");
    let (host, before) = connected(&vm);
    let first = vm.cid();
    vm.unplug_vsock().unwrap();
    host.wait("moved", "no session", SOON, |now| now["session"] != "connected").unwrap();
    vm.replug_vsock().unwrap();
    assert_ne!(vm.cid(), first);
    let (after, took) = host.wait_connected("moved", SOON).unwrap();
    println!("back {took:?} after the device was plugged");
    assert_eq!(after["guest"]["boot_id"], before["guest"]["boot_id"]);
    assert_eq!(status(&vm)["identity"]["vm_name"], "moved");
}

#[test]
fn a_guest_that_was_saved_and_restored_converges() {
    let folder = tempfile::tempdir().unwrap();
    let saved = {
        let mut vm = real("saved");
        let (_host, _) = connected(&vm);
        vm.unplug_vsock().unwrap();
        Saved::now(&vm, installed(), folder.path()).unwrap()
    };
    // Another host half, and another name.
    let vm = restored("restored", &saved);
    let (_host, _) = connected(&vm);
    let deadline = Instant::now() + SOON;
    while status(&vm)["identity"]["vm_name"] != "restored" {
        assert!(Instant::now() < deadline, "{}", status(&vm));
    }
}
