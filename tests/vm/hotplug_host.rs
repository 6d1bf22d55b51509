//! Disks that the host half plugs into a running guest, seen by the guest's kernel, and by its agent where it has one.

use serde_json::Value;

use crate::disk_calls::{release, try_find};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::images::text;
use crate::harness::launch::Options;
use crate::harness::tools;
use crate::harness::vm::{BOOT, FAST_READY, SOON, Vm};
use crate::harness::wait_for;
use crate::{fast, images};

/// As long as a guest can read it.
const SCSI: &str = "pvc-0123456789abcdef0123456789abcdef";
/// The same on virtio-blk.
const VIRTIO: &str = "vol-0123456789abcdef";

/// What Kubernetes calls a volume: more than a SCSI disk shows as its serial number.
const VOLUME: &str = "pvc-11111111-2222-3333-4444-555555555555";

fn ask(half: &HostHalf, arguments: &[&str]) -> Value {
    serde_json::from_str(&half.ctl(&[&["-o", "json", "disk"], arguments].concat()).unwrap()).unwrap()
}

/// Waits until a command of the guest's shell succeeds.
fn until(vm: &Vm, command: &str) -> String {
    wait_for(command, SOON, || vm.run(command).ok())
        .unwrap_or_else(|error| panic!("{error}: {}", vm.run("ls -l /sys/block; dmesg | tail -30").unwrap()))
}

/// Names in the guest of the disks with these serial numbers, once it has both.
fn names(vm: &Vm) -> (String, String) {
    let scsi = until(vm, &format!("grep -l {SCSI} /sys/block/sd*/device/vpd_pg80"));
    let virtio = until(vm, &format!("grep -lx {VIRTIO} /sys/block/vd*/serial"));
    let name = |path: &str| path.trim().split('/').nth(3).unwrap().to_owned();
    (name(&scsi), name(&virtio))
}

#[test]
fn disks_of_both_buses_come_grow_and_go_in_a_running_guest() {
    let vm = Options::named("plugged").without_vsock().bare(images()).unwrap();
    vm.wait_booted(FAST_READY, 1).unwrap();
    let mut half = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    half.wait("plugged", "running", SOON, |vm| vm["power"] == "running").unwrap();
    assert_eq!(ask(&half, &["ls", "plugged"]), serde_json::json!([]));

    let attach_scsi = ["attach", "plugged", "--size", "64M", "--serial", SCSI];
    let attach_virtio =
        ["attach", "plugged", "--size", "32M", "--format", "qcow2", "--bus", "virtio", "--serial", VIRTIO];
    let first = ask(&half, &attach_scsi);
    let second = ask(&half, &attach_virtio);
    let (scsi, virtio) = names(&vm);
    // The page that udev makes names of has all of it too.
    until(&vm, &format!("grep -q {SCSI} /sys/block/{scsi}/device/vpd_pg83"));
    until(&vm, &format!("grep -qx {} /sys/block/{scsi}/size", (64 << 20) / 512));
    until(&vm, &format!("grep -qx {} /sys/block/{virtio}/size", (32 << 20) / 512));
    for (disk, mark) in [(&scsi, "on scsi"), (&virtio, "on virtio")] {
        vm.run(&format!("printf '{mark}' | dd of=/dev/{disk} bs=512 seek=1000 conv=sync,fsync")).unwrap();
    }

    // Nothing is remembered by the host half.
    half.kill().unwrap();
    half.wait("plugged", "running", SOON, |vm| vm["power"] == "running").unwrap();
    assert_eq!((ask(&half, &attach_scsi), ask(&half, &attach_virtio)), (first, second.clone()));
    assert_eq!(ask(&half, &["ls", "plugged"]).as_array().unwrap().len(), 2);

    for (serial, size) in [(SCSI, "96M"), (VIRTIO, "48M")] {
        ask(&half, &["resize", "plugged", "--serial", serial, "--size", size]);
    }
    until(&vm, &format!("grep -qx {} /sys/block/{scsi}/size", (96 << 20) / 512));
    until(&vm, &format!("grep -qx {} /sys/block/{virtio}/size", (48 << 20) / 512));

    for (serial, disk) in [(SCSI, &scsi), (VIRTIO, &virtio)] {
        assert_eq!(ask(&half, &["detach", "plugged", "--force", "--serial", serial])["was_attached"], true);
        until(&vm, &format!("! test -e /sys/block/{disk}"));
    }
    assert_eq!(ask(&half, &["ls", "plugged"]), serde_json::json!([]));
    let image = std::path::PathBuf::from(second["file"].as_str().unwrap());
    tools::run("qemu-img".as_ref(), &["check", "-q", text(&image).unwrap()]).unwrap();

    // What the guest wrote is there when they come again, whichever came first.
    ask(
        &half,
        &["attach", "plugged", "--file", text(&image).unwrap(), "--bus", "virtio", "--serial", VIRTIO],
    );
    ask(&half, &["attach", "plugged", "--size", "96M", "--serial", SCSI]);
    let (scsi, virtio) = names(&vm);
    for (disk, mark) in [(&scsi, "on scsi"), (&virtio, "on virtio")] {
        vm.run(&format!("dd if=/dev/{disk} bs=512 skip=1000 count=1 | grep -q '{mark}'")).unwrap();
    }
}

