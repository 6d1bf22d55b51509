//! Tests the room and the identities with sysfs trees that change.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::identity::{self, Asked, Source};
use super::lookup::{FindError, Selector};
use super::room::{Room, WaitError};
use super::uses;
use crate::guest::Guest;
use crate::guest::block_devices::{Error, Wait, serials};
use crate::sys::block;
use crate::sys::root::Root;

mod tracker;

/// Machine whose disks are set by the tests.
struct Machine {
    folder: tempfile::TempDir,
    root: Root,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        std::fs::create_dir_all(folder.path().join("sys/block")).unwrap();
        Self { folder, root }
    }

    fn place(name: &str) -> String {
        format!("/sys/devices/pci0000:00/0000:00:06.0/virtio-{name}/block/{name}")
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        #[allow(clippy::disallowed_methods)]
        std::fs::write(path, text).unwrap();
    }

    fn plug(&self, name: &str, serial: &str, sectors: u64) {
        let place = Self::place(name);
        let minor = u32::from(name.bytes().last().unwrap());
        self.write(&format!("{place}/dev"), &format!("254:{minor}\n"));
        self.write(&format!("{place}/size"), &format!("{sectors}\n"));
        self.write(&format!("{place}/serial"), serial);
        let link = format!("../devices{}", place.strip_prefix("/sys/devices").unwrap());
        symlink(link, self.path(&format!("/sys/block/{name}"))).unwrap();
    }

    fn unplug(&self, name: &str) {
        std::fs::remove_file(self.path(&format!("/sys/block/{name}"))).unwrap();
        // The old directory is kept under another name, so that no inode is reused, as in sysfs.
        let place = self.path(&Self::place(name));
        let graves = self.folder.path().join("graves");
        std::fs::create_dir_all(&graves).unwrap();
        let count = std::fs::read_dir(&graves).unwrap().count();
        std::fs::rename(place, graves.join(count.to_string())).unwrap();
    }
}

#[tokio::test]
async fn what_is_no_disk_of_the_machine_does_not_count() {
    let machine = Machine::new();
    machine.plug("vda", "", 1);
    let below = "/sys/devices/pci0000:00/0000:00:04.0/virtio2/host0/target0:0:0";
    for (place, kind) in [
        ("/sys/devices/virtual/block/loop0".to_owned(), ""),
        ("/sys/devices/platform/floppy.0/block/fd0".to_owned(), ""),
        (format!("{below}/0:0:0:1/block/sr0"), "5\n"),
        (format!("{below}/0:0:0:2/block/sda"), "0\n"),
    ] {
        machine.write(&format!("{place}/dev"), "8:0\n");
        machine.write(&format!("{place}/device/type"), kind);
        assert_eq!(identity::counts(&machine.root, &place).is_some(), place.ends_with("sda"), "{place}");
    }
    assert!(identity::counts(&machine.root, &Machine::place("vda")).is_some());
    assert!(identity::counts(&machine.root, &Machine::place("vdb")).is_none());
}

#[tokio::test]
async fn who_waits_is_answered_when_the_disk_is_known() {
    let (machine, room) = (Machine::new(), Arc::new(Room::default()));
    machine.plug("vda", "one", 1);
    machine.plug("vdb", "two", 1);
    let disk =
        |name: &str| Arc::new(identity::read(&machine.root, &Machine::place(name), &Asked::Ask).unwrap());
    let serial = |text: &str| Selector::Serial(text.to_owned());
    let changes = room.changes();
    let (one, two) = (serial("one"), serial("two"));
    let mut waiting = Box::pin(room.wait(&two, Duration::from_secs(60)));
    let given_up = room.wait(&two, Duration::from_secs(60));
    assert!(tokio::time::timeout(Duration::from_millis(1), &mut waiting).await.is_err());
    drop(given_up);
    room.publish([disk("vda")].into());
    assert_eq!(room.find(&one).unwrap().name, "vda");
    assert!(tokio::time::timeout(Duration::from_millis(1), &mut waiting).await.is_err());
    room.publish([disk("vda"), disk("vdb")].into());
    assert_eq!(waiting.await.unwrap().name, "vdb");
    // A later caller does not wait at all.
    assert_eq!(room.wait(&one, Duration::ZERO).await.unwrap().name, "vda");
    assert_eq!(*changes.borrow(), 2);

    let late = room.wait(&serial("three"), Duration::from_millis(10)).await.unwrap_err();
    assert_eq!(late.to_string(), "no disk with the serial number \"three\" has appeared within 0.01 s");
    room.publish([disk("vda"), disk("vda")].into());
    let several = room.wait(&one, Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(several, WaitError::Find(FindError::Ambiguous { .. })), "{several}");
    let empty = room.wait(&serial(""), Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(empty, WaitError::Find(FindError::Unusable { .. })), "{empty}");
}

