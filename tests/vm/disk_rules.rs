//! Disks that rules mount, in a real guest with udev and systemd.

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::disk_calls::release;
use crate::harness::host::{HostHalf, Listed, Watch};
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::{real, udev_words};

const RULES: &str = "/etc/guestlet/disks.d/data.toml";
const RULE: &str = "[[disk]]\nmatch = { serial = \"data-1\" }\nmount-point = \"/srv/deep/data\"\n\
    file-system = \"ext4\"\nformat-if-blank = true\nowner = \"daemon\"\nmode = \"0750\"\noptions = [\"nodev\"]\n\
    grow = true\n\
    [[disk]]\nmatch = { serial = \"foreign\" }\nmount-point = \"/srv/foreign\"\nfile-system = \"ext4\"\n\
    format-if-blank = true\n\
    [[disk]]\nmatch = { bus = \"virtio\" }\nmount-point = \"/srv/virtio\"\nfile-system = \"ext4\"\n\
    format-if-blank = true\n";

fn watch(vm: &Vm, host: &HostHalf) -> Watch {
    let watch =
        host.watch(vm.name(), &["--kind", "disk-added,disk-mounted,disk-failed", "-o", "json"]).unwrap();
    // Nobody says when a watch has begun: until an event is seen there may be more tries.
    let begun = wait_for("the watch", SOON, || {
        plug(vm, "probe", 9, "probe");
        let seen = watch.next(Duration::from_secs(5));
        unplug(vm, "probe");
        seen
    });
    begun.unwrap();
    while watch.next(Duration::from_secs(1)).is_some() {}
    watch
}

/// Plugs the disk in the file of that name, which is made if it is not there.
fn plug(vm: &Vm, name: &str, unit: u32, serial: &str) {
    let path = vm.file(name);
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    }
    let file = json!({ "driver": "file", "filename": path });
    vm.qmp().execute("blockdev-add", json!({ "driver": "raw", "node-name": name, "file": file })).unwrap();
    let device = json!({
        "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": 0, "lun": unit, "serial": serial,
        "drive": name, "id": format!("device-{name}"),
    });
    vm.qmp().execute("device_add", device).unwrap();
}

fn unplug(vm: &Vm, name: &str) {
    vm.qmp().execute("device_del", json!({ "id": format!("device-{name}") })).unwrap();
    let deleted = || vm.qmp().execute("blockdev-del", json!({ "node-name": name })).ok();
    wait_for("end of the disk", SOON, deleted).unwrap();
}

/// The next event of that kind.
fn event(vm: &Vm, watch: &Watch, kind: &str) -> Value {
    loop {
        let Some(line) = watch.next(SOON) else { panic!("no {kind}; {}", vm.run("guestlet disks").unwrap()) };
        let event: Value = serde_json::from_str(&line).unwrap();
        if event["event"] == kind {
            return event;
        }
    }
}

/// What the guest says of the rule for a mount point, once it is so.
fn rule(vm: &Vm, point: &str, state: &str) -> Value {
    let find = || {
        let told: Value = serde_json::from_str(&vm.run("guestlet disks -o json").ok()?).ok()?;
        let rules = told["rules"].as_array()?.clone();
        rules.into_iter().find(|rule| rule["mount_point"] == point && rule["state"] == state)
    };
    wait_for(state, SOON, find)
        .unwrap_or_else(|error| panic!("{error}: {}", vm.run("guestlet disks").unwrap()))
}

fn blocks(vm: &Vm) -> u64 {
    vm.run("stat -f -c %b /srv/deep/data").unwrap().trim().parse().unwrap()
}

