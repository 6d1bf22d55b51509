//! Disks of every kind that the guest's kernel drives, in a real guest with udev: guestlet beside Debian's qemu-ga,
//! both in the same guest, field by field.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::archive::libraries;
use crate::harness::images::text;
use crate::harness::launch::Options;
use crate::harness::snapshot::Saved;
use crate::harness::tools;
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::images;

/// Programs for the guest with the libraries that they load, on a disk.
fn programs(disk: &Path, programs: &[(&str, &Path)]) {
    let mut grafts = Vec::new();
    for (name, path) in programs {
        grafts.push(format!("/{name}={}", text(path).unwrap()));
        for library in libraries(path).unwrap() {
            let graft =
                format!("/lib/{}={library}", Path::new(&library).file_name().unwrap().to_str().unwrap());
            if !grafts.contains(&graft) {
                grafts.push(graft);
            }
        }
    }
    let mut arguments =
        vec!["-quiet", "-rock", "-follow-links", "-graft-points", "-output", text(disk).unwrap()];
    arguments.extend(grafts.iter().map(String::as_str));
    tools::run(Path::new("genisoimage"), &arguments).unwrap();
}

/// Plugs a disk with this file behind it, and waits until the guest has it, and its last partition, as `expected`.
fn plug(vm: &Vm, name: &str, file: &Path, device: Value, expected: &str) {
    let file = json!({ "driver": "file", "filename": file, "discard": "unmap" });
    let node = json!({ "driver": "raw", "node-name": name, "file": file, "discard": "unmap" });
    vm.qmp().execute("blockdev-add", node).unwrap();
    let mut device = device;
    device["drive"] = json!(name);
    device["id"] = json!(format!("device-{name}"));
    vm.qmp().execute("device_add", device).unwrap();
    let there = || vm.run(&format!("test -b {expected} && udevadm settle")).ok();
    wait_for(expected, 2 * SOON, there)
        .unwrap_or_else(|error| panic!("{error}: {}", vm.run("ls /dev").unwrap()));
}

/// An empty disk; with two primary partitions if it is told so: 8 MiB from 1 MiB on, and 16 MiB behind it.
fn empty(vm: &Vm, name: &str, partitioned: bool) -> PathBuf {
    let path = vm.file(name);
    let mut bytes = vec![0; 512];
    if partitioned {
        for (entry, (first, count)) in [(2048_u32, 16384_u32), (18432, 32768)].into_iter().enumerate() {
            let at = 446 + 16 * entry;
            bytes[at + 4] = 0x83;
            bytes[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
            bytes[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
        }
        bytes[510..].copy_from_slice(&[0x55, 0xaa]);
    }
    std::fs::write(&path, bytes).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(32 << 20).unwrap();
    path
}

/// What an agent on a unix socket of the guest answers.
fn ask(vm: &Vm, socket: &str, command: &str) -> Value {
    let request = json!({ "execute": command });
    // A terminal's lines have an end, and answers may be longer.
    let answer =
        vm.run(&format!("echo '{request}' | socat -t 20 - unix:/run/{socket} | fold -w 1000")).unwrap();
    let answer: Value =
        serde_json::from_str(&answer.replace('\n', "")).unwrap_or_else(|error| panic!("{error}: {answer}"));
    answer.get("return").unwrap_or_else(|| panic!("{command}: {answer}")).clone()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

fn find<'a>(list: &'a Value, key: &str, value: &str) -> &'a Value {
    find_in(self::list(list), key, value)
}

fn find_in<'a>(list: &'a [Value], key: &str, value: &str) -> &'a Value {
    let found = list.iter().find(|entry| entry[key] == value);
    found.unwrap_or_else(|| panic!("no {value} in {list:?}"))
}

/// What makes QEMU plug a SCSI disk.
fn scsi(serial: &str, target: u32, unit: u32) -> Value {
    json!({
        "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": target, "lun": unit, "serial": serial,
    })
}

