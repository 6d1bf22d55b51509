//! Disks that vanish, grow or hang while they are used, and agents that are killed while they format one.

use serde_json::{Value, json};

use crate::disk_calls::find;
use crate::harness::host::{HostHalf, Listed, Watch};
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::{fast, real};

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
        let kinds = "disk-added,disk-removed,disk-resized,disk-mounted,disk-failed";
        let watch = host.watch(vm.name(), &["--kind", kinds, "-o", "json"]).unwrap();
        let lab = Self { vm, host, watch };
        // Nobody says when a watch has begun: until an event is seen there may be more tries.
        let begun = wait_for("the watch", SOON, || {
            lab.plug("probe", "probe", 1 << 20, &scsi(9));
            let seen = lab.watch.next(std::time::Duration::from_secs(5));
            lab.unplug("probe");
            seen
        });
        begun.unwrap();
        lab.event("disk-removed", |_| true);
        lab
    }

    /// Plugs an empty disk whose pace can be throttled.
    fn plug(&self, name: &str, serial: &str, bytes: u64, device: &Value) {
        let path = self.vm.file(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        let group = json!({ "qom-type": "throttle-group", "id": format!("pace-{name}") });
        self.vm.qmp().execute("object-add", group).unwrap();
        let file = json!({ "driver": "file", "filename": path, "node-name": format!("file-{name}") });
        self.vm.qmp().execute("blockdev-add", file).unwrap();
        self.vm.qmp().execute("blockdev-add", paced(name)).unwrap();
        let node = json!({ "driver": "raw", "node-name": name, "file": format!("paced-{name}") });
        self.vm.qmp().execute("blockdev-add", node).unwrap();
        let mut device = device.clone();
        device["drive"] = json!(name);
        device["id"] = json!(format!("device-{name}"));
        device["serial"] = json!(serial);
        self.vm.qmp().execute("device_add", device).unwrap();
    }

    /// Lets so many bytes through in a second; 0 for as many as there are.
    fn pace(&self, name: &str, bytes: u64) {
        let limits = json!({
            "path": format!("/objects/pace-{name}"), "property": "limits", "value": { "bps-total": bytes },
        });
        self.vm.qmp().execute("qom-set", limits).unwrap();
        // What waits already has to be told.
        self.vm.qmp().execute("blockdev-reopen", json!({ "options": [paced(name)] })).unwrap();
    }

    /// Takes a disk away, whatever the guest does with it.
    fn unplug(&self, name: &str) {
        self.vm.qmp().execute("device_del", json!({ "id": format!("device-{name}") })).unwrap();
        let deleted = || self.vm.qmp().execute("blockdev-del", json!({ "node-name": name })).ok();
        wait_for("end of the disk", SOON, deleted).unwrap();
        for node in [format!("paced-{name}"), format!("file-{name}")] {
            self.vm.qmp().execute("blockdev-del", json!({ "node-name": node })).unwrap();
        }
        self.vm.qmp().execute("object-del", json!({ "id": format!("pace-{name}") })).unwrap();
    }

    /// The next event of that kind that is the one.
    fn event(&self, kind: &str, is: impl Fn(&Value) -> bool) -> Value {
        loop {
            let Some(line) = self.watch.next(SOON) else {
                panic!("no {kind}; the guest says {:?}", self.vm.run("guestlet disks; dmesg | tail -20"))
            };
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == kind && is(&event) {
                return event;
            }
        }
    }
}

pub fn paced(name: &str) -> Value {
    json!({
        "driver": "throttle", "node-name": format!("paced-{name}"), "throttle-group": format!("pace-{name}"),
        "file": format!("file-{name}"),
    })
}

pub fn scsi(unit: u32) -> Value {
    json!({ "driver": "scsi-hd", "bus": "scsi0.0", "channel": 0, "scsi-id": 7, "lun": unit })
}

fn serial(event: &Value) -> &str {
    event["disk"]["serials"][0]["value"].as_str().unwrap_or_default()
}