#[test]
fn a_disk_is_mounted_by_its_rule_whenever_it_comes() {
    let vm = real("rules");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("rules", SOON).unwrap();
    let events = watch(&vm, &host);
    vm.write(RULES, RULE.as_bytes()).unwrap();
    let missing = rule(&vm, "/srv/deep/data", "no-disk");
    let reasons = missing["others"].to_string();
    assert!(reasons.contains("it holds the system itself"), "{reasons}");
    // The only disk on virtio that is not the system's own holds its seed.
    let seed = rule(&vm, "/srv/virtio", "failed");
    assert!(seed["reason"].as_str().unwrap().contains("is not blank: it holds iso9660"), "{seed}");

    let begun = Instant::now();
    plug(&vm, "data", 1, "data-1");
    let mounted = event(&vm, &events, "disk-mounted");
    println!("attached, formatted, mounted, and known at the host after {:?}", begun.elapsed());
    assert_eq!((&mounted["mount_point"], &mounted["type"]), (&json!("/srv/deep/data"), &json!("ext4")));
    let shown =
        vm.run("findmnt -n -o SOURCE,FSTYPE,OPTIONS /srv/deep/data; stat -c '%U %a' /srv/deep/data").unwrap();
    assert!(shown.contains("nodev") && shown.contains("daemon 750"), "{shown}");
    vm.run("echo kept > /srv/deep/data/file; sync").unwrap();

    // A disk with something on it that nobody knows.
    let foreign = std::fs::File::create_new(vm.file("foreign")).unwrap();
    foreign.set_len(64 << 20).unwrap();
    foreign.write_all_at(b"do not lose this", 4096).unwrap();
    plug(&vm, "foreign", 2, "foreign");
    let failed = event(&vm, &events, "disk-failed");
    assert!(failed["problem"].as_str().unwrap().contains("is not blank"), "{failed}");
    let foreign = std::fs::File::open(vm.file("foreign")).unwrap();
    let mut kept = vec![0; 1 << 20];
    foreign.read_exact_at(&mut kept, 0).unwrap();
    assert_eq!(kept.iter().filter(|byte| **byte != 0).count(), 16);
    assert_eq!(&kept[4096..4112], b"do not lose this");

    // An agent that is killed knows what it had mounted.
    vm.run("kill -9 $(systemctl show --value --property MainPID guestlet.service)").unwrap();
    rule(&vm, "/srv/deep/data", "mounted");

    let before = blocks(&vm);
    vm.qmp().execute("block_resize", json!({ "node-name": "data", "size": 128 << 20 })).unwrap();
    wait_for("growth", SOON, || (blocks(&vm) > before * 3 / 2).then_some(())).unwrap();

    host.reset(&vm).unwrap();
    rule(&vm, "/srv/deep/data", "mounted");
    assert_eq!(vm.run("cat /srv/deep/data/file").unwrap().trim(), "kept");

    // Its rule is removed while somebody works there, and then nobody does.
    vm.run("sleep 1000 < /srv/deep/data/file > /dev/null 2>&1 & echo $! > /tmp/holder").unwrap();
    vm.write(RULES, b"").unwrap();
    let busy = rule(&vm, "/srv/deep/data", "failed");
    assert!(busy["reason"].as_str().unwrap().contains("sleep (process"), "{busy}");
    vm.run(&format!("kill $(cat /tmp/holder); touch {RULES}")).unwrap();
    wait_for("the end of the mount", SOON, || vm.run("! mountpoint -q /srv/deep/data").ok()).unwrap();
    unplug(&vm, "data");
    drop(events);
    let events = watch(&vm, &host);
    how_soon(&vm, &events);
}

/// With a disk that has its file system already.
fn how_soon(vm: &Vm, events: &Watch) {
    let rule = "[[disk]]\nmatch = { serial = \"data-1\" }\nmount-point = \"/srv/data\"\n";
    vm.write(RULES, rule.as_bytes()).unwrap();
    udev_words::note(vm);
    let mut times = Vec::new();
    for _ in 0..10 {
        let begun = Instant::now();
        plug(vm, "data", 1, "data-1");
        let mounted = event(vm, events, "disk-mounted");
        let took = begun.elapsed();
        times.push((udev_words::told_after(vm, &mounted), took));
        release(vm, "data-1");
        unplug(vm, "data");
    }
    times.sort();
    let (after, took) = times[times.len() / 2];
    println!(
        "mounted {after:?} after udev's own word; attached, mounted and known at the host after {took:?}"
    );
}
