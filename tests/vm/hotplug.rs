//! Disks that come, grow and go while a guest runs, as its host half hears of them: with a guest that has no udev,
//! and with one that has.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::disk_calls::find;
use crate::harness::host::{HostHalf, Listed, Watch};
use crate::harness::vm::{BOOT, FAST_READY, SOON, Vm};
use crate::harness::wait_for;
use crate::random::{Random, seed};
use crate::soak::steps;
use crate::{fast, fast_with_all_processors, real, udev_words};

/// Events of disks, and no others.
const DISKS: &str = "disk-added,disk-removed,disk-resized,disk-changed,disk-failed";

/// A VM, its host half, and what it tells of its disks.
struct Lab {
    vm: Vm,
    host: HostHalf,
    watch: Watch,
}

impl Lab {
    fn new(vm: Vm) -> Self {
        let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
        host.wait_connected(vm.name(), BOOT).unwrap();
        let watch = host.watch(vm.name(), &["--kind", DISKS, "-o", "json"]).unwrap();
        let lab = Self { vm, host, watch };
        // Nobody says when a watch has begun: until an event is seen there may be more tries.
        let begun = wait_for("the watch", SOON, || {
            lab.plug("probe", scsi(255, 0, "probe"));
            let seen = lab.watch.next(Duration::from_secs(2));
            lab.unplug("probe");
            seen.filter(|line| line.contains("disk-added"))
        });
        begun.unwrap();
        while lab.watch.next(Duration::from_secs(1)).is_some() {}
        lab
    }

    fn plug(&self, name: &str, mut device: Value) {
        let path = self.vm.file(name);
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let file = json!({ "driver": "file", "filename": path });
        let node = json!({ "driver": "raw", "node-name": name, "file": file });
        self.vm.qmp().execute("blockdev-add", node).unwrap();
        device["drive"] = json!(name);
        device["id"] = json!(format!("device-{name}"));
        self.vm.qmp().execute("device_add", device).unwrap();
    }

    /// Takes a disk away, whatever the guest does with it.
    fn unplug(&self, name: &str) {
        self.vm.qmp().execute("device_del", json!({ "id": format!("device-{name}") })).unwrap();
        let deleted = || self.vm.qmp().execute("blockdev-del", json!({ "node-name": name })).ok();
        wait_for("end of the disk", SOON, deleted).unwrap();
    }

    /// The next event of a disk.
    fn event(&self) -> Value {
        let Some(line) = self.watch.next(SOON) else {
            panic!("no event; the guest has {:?}, and told of {:?}", self.real(), self.listed());
        };
        serde_json::from_str(&line).unwrap()
    }

    /// The disks with a serial number, by it, as `guestctl disks` tells them.
    fn listed(&self) -> BTreeMap<String, String> {
        let list = self.host.ctl(&["disks", self.vm.name(), "-o", "json"]).unwrap();
        let list: Vec<Value> = serde_json::from_str(&list).unwrap();
        list.iter().filter(|disk| !serial(disk).is_empty()).map(|disk| (serial(disk), name(disk))).collect()
    }

    /// The same of SCSI disks, as the guest's kernel tells it.
    fn real(&self) -> BTreeMap<String, String> {
        let told = self.vm.run(
            "for disk in /sys/block/sd*; do [ -e $disk ] && \
             echo \"${disk##*/} $(tail -c +5 $disk/device/vpd_pg80 | tr -d '\\0')\"; done; true",
        );
        let told = told.unwrap();
        let line =
            |line: &str| line.trim().split_once(' ').map(|(name, serial)| (serial.into(), name.into()));
        told.lines().filter_map(line).collect()
    }

    /// Whether the agent tells of the disks that the kernel has.
    fn lists_what_is_there(&self) -> Option<()> {
        (self.listed() == self.real()).then_some(())
    }

    /// The names of SCSI disks, by their addresses.
    fn by_address(&self) -> BTreeMap<String, String> {
        let told =
            self.vm.run("cd /sys/block; for disk in sd*; do echo $(readlink $disk/device) $disk; done");
        let told = told.unwrap();
        let line = |line: &str| {
            let (device, name) = line.split_once(' ').unwrap();
            (device.rsplit('/').next().unwrap().to_owned(), name.to_owned())
        };
        told.lines().map(line).collect()
    }
}