/// A guest with disks of every kind, and both agents on them.
fn laid_out() -> Vm {
    let images = images();
    let booted = Saved::booted(images).unwrap();
    let vm = Options::named("disks").without_vsock().restored(images, &booted).unwrap();
    let iso = vm.file("programs.iso");
    let qemu_ga = PathBuf::from(std::env::var_os("QEMU_GA").expect("make sets QEMU_GA"));
    let guestlet = tools::program("guestlet").unwrap();
    programs(
        &iso,
        &[("guestlet", &guestlet), ("qemu-ga", &qemu_ga), ("dmsetup", Path::new("/usr/sbin/dmsetup"))],
    );
    plug(&vm, "programs", &iso, scsi("programs", 0, 0), "/dev/sda");
    plug(&vm, "one", &empty(&vm, "one", true), scsi("data-one", 0, 3), "/dev/sdb2");
    let blk = json!({ "driver": "virtio-blk-pci", "bus": "port2", "serial": "data-two" });
    plug(&vm, "two", &empty(&vm, "two", false), blk, "/dev/vdc");
    let nvme = json!({ "driver": "nvme", "bus": "port1", "serial": "data-three" });
    plug(&vm, "three", &empty(&vm, "three", true), nvme, "/dev/nvme0n1p2");
    plug(&vm, "four", &empty(&vm, "four", false), scsi("data-four", 1, 2), "/dev/sdc");
    vm.run("udevadm settle; mkdir /p; mount -o ro /dev/sda /p; modprobe dm-mod").unwrap();
    let program = |name: &str| format!("/p/lib/ld-linux-x86-64.so.2 --library-path /p/lib /p/{name}");
    let table = "printf '0 32768 linear /dev/sdb2 0\\n32768 32768 linear /dev/vdc 0\\n'";
    vm.run(&format!("{table} | {} create --noudevsync group-volume", program("dmsetup"))).unwrap();
    vm.run(
        "udevadm settle; cd /mnt; mkdir one 'a b' three bound; \
         for disk in sdb1 dm-0 nvme0n1p1; do mkfs.ext4 -q /dev/$disk; done; \
         mount /dev/sdb1 one; mount /dev/dm-0 'a b'; mount /dev/nvme0n1p1 three; mount --bind 'a b' bound; udevadm settle",
    )
    .unwrap();
    let settings = "runtime-dir = \"/run/g\"\n[control]\nlisten = \"unix:/run/g/control.sock\"\n";
    vm.run("mkdir -p /run/g").unwrap();
    vm.write("/run/g/agent.toml", settings.as_bytes()).unwrap();
    let ours = format!("{} --settings /run/g/agent.toml -t /run/g", program("guestlet"));
    let theirs = format!("{} -t /run", program("qemu-ga"));
    for (command, socket) in [(ours, "ours"), (theirs, "theirs")] {
        vm.run(&format!("setsid {command} -m unix-listen -p /run/{socket} > /run/{socket}.log 2>&1 &"))
            .unwrap();
        let asked = || vm.run(&format!("socat -u /dev/null unix:/run/{socket}")).ok();
        wait_for("agent in the guest", SOON, asked).unwrap_or_else(|error| {
            panic!("{error}; {socket} says: {}", vm.run(&format!("cat /run/{socket}.log")).unwrap())
        });
    }
    vm
}

