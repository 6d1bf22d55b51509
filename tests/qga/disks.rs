//! Disks: beside Debian's qemu-ga on this machine, as trees captured from guests have them, and where there is no
//! sysfs.

use std::collections::BTreeSet;

use guestlet::guest::Guest;
use guestlet::guest::block_devices::{Wait, list};
use guestlet::guest::disks::location::Bus;
use guestlet::guest::file_systems;
use guestlet::sys::root::Root;
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::beside_qemu_ga::both;
use crate::lay_out::lay_out;
use crate::namespace::{is_outside, run};

/// Without serial numbers that qemu-ga does not tell where no udev runs.
pub fn without_own_serials(mut ours: Value, theirs: &Value) -> Value {
    match (&mut ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            if !theirs.contains_key("serial") {
                ours.remove("serial");
            }
            for (key, value) in ours {
                *value = without_own_serials(value.take(), theirs.get(key).unwrap_or(&Value::Null));
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            for (value, theirs) in ours.iter_mut().zip(theirs) {
                *value = without_own_serials(value.take(), theirs);
            }
        }
        _ => {}
    }
    ours
}

/// In the order of their names, without what comes and goes.
fn sorted(disks: Value) -> Value {
    let Value::Array(mut disks) = disks else { panic!("{disks}") };
    // Others on this machine take and leave loop devices meanwhile.
    disks.retain(|disk| !disk["name"].as_str().unwrap().contains("loop"));
    disks.sort_by_key(|disk| disk["name"].as_str().unwrap().to_owned());
    Value::Array(disks)
}

#[test]
fn disks_agree_with_qemu_ga() {
    let (ours, theirs) = both();
    let theirs = sorted(theirs.client().call("guest-get-disks"));
    let ours = sorted(ours.client().call("guest-get-disks"));
    assert_ne!(theirs, json!([]), "this machine has no disk to compare");
    assert_eq!(without_own_serials(ours, &theirs), theirs);
}

#[test]
fn counters_agree_with_qemu_ga() {
    let (ours, theirs) = both();
    let [ours, theirs] = [ours, theirs].map(|agent| {
        let Value::Array(disks) = sorted(agent.client().call("guest-get-diskstats")) else { panic!() };
        let mut counters = Vec::new();
        for mut disk in disks {
            // They go on between the two calls.
            let names: BTreeSet<String> = disk["stats"].as_object().unwrap().keys().cloned().collect();
            assert!(disk["stats"].as_object().unwrap().values().all(Value::is_u64), "{disk}");
            disk["stats"] = json!(names);
            counters.push(disk);
        }
        counters
    });
    assert!(!theirs.is_empty());
    assert_eq!(ours, theirs);
}

#[test]
fn without_sysfs_and_without_proc_it_is_said_what_is_missing() {
    if is_outside() {
        return;
    }
    let agent = Agent::start();
    let mut client = agent.client();
    let mut error = |command: &str| {
        let answer = client.ask(&json!({ "execute": command }).to_string());
        answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{command}: {answer}")).to_owned()
    };
    // The agent shares this namespace.
    run("mount -t tmpfs none /sys");
    assert!(error("guest-get-disks").starts_with("cannot read /sys/block: "), "{}", error("guest-get-disks"));
    // File systems are still told, by the numbers of their devices.
    let file_systems = agent.client().call("guest-get-fsinfo");
    let root = file_systems.as_array().unwrap().iter().find(|entry| entry["mountpoint"] == "/");
    if let Some(root) = root {
        assert!(root["name"].as_str().unwrap().contains(':') && root["disk"] == json!([]), "{root}");
        assert!(root["total-bytes"].is_u64(), "{root}");
    }
    run("mount -t tmpfs none /proc");
    assert!(error("guest-get-fsinfo").starts_with("cannot read /proc/self/mountinfo: "));
    assert!(error("guest-fstrim").starts_with("cannot read /proc/self/mountinfo: "));
    assert!(error("guest-get-diskstats").starts_with("cannot read /proc/diskstats: "));
}

/// The guest with this tree of files.
pub fn guest(captured: &str) -> (Guest, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    lay_out(captured, folder.path());
    (Guest { root: Root::at(folder.path()), ..Guest::default() }, folder)
}

#[test]
fn disks_and_file_systems_of_a_captured_guest() {
    let (guest, _folder) = guest(include_str!("../fixtures/debian12-disks.tree"));
    let disks = list::list(&guest, Wait::Can).unwrap();
    let disk = |file: &str| {
        disks.iter().find(|disk| disk.file == file).unwrap_or_else(|| panic!("{file}: {disks:?}"))
    };
    assert_eq!(disks.len(), 12, "{disks:?}");
    for (file, kind, unit, serial) in [
        ("/dev/sda", Bus::Scsi, [0, 0, 0], Some("programs")),
        ("/dev/sdb", Bus::Scsi, [0, 0, 3], Some("data-one")),
        ("/dev/sdc", Bus::Scsi, [0, 1, 2], Some("data-four")),
        ("/dev/vda", Bus::Virtio, [0, 0, 0], None),
        ("/dev/vdc", Bus::Virtio, [0, 0, 0], Some("data-two")),
        ("/dev/nvme0n1", Bus::Nvme, [0, 0, 0], Some("data-three")),
    ] {
        let address = disk(file).disk.as_ref().unwrap();
        let location = address.location;
        assert_eq!((location.kind, [location.bus, location.target, location.unit]), (kind, unit), "{file}");
        assert_eq!(address.serial.as_deref(), serial, "{file}");
        assert!(location.pci.is_some(), "{file}");
    }
    let volume = disk("/dev/dm-0");
    assert_eq!((volume.alias.as_deref(), &volume.disk), (Some("group-volume"), &None));
    assert_eq!(volume.parts.as_ref().unwrap().len(), 2);
    assert!(
        disk("/dev/sdb2").partition && disk("/dev/sdb2").parts.as_deref() == Some(&["/dev/sdb".to_owned()])
    );

    // Nobody has asked them who they are.
    let told = file_systems::list(&guest).unwrap();
    let names: Vec<_> = told
        .iter()
        .map(|it| (it.mount_point.as_str(), it.device.name.as_str(), it.device.disks.len()))
        .collect();
    assert_eq!(
        names,
        [
            ("/mnt/bound", "dm-0", 2),
            ("/mnt/three", "nvme0n1p1", 1),
            ("/mnt/a b", "dm-0", 2),
            ("/mnt/one", "sdb1", 1),
            ("/p", "sda", 1),
            ("/", "vda", 1),
        ]
    );
}
