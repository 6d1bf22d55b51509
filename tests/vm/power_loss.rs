//! The power fails while the agent writes: QEMU is killed, and the guest boots again from what has reached its disks.
//! Whether that is sound is asked e2fsck on the host, not the guest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use crate::disk_faults::{RULES, paced, rule, scsi};
use crate::harness::launch::Options;
use crate::harness::process::RunFolder;
use crate::harness::turns;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::random::{Random, seed};
use crate::soak::steps;
use crate::{images, real};

const RULE: &[u8] =
    b"[[disk]]\nmatch = { serial = \"data-1\" }\nmount-point = \"/srv/data\"\nfile-system = \"ext4\"\n\
    format-if-blank = true\ngrow = true\n";
/// Bytes of the disk, and what it grows to.
const BYTES: u64 = 128 << 20;
const GROWN: u64 = 1 << 30;
/// Bytes a second that the disk takes while the power is about to fail: writing takes seconds then.
const SLOW: u64 = 512 << 10;
/// The calls by which a note is written and removed.
const NOTES: &str = "mkdir,rename,renameat,renameat2,unlink,unlinkat,fsync,fdatasync";

/// Plugs the disk in that file.
fn plug(vm: &Vm, path: &Path) {
    let group = json!({ "qom-type": "throttle-group", "id": "pace-data" });
    vm.qmp().execute("object-add", group).unwrap();
    let file = json!({ "driver": "file", "filename": path, "node-name": "file-data" });
    vm.qmp().execute("blockdev-add", file).unwrap();
    vm.qmp().execute("blockdev-add", paced("data")).unwrap();
    let node = json!({ "driver": "raw", "node-name": "data", "file": "paced-data" });
    vm.qmp().execute("blockdev-add", node).unwrap();
    let mut device = scsi(1);
    device["drive"] = json!("data");
    device["serial"] = json!("data-1");
    vm.qmp().execute("device_add", device).unwrap();
}

fn slow_down(vm: &Vm) {
    let limits =
        json!({ "path": "/objects/pace-data", "property": "limits", "value": { "bps-write": SLOW } });
    vm.qmp().execute("qom-set", limits).unwrap();
    vm.qmp().execute("blockdev-reopen", json!({ "options": [paced("data")] })).unwrap();
}

/// Ends the guest as a power failure does, and boots it again from its disks.
fn cut(vm: Vm, kept: &RunFolder, root: &str, data: &Path) -> Vm {
    vm.qemu().signal(Signal::SIGKILL).unwrap();
    vm.qemu().wait(SOON).unwrap();
    // Each has the one before it below.
    let root = kept.file(root);
    std::fs::copy(vm.file("disk.qcow2"), &root).unwrap();
    drop(vm);
    let vm = Options::named("power").without_cloud_init().real(images(), &root).unwrap();
    plug(&vm, data);
    wait_for("the guest's next boot", BOOT, || vm.run("systemctl is-active guestlet").ok()).unwrap();
    vm
}

/// Whether the file system in that file is sound once its journal is replayed.
fn assert_sound(data: &Path, kept: &RunFolder, when: &str) {
    let copy = kept.file("checked.raw");
    std::fs::copy(data, &copy).unwrap();
    let replayed = Command::new("e2fsck").args(["-E", "journal_only", "-y"]).arg(&copy).output().unwrap();
    let checked = Command::new("e2fsck").args(["-f", "-n"]).arg(&copy).output().unwrap();
    let said = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(checked.status.success(), "{when}: {}{}", said(&replayed), said(&checked));
}

fn blocks(vm: &Vm) -> u64 {
    vm.run("stat -f -c %b /srv/data").unwrap().trim().parse().unwrap()
}

fn is_running(vm: &Vm, program: &str) -> Option<()> {
    vm.run(&format!("pidof {program}")).ok().map(drop)
}

/// Begins a format, and returns at some moment of it.
fn while_it_formats(vm: &Vm, random: &mut Random) {
    slow_down(vm);
    write_rule(vm);
    wait_for("mkfs", SOON, || is_running(vm, "mkfs.ext4").or_else(|| is_running(vm, "mke2fs"))).unwrap();
    std::thread::sleep(Duration::from_millis(u64::from(random.below(3000))));
}

/// The same, when mkfs takes no time, but what the agent does before and after it does: it writes a note of what it begins, and
/// removes that at the end.
fn while_it_takes_notes(vm: &Vm, random: &mut Random) {
    vm.run(&format!(
        "strace -f -p $(systemctl show --value --property MainPID guestlet.service) -o /run/calls -e trace={NOTES} \
         -e inject={NOTES}:delay_enter=500000:delay_exit=500000 > /dev/null 2>&1 &"
    ))
    .unwrap();
    let traced =
        "grep 'TracerPid:.[1-9]' /proc/$(systemctl show --value --property MainPID guestlet.service)/status";
    wait_for("strace", SOON, || vm.run(traced).ok()).unwrap();
    write_rule(vm);
    wait_for("the first call", SOON, || vm.run("grep formats /run/calls").ok()).unwrap();
    std::thread::sleep(Duration::from_millis(u64::from(random.below(8000))));
    println!("the power fails during {}", vm.run("tail -n 1 /run/calls").unwrap().trim());
}

fn write_rule(vm: &Vm) {
    vm.write(RULES, RULE).unwrap();
    vm.run("sync").unwrap();
}

#[test]
fn what_is_made_or_grown_when_the_power_fails_is_finished_and_whole() {
    let _turn = turns::beside();
    let seed = seed();
    let mut random = Random(seed);
    for turn in 0..steps(1, 12) {
        let kept = RunFolder::new().unwrap();
        let data: PathBuf = kept.file("data.raw");
        std::fs::File::create(&data).unwrap().set_len(BYTES).unwrap();
        let when = |step: &str| format!("{step}, turn {turn} of seed {seed}");
        let vm = real("power");
        plug(&vm, &data);
        wait_for("the disk", SOON, || vm.run("guestlet disks | grep data-1").ok()).unwrap();
        if random.below(2) == 0 {
            while_it_formats(&vm, &mut random);
        } else {
            while_it_takes_notes(&vm, &mut random);
        }

        // The format that the power ended is done again, because it was noted before it began.
        let vm = cut(vm, &kept, "first.qcow2", &data);
        rule(&vm, "/srv/data", "mounted");
        vm.run(
            "dd if=/dev/urandom of=/root/first bs=1M count=4 2> /dev/null; cp /root/first /srv/data/first",
        )
        .unwrap();
        vm.run("sync").unwrap();
        assert_sound(&data, &kept, &when("formatted"));

        // It grows, and what was on it stays.
        let before = blocks(&vm);
        slow_down(&vm);
        vm.qmp().execute("block_resize", json!({ "node-name": "data", "size": GROWN })).unwrap();
        std::thread::sleep(Duration::from_millis(u64::from(random.below(4000))));
        let vm = cut(vm, &kept, "second.qcow2", &data);
        assert_sound(&data, &kept, &when("cut while it grew"));
        rule(&vm, "/srv/data", "mounted");
        wait_for("growth", SOON, || (blocks(&vm) > before * 4).then_some(())).unwrap();
        vm.run("cmp /root/first /srv/data/first && sync").unwrap();
        drop(vm);
        assert_sound(&data, &kept, &when("grown"));
    }
}
