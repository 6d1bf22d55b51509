//! What is between a disk and its file systems, where the kernel has device mapper: encryption, LVM, and a disk that
//! fails. For the guests of the tests, not for the machine that runs them.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]
#![allow(dead_code, reason = "of the laboratory that it shares with the other tests it needs a part")]

mod lab;
#[path = "../qga/namespace.rs"]
mod namespace;

use std::path::{Path, PathBuf};
use std::time::Duration;

use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::contents::contents;
use guestlet::guest::volumes::format::{Format, Kind};
use guestlet::guest::volumes::grow::{Outcome, Step};
use guestlet::guest::volumes::mount::{Mount, Source, mount};
use guestlet::guest::volumes::swap;
use guestlet::guest::volumes::unmount::unmount;

use lab::{Lab, enter, run};

const LONG: Duration = Duration::from_secs(300);

fn words(steps: &[Step]) -> Vec<String> {
    let word = |step: &Step| match &step.outcome {
        Outcome::Grown { .. } => format!("{}: grown", step.what),
        Outcome::NotNeeded => format!("{}: not needed", step.what),
        Outcome::Refused(why) => format!("{}: {why}", step.what),
    };
    steps.iter().map(word).collect()
}

fn do_grow(lab: &Lab, device: &Path) -> Vec<String> {
    words(&lab.grow(device).unwrap())
}

/// The kernel's own file of a device.
fn kernel_name(mapped: &str) -> String {
    run(&format!("echo /dev/$(dmsetup info -c --noheadings -o blkdevname {mapped})"))
}

#[test]
fn everything_grows_while_it_is_mounted() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 200);
    let name = disk.name();
    run(&format!(
        "printf 'label: gpt\\nsize=8MiB\\nsize=150MiB\\n' | sfdisk --quiet --no-reread --no-tell-kernel {name}
         partx --update {name} || partx --add {name}
         printf key > {0}; cryptsetup luksFormat --batch-mode --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file {0} {name}p2
         cryptsetup open --disable-keyring --key-file {0} {name}p2 secret
         pvcreate --quiet /dev/mapper/secret; vgcreate --quiet group /dev/mapper/secret
         lvcreate --quiet --yes --zero n -L 16M -n swap group; lvcreate --quiet --yes --zero n -L 100M -n data group
         mkswap /dev/mapper/group-swap; mkfs.ext4 -q /dev/mapper/group-data",
        lab.path("key").display(),
    ));
    let place = lab.folder("place");
    run(&format!("mount /dev/mapper/group-data {0}; echo kept > {0}/file", place.display()));
    disk.resize(300);
    let (inner, data) = (kernel_name("secret"), run("readlink -f /dev/mapper/group-data"));
    let layers = [
        format!("partition 2 of {name}: "),
        format!("the encryption of {name}p2: "),
        format!("the physical volume {inner}: "),
        "the logical volume group/data: ".to_owned(),
        format!("ext4 on {data}: "),
    ];
    for (device, word) in
        [(disk.device.clone(), "grown"), (PathBuf::from("/dev/mapper/group-data"), "not needed")]
    {
        assert_eq!(do_grow(&lab, &device), layers.clone().map(|layer| layer + word));
    }
    let size: u64 = run(&format!("blockdev --getsize64 {data}")).parse().unwrap();
    // What the disk brought, and not what the group had room for before.
    assert!((230 << 20..250 << 20).contains(&size), "{size}");
    run(&format!("df -B1 {0}; umount {0}; e2fsck -fn {data}", place.display()));
    // Two that could take it: nobody decides for its owner.
    disk.resize(400);
    run("lvreduce --quiet --force --yes -L 40M group/data; mkfs.ext4 -q -F /dev/mapper/group-data
         lvcreate --quiet --yes --zero n -L 20M -n other group; mkfs.ext4 -q /dev/mapper/group-other");
    let steps = do_grow(&lab, &disk.device);
    assert_eq!(
        steps.last().unwrap(),
        "the volume group group: it has 2 logical volumes that could take the space"
    );
    run(&format!(
        "vgchange --quiet -an group; cryptsetup close secret; partx --delete {name} 2> /dev/null || true"
    ));
    // Closed, it stays.
    let steps = do_grow(&lab, &disk.device);
    assert_eq!(steps.len(), 1, "{steps:?}");
}

#[test]
fn xfs_and_btrfs_and_ext4_grow_in_a_partition_that_is_used() {
    let Some(lab) = enter() else { return };
    for (kind, size) in [("ext4", 64), ("xfs", 320), ("btrfs", 128)] {
        let disk = lab.disk(kind, size + 16);
        let name = disk.name();
        let place = lab.folder(&format!("{kind}-place"));
        run(&format!(
            "printf 'label: gpt\\nsize={size}MiB\\n' | sfdisk --quiet --no-reread --no-tell-kernel {name}
             partx --update {name} || partx --add {name}
             mkfs.{kind} -q {name}p1; mount {name}p1 {}",
            place.display()
        ));
        disk.resize(size + 216);
        let expected = [format!("partition 1 of {name}: grown"), format!("{kind} on {name}p1: grown")];
        assert_eq!(do_grow(&lab, &place_device(&place)), expected);
        run(&format!("umount {}", place.display()));
    }
}

fn place_device(place: &Path) -> PathBuf {
    run(&format!("findmnt -n -o SOURCE {}", place.display())).into()
}