#[test]
fn a_guest_that_stands_still_lets_go_late() {
    let vm = Options::named("still").without_vsock().bare(images()).unwrap();
    vm.wait_booted(FAST_READY, 1).unwrap();
    let half = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    half.wait("still", "running", SOON, |vm| vm["power"] == "running").unwrap();
    let attach = |serial: &str| {
        half.ctl(&["disk", "attach", "still", "--size", "1M", "--bus", "virtio", "--serial", serial])
    };
    attach("one").unwrap();
    attach("two").unwrap();
    // Both ports of the machine are taken.
    assert!(attach("three").unwrap_err().to_string().contains("no free PCI Express root port"));
    until(&vm, "grep -qx one /sys/block/vd*/serial && grep -qx two /sys/block/vd*/serial");

    vm.qmp().execute("stop", serde_json::json!({})).unwrap();
    let kept = half
        .ctl(&["disk", "detach", "still", "--force", "--serial", "one", "--wait", "2"])
        .unwrap_err()
        .to_string();
    assert!(kept.contains("the guest has not released the disk \"one\" within 2 s"), "{kept}");
    vm.qmp().execute("cont", serde_json::json!({})).unwrap();
    vm.qmp().wait_event("DEVICE_DELETED", SOON).unwrap();
    // The port is free again, and so is the file.
    wait_for("disk that is attached again", SOON, || attach("one").ok()).unwrap();
    until(&vm, "grep -qx one /sys/block/vd*/serial");
}

/// A guest with an agent, and its host half.
fn with_agent(name: &str) -> (Vm, HostHalf) {
    let vm = fast(name);
    let half = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    half.wait_connected(name, BOOT).unwrap();
    half.wait(name, "running", SOON, |vm| vm["power"] == "running").unwrap();
    (vm, half)
}

/// The guest's name of a disk that was just attached.
fn seen(disk: &Value) -> String {
    disk["guest_name"].as_str().unwrap_or_else(|| panic!("{disk}")).to_owned()
}

#[test]
fn a_disk_that_the_guest_uses_stays_until_it_does_not() {
    let (vm, half) = with_agent("user");
    for (serial, bus) in [(VOLUME, "scsi"), (VIRTIO, "virtio")] {
        let attach = ["attach", "user", "--size", "16M", "--bus", bus, "--serial", serial];
        let disk = seen(&ask(&half, &attach));
        vm.run(&format!(
            "mkdir -p /mnt && mke2fs -q /dev/{disk} && mount -t ext4 /dev/{disk} /mnt && echo kept > /mnt/file"
        ))
        .unwrap();
        let detach = ["disk", "detach", "user", "--serial", serial];
        let refused = || half.ctl(&detach).unwrap_err().to_string();
        let why = refused();
        assert!(why.contains(&format!("the disk {disk} (")) && why.contains("mounted at /mnt"), "{why}");
        vm.run("grep -q kept /mnt/file && umount /mnt").unwrap();
        vm.run(&format!("(sleep 1000 < /dev/{disk} & echo $! > /pid) > /dev/null 2>&1")).unwrap();
        let why = refused();
        let id = vm.run("cat /pid").unwrap();
        assert!(why.contains(&format!("sleep (process {}) has /dev/{disk} open", id.trim())), "{why}");
        vm.run("kill $(cat /pid)").unwrap();
        println!("{}", half.ctl(&detach).unwrap());
        until(&vm, &format!("! test -e /sys/block/{disk}"));

        // All that was written is there.
        let disk = seen(&ask(&half, &attach));
        vm.run(&format!("mount -t ext4 /dev/{disk} /mnt && grep -q kept /mnt/file")).unwrap();
        // As if its cable were cut.
        let forced = ask(&half, &["detach", "user", "--force", "--serial", serial]);
        assert!(forced["not_released"].as_str().unwrap().contains("mounted at /mnt"), "{forced}");
        until(&vm, &format!("! test -e /sys/block/{disk}"));
        vm.run("umount -l /mnt").unwrap();
    }
    assert_eq!(ask(&half, &["ls", "user"]), serde_json::json!([]));
}

#[test]
fn a_disk_that_was_released_and_stays_plugged_is_found_again() {
    let (vm, half) = with_agent("finder");
    let attach = ["attach", "finder", "--size", "16M", "--serial", VOLUME];
    let disk = seen(&ask(&half, &attach));
    vm.run(&format!("printf mark | dd of=/dev/{disk} bs=512 conv=sync")).unwrap();
    let released = release(&vm, VOLUME);
    assert!(released.removed && released.disk.unwrap().name == disk);
    vm.run(&format!("! test -e /sys/block/{disk}")).unwrap();
    assert_eq!(release(&vm, VOLUME).disk, None);
    // It is attached already: this only asks the guest for it.
    let again = seen(&ask(&half, &attach));
    vm.run(&format!("dd if=/dev/{again} bs=512 count=1 | grep -q mark")).unwrap();
    // So it is by an agent that was started after the release.
    assert!(release(&vm, VOLUME).removed);
    vm.run("killall -9 guestlet").unwrap();
    let found = wait_for("the next agent", SOON, || try_find(&vm, VOLUME, 60_000).ok().flatten());
    vm.run(&format!("dd if=/dev/{} bs=512 count=1 | grep -q mark", found.unwrap().name)).unwrap();
    // A release that was not followed by a detach is no harm to that, once the host half has its session again.
    release(&vm, VOLUME);
    half.wait_connected(vm.name(), BOOT).unwrap();
    assert_eq!(ask(&half, &["detach", "finder", "--serial", VOLUME])["was_attached"], true);
    assert_eq!(seen(&ask(&half, &attach)).get(..2), Some("sd"));
}