#[tokio::test]
async fn what_a_disk_is_used_for_also_when_it_is_gone() {
    let machine = Machine::new();
    machine.plug("vda", "one", 1);
    let partition = format!("{}/vda2", Machine::place("vda"));
    machine.write(&format!("{partition}/partition"), "2\n");
    machine.write(&format!("{partition}/dev"), "254:2\n");
    machine.write(&format!("{partition}/holders/dm-0/dev"), "253:0\n");
    machine.write(&format!("{partition}/holders/dm-0/dm/name"), "group-volume\n");
    machine.write("/sys/class/block/dm-0/holders/dm-1/x", "");
    machine.write("/sys/class/block/dm-1/dev", "253:1\n");
    machine.write("/sys/class/block/dm-1/dm/name", "secret\n");
    let mounts = [
        "1 0 254:2 / /two rw - ext4 /dev/vda2 rw",
        "2 0 253:1 / /a\\040b rw - ext4 /dev/mapper/secret rw",
        "3 0 0:50 / /tree rw - btrfs /dev/vda rw",
        "6 0 0:51 / /both rw - btrfs /dev/vdc rw",
        "4 0 254:3 / /other rw - ext4 /dev/vda3 rw",
        "5 0 0:21 / /proc rw - proc proc rw",
    ];
    // A btrfs on two disks, mounted from the other one.
    machine.write("/sys/fs/btrfs/0a/devices/vda2", "");
    machine.write("/sys/fs/btrfs/0a/devices/vdc", "");
    machine.write("/sys/class/block/vda2/dev", "254:2\n");
    machine.write("/sys/class/block/vdc/dev", "254:32\n");
    machine.write("/proc/self/mountinfo", &(mounts.join("\n") + "\n"));
    let swaps = "Filename Type Size Used Priority\n/dev/vda2 partition 1 0 -2\n/dev/vdb partition 1 0 -2\n";
    machine.write("/proc/swaps", swaps);
    let disk = identity::read(&machine.root, &Machine::place("vda"), &Asked::Ask).unwrap();
    let used = || uses::of(&machine.root, &disk).iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(used(), ["/two", "/a b", "/tree", "/both", "swap on /dev/vda2", "dm-0 (group-volume)"]);
    machine.unplug("vda");
    assert_eq!(used(), ["/two", "/a b", "/tree", "/both", "swap on /dev/vda2", "dm-0 (group-volume)"]);
}

#[test]
fn a_disk_that_the_monitor_knows_is_not_asked_again() {
    let machine = Machine::new();
    machine.plug("vda", "one", 1);
    let guest = Guest { root: machine.root.clone(), ..Guest::default() };
    let place = Machine::place("vda");
    let disk = identity::read(&machine.root, &place, &Asked::Ask).unwrap();
    let get = |wait| serials::get(&guest, &place, disk.number, wait);
    assert!(matches!(get(Wait::Cannot), Err(Error::MustWait)));
    assert_eq!(get(Wait::Can).unwrap().as_deref(), Some("one"));
    guest.disks.publish([Arc::new(disk.clone())].into());
    machine.write(&format!("{place}/serial"), "asked");
    for wait in [Wait::Cannot, Wait::Can] {
        assert_eq!(get(wait).unwrap().as_deref(), Some("one"));
    }
    // A different disk at the same path is queried.
    machine.unplug("vda");
    machine.plug("vda", "two", 2);
    assert!(matches!(get(Wait::Cannot), Err(Error::MustWait)));
    assert_eq!(get(Wait::Can).unwrap().as_deref(), Some("two"));
}

#[test]
fn serial_numbers_of_any_bytes() {
    let machine = Machine::new();
    for (number, (raw, expected)) in [
        (b"".as_slice(), None),
        (b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", None),
        (b"00000000000000000000", Some("00000000000000000000")),
        (b" two words ", Some("two words")),
        (b"\xff\xfe", Some("\u{fffd}\u{fffd}")),
        ("größe".as_bytes(), Some("größe")),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("vd{number}");
        machine.plug(&name, "", 1);
        #[allow(clippy::disallowed_methods)]
        std::fs::write(machine.path(&format!("{}/serial", Machine::place(&name))), raw).unwrap();
        let disk = identity::read(&machine.root, &Machine::place(&name), &Asked::Ask).unwrap();
        let serial = disk.serial().map(|serial| (serial.text(), serial.source));
        assert_eq!(serial, expected.map(|text| (text.to_owned(), Source::Virtio)), "{raw:?}");
    }
    assert!(identity::read(&machine.root, "/sys/nothing", &Asked::Ask).is_err());
    assert!(Path::new(machine.folder.path()).exists());
}