#[test]
fn a_disk_grows_and_vanishes_while_it_is_written() {
    let lab = Lab::new(fast("vanish"));
    let virtio = json!({ "driver": "virtio-blk-pci", "bus": "port2" });
    for (bus, device) in [("scsi", scsi(1)), ("virtio", virtio)] {
        lab.plug("data", "data-1", 32 << 20, &device);
        let added = lab.event("disk-added", |event| serial(event) == "data-1");
        let disk = added["disk"]["name"].as_str().unwrap();
        let prepare = format!(
            "mkdir -p /mnt && mke2fs -q /dev/{disk} && mount -t ext4 /dev/{disk} /mnt && echo kept > /mnt/kept; sync"
        );
        lab.vm.run(&prepare).unwrap();
        let write = "(while dd if=/dev/urandom of=/mnt/file bs=64k count=64 conv=fsync; do :; done; sleep 1000 < /mnt & \
                     echo $! > /pid) > /dev/null 2>&1 &";
        lab.vm.run(write).unwrap();
        lab.vm.qmp().execute("block_resize", json!({ "node-name": "data", "size": 64 << 20 })).unwrap();
        let grown = lab.event("disk-resized", |event| serial(event) == "data-1");
        assert_eq!((&grown["bytes_before"], &grown["disk"]["bytes"]), (&json!(32 << 20), &json!(64 << 20)));
        lab.vm.run("grep -q kept /mnt/kept && test -s /mnt/file").unwrap();

        lab.unplug("data");
        let removed = lab.event("disk-removed", |event| serial(event) == "data-1");
        assert_eq!(removed["in_use"], json!(["/mnt"]), "{bus}: {removed}");
        // Another one of that name comes while the first one's file system is still there and in use.
        lab.plug("data", "data-1", 32 << 20, &device);
        let added = lab.event("disk-added", |event| serial(event) == "data-1");
        let found = find(&lab.vm, "data-1", 0).unwrap();
        assert_eq!(added["disk"]["name"], found.name.as_str());
        lab.vm.run(&format!("mke2fs -q /dev/{}", found.name)).unwrap();
        lab.vm.run("killall dd; kill $(cat /pid); umount -l /mnt; true").unwrap();
        let list = lab.host.ctl(&["disks", lab.vm.name()]).unwrap();
        assert!(list.contains("data-1"), "{list}");
        lab.unplug("data");
        lab.event("disk-removed", |event| serial(event) == "data-1");
    }
}

pub const RULES: &str = "/etc/guestlet/disks.d/faults.toml";

/// What the guest says of the rule for a place, once it is so.
pub fn rule(vm: &Vm, point: &str, state: &str) -> Value {
    let find = || {
        let told: Value = serde_json::from_str(&vm.run("guestlet disks -o json").ok()?).ok()?;
        let rules = told["rules"].as_array()?.clone();
        rules.into_iter().find(|rule| rule["mount_point"] == point && rule["state"] == state)
    };
    wait_for(state, SOON, find).unwrap_or_else(|error| {
        panic!(
            "{error}: {} {}",
            vm.run("guestlet disks").unwrap(),
            vm.run("journalctl -u guestlet -n 30").unwrap()
        )
    })
}

/// Does half of what it should and says so, or all, or all and then stands still: as /run/step says. The disk is its
/// standard input.
const MKFS: &str = "#!/bin/sh\n\
    /usr/sbin/mke2fs \"$@\" || exit 1\n\
    case $(cat /run/step) in\n\
    half) dd if=/dev/zero of=/proc/self/fd/3 bs=1024 seek=1 count=1 conv=notrunc,fsync 3<&0; touch /run/there; sleep 1000 ;;\n\
    still) sync; touch /run/there; sleep 1000 ;;\n\
    esac\n";