#[test]
fn a_disk_that_fails_is_not_blank_and_lets_itself_be_unmounted() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 320);
    let sectors = 320 * 2048;
    let table = |kind: &str| match kind {
        "linear" => format!("0 {sectors} linear {} 0", disk.name()),
        kind => format!("0 {sectors} {kind}"),
    };
    run(&format!("dmsetup create failing --table '{}'", table("error")));
    let device = PathBuf::from(kernel_name("failing"));
    let wanted = Format { identity: "x", kind: Kind::Xfs, label: None, over_data: false, deadline: LONG };
    let error = lab.format(&device, &wanted).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. } | Error::Program(_)), "{error:?}");
    lab.wait(contents(&lab.guest, &device)).unwrap_err();
    let load = |kind: &str| {
        run(&format!(
            "dmsetup suspend --noflush --nolockfs failing; echo '{}' | dmsetup load failing; dmsetup resume failing",
            table(kind)
        ));
    };
    load("linear");
    assert!(lab.format(&device, &wanted).unwrap().made);
    let place = lab.folder("place");
    let held = lab.hold(&device).unwrap();
    let at = Mount {
        source: Source::Device(&held),
        target: &place,
        kind: Some("xfs"),
        options: &[],
        read_only: false,
        make_target: false,
        over_contents: false,
        propagation: None,
        check: true,
        deadline: LONG,
    };
    lab.wait(mount(&lab.guest, &at)).unwrap();
    std::fs::write(place.join("file"), "lost").unwrap();
    load("error");
    assert_eq!(lab.wait(unmount(&lab.guest, &place, LONG)).unwrap(), 1);
    lab.wait(mount(&lab.guest, &at)).unwrap_err();
    load("linear");
    lab.wait(mount(&lab.guest, &at)).unwrap();
    assert_eq!(lab.wait(unmount(&lab.guest, &place, LONG)).unwrap(), 1);
    drop(held);
    run("dmsetup remove failing");
}

#[test]
fn a_disk_that_cannot_be_read_where_it_matters_is_left_alone() {
    let Some(lab) = enter() else { return };
    // The kernel's own disk for tests, scsi_debug.
    let device = PathBuf::from("/dev/sda");
    let wanted = Format { identity: "x", kind: Kind::Ext4, label: None, over_data: false, deadline: LONG };
    for _ in 0..2 {
        lab.wait(contents(&lab.guest, &device)).unwrap_err();
        let error = lab.format(&device, &wanted).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. } | Error::Program(_)), "{error:?}");
    }
    run("echo 0 > /sys/bus/pseudo/drivers/scsi_debug/opts");
    assert!(lab.format(&device, &wanted).unwrap().made);
}

#[test]
fn fat_is_made_checked_mounted_and_let_go_of() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 64);
    let wanted =
        Format { identity: "x", kind: Kind::Vfat, label: Some("MINE"), over_data: false, deadline: LONG };
    assert!(lab.format(&disk.device, &wanted).unwrap().made);
    assert!(run(&format!("blkid -p {}", disk.name())).contains("LABEL=\"MINE\""));
    let place = lab.folder("place");
    let held = lab.hold(&disk.device).unwrap();
    let at = Mount {
        source: Source::Device(&held),
        target: &place,
        kind: Some("vfat"),
        options: &["uid=7".to_owned()],
        read_only: false,
        make_target: false,
        over_contents: false,
        propagation: None,
        check: true,
        deadline: LONG,
    };
    for already in [false, true] {
        assert_eq!(lab.wait(mount(&lab.guest, &at)).unwrap().already, already);
    }
    std::fs::write(place.join("file"), "kept").unwrap();
    assert_eq!(run(&format!("stat -c %u {}/file", place.display())), "7");
    assert_eq!(lab.wait(unmount(&lab.guest, &place, LONG)).unwrap(), 1);
    lab.wait(mount(&lab.guest, &at)).unwrap();
    assert_eq!(std::fs::read(place.join("file")).unwrap(), b"kept");
    assert_eq!(lab.wait(unmount(&lab.guest, &place, LONG)).unwrap(), 1);
    drop(held);
    assert!(!lab.format(&disk.device, &wanted).is_ok_and(|formatted| formatted.made));
}

#[test]
fn swap_spaces_are_used_and_let_go_of() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 64);
    lab.wait(swap::on(&lab.guest, &lab.hold(&disk.device).unwrap())).unwrap_err();
    run(&format!("mkswap {}", disk.name()));
    assert!(!lab.wait(swap::on(&lab.guest, &lab.hold(&disk.device).unwrap())).unwrap());
    assert!(lab.wait(swap::on(&lab.guest, &lab.hold(&disk.device).unwrap())).unwrap());
    assert!(std::fs::read_to_string("/proc/swaps").unwrap().contains(disk.name()));
    let wanted = Format { identity: "x", kind: Kind::Swap, label: None, over_data: false, deadline: LONG };
    assert!(matches!(lab.format(&disk.device, &wanted), Err(Error::Claimed { .. })));
    assert!(lab.wait(swap::off(&lab.guest, &lab.hold(&disk.device).unwrap(), LONG)).unwrap());
    assert!(!lab.wait(swap::off(&lab.guest, &lab.hold(&disk.device).unwrap(), LONG)).unwrap());
}