fn scsi(target: u32, unit: u32, serial: &str) -> Value {
    json!({ "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": target, "lun": unit, "serial": serial })
}

fn serial(disk: &Value) -> String {
    disk["serials"][0]["value"].as_str().unwrap_or_default().to_owned()
}

fn name(disk: &Value) -> String {
    disk["name"].as_str().unwrap().to_owned()
}

#[test]
fn a_disk_that_is_plugged_grows_and_is_taken_away_is_told_at_once() {
    let lab = Lab::new(fast("plugged"));
    let begun = Instant::now();
    lab.plug("one", scsi(0, 3, "data-one"));
    let added = lab.event();
    println!("attached, and known at the host after {:?}", begun.elapsed());
    let disk = &added["disk"];
    assert_eq!((&added["event"], serial(disk)), (&json!("disk-added"), "data-one".to_owned()), "{added}");
    assert_eq!((&disk["scsi_address"], &disk["bus"]), (&json!("0:0:0:3"), &json!("scsi")), "{added}");
    assert_eq!((&disk["bytes"], &disk["alias"]), (&json!(16 << 20), &json!("data-one")), "{added}");

    let begun = Instant::now();
    lab.vm.qmp().execute("block_resize", json!({ "node-name": "one", "size": 32 << 20 })).unwrap();
    let resized = lab.event();
    println!("resized, and known at the host after {:?}", begun.elapsed());
    assert_eq!((&resized["event"], &resized["bytes_before"]), (&json!("disk-resized"), &json!(16 << 20)));
    assert_eq!(resized["disk"]["bytes"], 32 << 20, "{resized}");

    // A serial number that virtio-blk has no room for.
    let long = "pvc-11111111-2222-3333-4444-555555555555";
    let virtio = json!({ "driver": "virtio-blk-pci", "bus": "port2", "serial": &long[..20] });
    lab.plug("two", virtio);
    let added = lab.event();
    assert_eq!((&added["event"], serial(&added["disk"])), (&json!("disk-added"), long[..20].to_owned()));
    assert_eq!(added["disk"]["bus"], "virtio", "{added}");

    // Taken away while it is mounted.
    let names = lab.listed();
    lab.vm
        .run(&format!(
            "mkdir -p /mnt && mke2fs -q /dev/{0} && mount -t ext4 /dev/{0} /mnt",
            names["data-one"]
        ))
        .unwrap();
    lab.unplug("one");
    let removed = lab.event();
    assert_eq!(
        (&removed["event"], &removed["in_use"]),
        (&json!("disk-removed"), &json!(["/mnt"])),
        "{removed}"
    );
    lab.vm.run("umount /mnt").unwrap();
    lab.unplug("two");
    let removed = lab.event();
    assert_eq!((&removed["event"], &removed["in_use"]), (&json!("disk-removed"), &json!([])), "{removed}");
}

#[test]
fn of_many_disks_none_is_lost_and_none_is_wrong() {
    const MANY: u32 = 20;
    let lab = Lab::new(fast_with_all_processors("many"));
    let serial_of = |number: u32| format!("data-{number:02}-of-twenty");
    let begun = Instant::now();
    for number in 0..MANY {
        lab.plug(&serial_of(number), scsi(number / 4, number % 4, &serial_of(number)));
    }
    let mut told = BTreeMap::new();
    while told.len() < MANY as usize {
        let event = lab.event();
        assert_eq!(event["event"], "disk-added", "{event}");
        assert!(told.insert(serial(&event["disk"]), name(&event["disk"])).is_none(), "twice: {event}");
    }
    println!("{MANY} disks attached and known after {:?}", begun.elapsed());
    assert_eq!(told, lab.real());
    assert_eq!(told, lab.listed());

    // Under load, in any order: half of them go, and others come meanwhile.
    lab.vm
        .run("for disk in /dev/sd?; do (dd if=$disk of=/dev/null bs=64k & ) > /dev/null 2>&1; done")
        .unwrap();
    let mut order: Vec<u32> = (0..MANY).collect();
    let mut random = Random(seed());
    for place in (1..MANY).rev() {
        order.swap(place as usize, random.below(place + 1) as usize);
    }
    for (turn, number) in order.iter().take(10).enumerate() {
        lab.unplug(&serial_of(*number));
        if turn % 2 == 0 {
            let new = format!("new-{number}");
            // Not to the same place yet: a guest that is busy may take the new one for the old one.
            lab.plug(&new, scsi(number / 4 + 10, number % 4, &new));
        }
    }
    for _ in 0..15 {
        let event = lab.event();
        let (serial, name) = (serial(&event["disk"]), name(&event["disk"]));
        match event["event"].as_str().unwrap() {
            "disk-added" => assert!(told.insert(serial, name).is_none(), "{event}"),
            "disk-removed" => assert_eq!(told.remove(&serial), Some(name), "{event}"),
            other => panic!("{other}: {event}"),
        }
    }
    assert_eq!(told.len(), 15);
    assert_eq!(told, lab.real(), "in the order {order:?}");
    assert_eq!(told, lab.listed());

    // While the agent is away one goes and one comes.
    lab.vm.run("mv /usr/bin/guestlet /usr/bin/away; killall guestlet").unwrap();
    lab.unplug(&serial_of(order[19]));
    lab.plug("late", scsi(30, 0, "late"));
    lab.vm.run("mv /usr/bin/away /usr/bin/guestlet").unwrap();
    wait_for("the disks of the new run", SOON, || lab.lists_what_is_there()).unwrap();
    assert!(lab.listed().contains_key("late") && lab.listed().len() == 15);
}