#[test]
fn rules_go_on_after_kills_hangs_and_losses() {
    let lab = Lab::new(real("faults"));
    let vm = &lab.vm;
    let kill = "kill -9 $(systemctl show --value --property MainPID guestlet.service)";
    vm.run("rm /usr/sbin/mkfs.ext4").unwrap();
    vm.write("/usr/sbin/mkfs.ext4", MKFS.as_bytes()).unwrap();
    vm.run("chmod 755 /usr/sbin/mkfs.ext4; echo half > /run/step").unwrap();
    let rules = |list: &[(&str, &str)]| {
        let rule = |(serial, more): &(&str, &str)| {
            format!("[[disk]]\nmatch = {{ serial = \"{serial}\" }}\n{more}\n")
        };
        let texts: Vec<_> = list.iter().map(rule).collect();
        vm.write(RULES, texts.concat().as_bytes()).unwrap();
    };
    let data = (
        "data-1",
        "mount-point = \"/srv/data\"\nfile-system = \"ext4\"\nformat-if-blank = true\ngrow = true",
    );
    rules(&[data]);
    lab.plug("data", "data-1", 64 << 20, &scsi(1));
    for next in ["still", "go"] {
        wait_for("mkfs", SOON, || vm.run("test -e /run/there").ok()).unwrap();
        vm.run(&format!("rm /run/there; echo {next} > /run/step; {kill}")).unwrap();
    }
    rule(vm, "/srv/data", "mounted");
    vm.run("echo kept > /srv/data/kept; ls -d /srv/data/lost+found").unwrap();

    // It grows while it is written, and what is written stays right.
    vm.run("dd if=/dev/urandom of=/root/first bs=1M count=8 2> /dev/null; cp /root/first /srv/data/first")
        .unwrap();
    let write = "(while dd if=/dev/urandom of=/srv/data/file bs=64k count=64 conv=fsync; do :; done) > /dev/null 2>&1 &";
    vm.run(write).unwrap();
    let blocks = || vm.run("stat -f -c %b /srv/data").unwrap().trim().parse::<u64>().unwrap();
    let before = blocks();
    vm.qmp().execute("block_resize", json!({ "node-name": "data", "size": 128 << 20 })).unwrap();
    wait_for("growth", SOON, || (blocks() > before * 3 / 2).then_some(())).unwrap();
    vm.run("cmp /root/first /srv/data/first").unwrap();

    // It vanishes while it is written and held, and another one with its name comes: that is mounted there.
    vm.run("sleep 1000 < /srv/data/kept > /dev/null 2>&1 &").unwrap();
    lab.unplug("data");
    let removed = lab.event("disk-removed", |event| serial(event) == "data-1");
    assert_eq!(removed["in_use"], json!(["/srv/data"]), "{removed}");
    lab.plug("data", "data-1", 64 << 20, &scsi(1));
    lab.event("disk-mounted", |event| serial(event) == "data-1");
    vm.run("! test -e /srv/data/kept && echo again > /srv/data/kept").unwrap();
    vm.run("killall dd sleep; true").unwrap();

    // One that hangs when a rule wants it: that is told, and once it answers again it is mounted without a word.
    lab.plug("slow", "slow", 64 << 20, &scsi(2));
    lab.event("disk-added", |event| serial(event) == "slow");
    vm.run("udevadm settle").unwrap();
    lab.pace("slow", 1);
    let slow = ("slow", "mount-point = \"/srv/slow\"\nfile-system = \"ext4\"\nformat-if-blank = true");
    rules(&[data, slow]);
    let failed = lab.event("disk-failed", |event| serial(event) == "slow");
    println!("a disk that hangs: {}", failed["problem"]);
    vm.run("echo still here > /srv/data/kept && guestlet disks").unwrap();
    assert_eq!(rule(vm, "/srv/data", "mounted")["disk"].as_str().map(|name| &name[..2]), Some("sd"));
    lab.pace("slow", 0);
    rule(vm, "/srv/slow", "mounted");

    // Swap space by rule; a label that is written by hand.
    let swap = ("swap", "file-system = \"swap\"\nformat-if-blank = true");
    lab.plug("swap", "swap", 32 << 20, &scsi(3));
    lab.plug("named", "named", 32 << 20, &scsi(4));
    let named = lab.event("disk-added", |event| serial(event) == "named")["disk"]["name"]
        .as_str()
        .unwrap()
        .to_owned();
    rules(&[data, slow, swap]);
    vm.run(&format!(
        "printf '[[disk]]\\nmatch = {{ label = \"mine\" }}\\nmount-point = \"/srv/named\"\\n' >> {RULES}"
    ))
    .unwrap();
    rule(vm, "swap (serial swap)", "mounted");
    vm.run("grep -q '^/dev/sd' /proc/swaps").unwrap();
    rule(vm, "/srv/named", "no-disk");
    vm.run(&format!("udevadm settle; mke2fs -q -t ext4 -L mine /dev/{named}")).unwrap();
    rule(vm, "/srv/named", "mounted");

    // Without its rule what is in use stays for so long, and then goes by itself.
    vm.run("sleep 30 < /srv/named > /dev/null 2>&1 &").unwrap();
    rules(&[data, slow]);
    rule(vm, "/srv/named", "failed");
    wait_for("the end of the mount", SOON, || vm.run("! mountpoint -q /srv/named").ok()).unwrap();
    vm.run("! grep -q '^/dev/sd' /proc/swaps").unwrap();
}