#[test]
fn disks_of_every_kind_are_told_as_qemu_ga_tells_them() {
    let vm = laid_out();
    let both = |command: &str| ["ours", "theirs"].map(|socket| ask(&vm, socket, command));
    let [ours, theirs] = both("guest-get-fsinfo");
    let told: Vec<_> = list(&ours).iter().map(|entry| entry["mountpoint"].as_str().unwrap()).collect();
    assert_eq!(told, ["/mnt/bound", "/mnt/three", "/mnt/a b", "/mnt/one", "/p", "/"]);
    assert_eq!(find(&ours, "mountpoint", "/mnt/one")["disk"][0]["serial"], "0QEMU_QEMU_HARDDISK_data-one");
    assert_eq!(find(&ours, "mountpoint", "/mnt/a b")["disk"].as_array().unwrap().len(), 2);
    // The root's usage goes on, and one number is newer than the qemu-ga that is compared with.
    let steady = |list: &Value| {
        let mut entries = self::list(list).clone();
        for entry in &mut entries {
            let entry = entry.as_object_mut().unwrap();
            entry.remove("total-bytes-privileged");
            if entry["mountpoint"] == "/" {
                entry.remove("used-bytes");
            }
        }
        entries
    };
    // Where the kernel has several paths to an NVMe disk, as with QEMU 10, qemu-ga 7.2 finds none.
    let has_paths = vm.run("readlink -f /sys/class/block/nvme0n1").unwrap().contains("/virtual/");
    let without_paths = |mut entries: Vec<Value>| {
        for disk in entries.iter_mut().flat_map(|entry| entry["disk"].as_array_mut().unwrap()) {
            if has_paths && disk["dev"].as_str().unwrap().starts_with("/dev/nvme") {
                for key in ["bus-type", "pci-controller"] {
                    disk.as_object_mut().unwrap().remove(key);
                }
            }
        }
        entries
    };
    let three = &find(&ours, "mountpoint", "/mnt/three")["disk"][0];
    assert_eq!(three["bus-type"], "nvme");
    assert!(three["pci-controller"]["bus"].as_i64() > Some(0), "{three}");
    assert_eq!(without_paths(steady(&ours)), without_paths(steady(&theirs)));

    let [ours, theirs] = both("guest-get-disks");
    let sorted = |list: &Value| {
        let mut entries = self::list(list).clone();
        // A path to an NVMe disk that has several is no disk.
        entries.retain(|entry| !entry["name"].as_str().unwrap().contains("c0n"));
        entries.sort_by_key(|entry| entry["name"].as_str().unwrap().to_owned());
        entries
    };
    let (mut ours, mut theirs) = (sorted(&ours), sorted(&theirs));
    for (ours, theirs) in ours.iter_mut().zip(&mut theirs) {
        if ours["name"] == "/dev/sdc" {
            // qemu-ga knows units of virtio-scsi only.
            assert_eq!(
                [ours["address"]["target"].take(), ours["address"]["unit"].take()],
                [json!(1), json!(2)]
            );
            assert_eq!(
                [theirs["address"]["target"].take(), theirs["address"]["unit"].take()],
                [json!(0), json!(2)]
            );
        }
        if ours["name"] == "/dev/nvme0n1" {
            // It is a health log that is asked for: the counters go on meanwhile.
            let [ours, theirs] = [&mut *ours, &mut *theirs].map(|disk| disk["smart"].take());
            assert_eq!((&ours["type"], &ours["temperature"]), (&json!("nvme"), &json!(323)));
            let names = |health: Value| health.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
            assert!(has_paths && theirs.is_null() || names(ours) == names(theirs));
        }
        if has_paths && ours["name"].as_str().unwrap().starts_with("/dev/nvme") {
            assert!(ours["partition"] == true || ours["address"]["bus-type"] == "nvme", "{ours}");
            for disk in [ours, theirs] {
                disk.as_object_mut().unwrap().retain(|key, _| key != "address" && key != "smart");
            }
        }
    }
    assert_eq!(ours, theirs);
    let volume = find_in(&ours, "name", "/dev/dm-0");
    assert_eq!(volume["alias"], "group-volume");
    assert_eq!(find_in(&ours, "name", "/dev/nvme0n1p1")["dependencies"], json!(["/dev/nvme0n1"]));

    // qemu-ga comes second, and finds nothing left to give back.
    let [ours, theirs] = both("guest-fstrim").map(|answer| answer["paths"].clone());
    for mounted in ["/mnt/one", "/mnt/a b", "/mnt/three"] {
        assert!(find(&ours, "path", mounted)["trimmed"].as_u64() > Some(1 << 20), "{ours}");
    }
    assert_eq!(find(&ours, "path", "/mnt/bound")["trimmed"], 0);
    assert_eq!(find(&ours, "path", "/p"), &json!({ "path": "/p", "error": "trim not supported" }));
    let shape = |list: &Value| {
        let mut entries = self::list(list).clone();
        entries
            .iter_mut()
            .filter(|entry| entry["trimmed"].is_u64())
            .for_each(|entry| entry["trimmed"] = json!(0));
        entries
    };
    assert_eq!(shape(&ours), shape(&theirs));

    // A disk's number may come back with another disk behind it, whose serial number is told then.
    vm.run("systemctl stop systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket; rm -r /run/udev/data")
        .unwrap();
    let serial = |disk: &str| {
        let disks = ask(&vm, "ours", "guest-get-disks");
        find(&disks, "name", disk)["address"]["serial"].clone()
    };
    assert_eq!([serial("/dev/vdc"), serial("/dev/sdc")], [json!("data-two"), json!("data-four")]);
    assert_eq!([serial("/dev/nvme0n1"), serial("/dev/vda")], [json!("data-three"), Value::Null]);
    vm.qmp().execute("device_del", json!({ "id": "device-four" })).unwrap();
    vm.qmp().wait_event("DEVICE_DELETED", SOON).unwrap();
    wait_for("end of the disk", SOON, || vm.run("! test -e /sys/block/sdc").ok()).unwrap();
    plug(&vm, "five", &empty(&vm, "five", false), scsi("data-five", 1, 2), "/dev/sdc");
    assert_eq!(serial("/dev/sdc"), "data-five");
}