/// In a guest with one processor: an emulated one that has several may boot with a dead timer after a reset
/// (the kernel's "Possible timer handling issue on cpu=0").
#[test]
fn after_a_reset_the_disks_are_those_of_the_new_boot() {
    const DISKS: u32 = 8;
    let lab = Lab::new(fast("reset"));
    for number in 0..DISKS {
        lab.plug(&format!("disk-{number}"), scsi(number, 0, &format!("disk-{number}")));
    }
    wait_for("the disks", SOON, || (lab.listed().len() == DISKS as usize).then_some(())).unwrap();
    let before = lab.vm.boot_id().unwrap();
    lab.vm.reset().unwrap();
    // While the guest has no agent, and hardly a kernel.
    lab.unplug("disk-3");
    lab.plug("late", scsi(20, 0, "late"));
    let again = |now: &Value| now["session"] == "connected" && now["guest"]["boot_id"] != before.as_str();
    lab.host.wait(lab.vm.name(), "connected again", BOOT, again).unwrap();
    lab.vm.wait_booted(FAST_READY, 2).unwrap();
    wait_for("the disks of the new boot", SOON, || lab.lists_what_is_there()).unwrap();
    let listed = lab.listed();
    assert!(listed.len() == DISKS as usize && listed.contains_key("late"), "{listed:?}");
    assert!(!listed.contains_key("disk-3"), "{listed:?}");
}

#[test]
fn addresses_that_are_taken_again_at_once() {
    const MANY: u32 = 20;
    let lab = Lab::new(fast_with_all_processors("again"));
    let at = |address: u32, serial: &str| scsi(address / 4, address % 4, serial);
    let mut plugged: BTreeMap<u32, String> = BTreeMap::new();
    for address in 0..MANY {
        let serial = format!("disk-{address}");
        lab.plug(&serial, at(address, &serial));
        plugged.insert(address, serial);
    }
    let load = "for each in 1 2; do (while :; do for disk in /dev/sd?; do dd if=$disk of=/dev/null bs=64k; done; done & ) \
        > /dev/null 2>&1; done";
    lab.vm.run(load).unwrap();
    let mut random = Random(seed());
    for count in 0..steps(40, 1000) {
        let address = random.below(MANY);
        lab.unplug(&plugged[&address]);
        let serial = format!("disk-{address}-{count}");
        lab.plug(&serial, at(address, &serial));
        plugged.insert(address, serial);
    }
    // What the guest's kernel has passed over comes when somebody waits for it.
    let early = plugged.values().filter(|serial| find(&lab.vm, serial, 0).is_none()).count();
    for serial in plugged.values() {
        let found = find(&lab.vm, serial, 60_000);
        assert!(found.is_some(), "{serial}: {:?} {}", lab.real(), lab.vm.run("dmesg | tail -40").unwrap());
    }
    println!("{early} of {MANY} disks were not there at once");
    let mut told = BTreeMap::new();
    while let Some(line) = lab.watch.next(Duration::from_secs(3)) {
        let event: Value = serde_json::from_str(&line).unwrap();
        let (serial, name) = (serial(&event["disk"]), name(&event["disk"]));
        match event["event"].as_str().unwrap() {
            "disk-added" => assert!(told.insert(serial, name).is_none(), "{event}"),
            "disk-removed" => assert_eq!(told.remove(&serial), Some(name), "{event}"),
            // One whose place another one took while it was read.
            "disk-failed" => {
                assert!(event["problem"].as_str().unwrap().contains("has replaced a disk"), "{event}");
            }
            other => panic!("{other}: {event}"),
        }
    }
    let names = lab.by_address();
    let name = |address: &u32| names[&format!("0:0:{}:{}", address / 4, address % 4)].clone();
    let real: BTreeMap<_, _> =
        plugged.iter().map(|(address, serial)| (serial.clone(), name(address))).collect();
    assert_eq!(told, real);
    assert_eq!(lab.listed(), real);
    assert_eq!(names.len(), plugged.len());
}

/// The kernel asks no disk of this adapter that it is told to leave alone, as it fails to ask one now and then under load.
#[test]
fn disks_that_the_kernel_has_not_asked_are_asked() {
    const SKIP_VITAL_PRODUCT_DATA: u32 = 1 << 26;
    let lab = Lab::new(real("unasked"));
    let flags = "/sys/module/scsi_mod/parameters/default_dev_flags";
    lab.vm.run(&format!("modprobe vmw_pvscsi && echo {SKIP_VITAL_PRODUCT_DATA} > {flags}")).unwrap();
    lab.vm.qmp().execute("device_add", json!({ "driver": "pvscsi", "id": "scsi1", "bus": "port2" })).unwrap();
    let device = |serial: &str| {
        let mut device = scsi(0, 0, serial);
        device["bus"] = json!("scsi1.0");
        device
    };
    lab.plug("hidden", device("hidden"));
    let added = lab.event();
    assert_eq!(added["event"], "disk-added", "{added}");
    assert_eq!(added["disk"]["serials"][0], json!({ "source": "vpd80", "value": "hidden" }), "{added}");
    let pages = lab.vm.run(&format!("ls /sys/block/{}/device | grep -c vpd_pg || :", name(&added["disk"])));
    assert_eq!(pages.unwrap(), "0\n");
    let listed = lab.vm.run("guestlet disks").unwrap();
    assert!(listed.contains("hidden"), "{listed}");
    // Another one at its place is another one.
    lab.unplug("hidden");
    assert_eq!(lab.event()["event"], "disk-removed");
    lab.plug("next", device("next"));
    assert_eq!(serial(&lab.event()["disk"]), "next");
}

#[test]
fn where_udev_runs_it_is_done_before_a_disk_is_told() {
    let lab = Lab::new(real("udev"));
    udev_words::note(&lab.vm);
    let mut times = Vec::new();
    for turn in 0..10 {
        let data = format!("data-{turn}");
        let begun = Instant::now();
        lab.plug(&data, scsi(0, 0, &data));
        let added = lab.event();
        let took = begun.elapsed();
        assert_eq!(
            (&added["event"], serial(&added["disk"])),
            (&json!("disk-added"), data.clone()),
            "{added}"
        );
        let disk = name(&added["disk"]);
        let number = lab.vm.run(&format!("cat /sys/block/{disk}/dev")).unwrap();
        let entry = lab.vm.run(&format!("cat /run/udev/data/b{}", number.trim())).unwrap();
        assert!(entry.contains(&format!("ID_SCSI_SERIAL={data}")), "{entry}");
        times.push((udev_words::told_after(&lab.vm, &added), took));
        let listed = lab.vm.run("guestlet disks").unwrap();
        let line = listed.lines().find(|line| line.contains(&data)).unwrap_or_else(|| panic!("{listed}"));
        assert!(line.starts_with(&format!("{disk} ")), "{line}");
        let root = listed.lines().find(|line| line.starts_with("vda ")).unwrap_or_else(|| panic!("{listed}"));
        assert!(root.trim_end().ends_with(" /"), "{root}");
        lab.unplug(&data);
        assert_eq!(lab.event()["event"], "disk-removed");
    }
    times.sort();
    let (after, took) = times[times.len() / 2];
    println!(
        "known in the guest {after:?} after udev's own word, at most {:?}; attached and known at the host after {took:?}",
        times[times.len() - 1].0
    );
}
