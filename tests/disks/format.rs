//! File systems are made on blank disks, and on what an interrupted run left, and nowhere else.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use guestlet::guest::volumes::Error;
use guestlet::guest::volumes::contents::{Contents, contents};
use guestlet::guest::volumes::format::{Format, Formatted, Kind, format};
use guestlet::guest::volumes::held::Held;

use crate::lab::{Disk, Lab, enter, notes, run};

fn wanted(kind: Kind) -> Format<'static> {
    let deadline = Duration::from_secs(120);
    Format { identity: "disk 1/ä", kind, label: None, over_data: false, deadline }
}

fn make(lab: &Lab, disk: &Disk, kind: Kind) -> Result<Formatted, Error> {
    lab.format(&disk.device, &wanted(kind))
}

fn refused(lab: &Lab, disk: &Disk, kind: Kind) -> String {
    let before = disk.sum();
    let error = make(lab, disk, kind).unwrap_err();
    assert_eq!(disk.sum(), before, "{error}");
    error.to_string()
}

/// In MiB: what its mkfs asks for.
fn size(kind: Kind) -> u64 {
    match kind {
        Kind::Xfs => 320,
        Kind::Btrfs => 128,
        _ => 16,
    }
}

#[test]
fn each_kind_is_made_once_and_then_left() {
    let Some(lab) = enter() else { return };
    for kind in Kind::ALL {
        let disk = lab.disk(kind.name(), size(kind));
        assert_eq!(lab.wait(contents(&lab.guest, &disk.device)).unwrap(), Contents::Blank);
        let labelled = Format { label: Some("DATA 1"), ..wanted(kind) };
        let made = lab.format(&disk.device, &labelled).unwrap();
        assert!(made.made, "{kind:?}");
        assert_eq!(disk.blkid("TYPE"), kind.name());
        assert_eq!(Some(disk.blkid("UUID")), made.uuid);
        assert_eq!(disk.blkid("LABEL"), "DATA 1");
        assert_eq!(notes(), 0);
        let before = disk.sum();
        assert_eq!(make(&lab, &disk, kind).unwrap(), Formatted { uuid: made.uuid, made: false });
        assert_eq!(disk.sum(), before);
        let other = if kind == Kind::Ext4 { Kind::Xfs } else { Kind::Ext4 };
        let error = refused(&lab, &disk, other);
        assert!(error.ends_with(&format!("is not blank: it holds {}", kind.name())), "{error}");
    }
    assert_eq!(notes(), 0);
}

#[test]
fn whatever_is_on_a_disk_stays() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 320);
    let end = 320 << 20;
    let mut lvm = b"LABELONE\x01\0\0\0\0\0\0\0".to_vec();
    lvm.resize(512, 0);
    for (name, at, bytes) in [
        ("LUKS", 0, b"LUKS\xba\xbe\0\x01".as_slice()),
        ("LVM", 512, lvm.as_slice()),
        ("RAID", end - 65536, &[0xfc, 0x4e, 0x2b, 0xa9]),
        ("a table", 446, b"\0\0\0\0\x83\0\0\0\0\x08\0\0\0\x08\0\0"),
        ("data", 700_000, b"x"),
        ("data at the end", end - 1, b"x"),
    ] {
        disk.put(at, bytes);
        if name == "a table" {
            disk.put(510, &[0x55, 0xaa]);
        }
        for kind in [Kind::Ext4, Kind::Xfs] {
            let error = refused(&lab, &disk, kind);
            assert!(error.contains("is not blank"), "{name}: {error}");
        }
        disk.clear();
    }
    // A file system whose beginning is gone is damaged, not missing.
    make(&lab, &disk, Kind::Ext4).unwrap();
    disk.put(0, &[0; 4096]);
    let error = refused(&lab, &disk, Kind::Ext4);
    assert!(error.contains("data of an unknown kind (at byte "), "{error}");
    // Unless the disk is known to be new.
    let over = Format { over_data: true, ..wanted(Kind::Ext4) };
    assert!(lab.format(&disk.device, &over).unwrap().made);
    // And a disk that is used is not touched at all.
    let place = lab.folder("mounted");
    disk.clear();
    run(&format!("mkfs.ext4 -q {0}; mount {0} {1}", disk.name(), place.display()));
    assert!(matches!(make(&lab, &disk, Kind::Ext4), Err(Error::Claimed { .. })));
    run(&format!("umount {}", place.display()));
    assert_eq!(notes(), 0);
}

#[test]
fn what_has_lost_its_header_is_not_blank() {
    let Some(lab) = enter() else { return };
    // How a disk came to be as it is, where $D is the device.
    for (what, mebibytes, script) in [
        ("a partition whose table is lost", 512, "mkfs.ext4 -q -E offset=1048576 $D 400m"),
        (
            "btrfs of which a mirror is left",
            256,
            "mkfs.btrfs -q $D; sync; dd if=$D of=$S bs=4k skip=16384 count=1; blkdiscard -f $D
             dd if=$S of=$D bs=4k seek=16384 count=1",
        ),
        ("ext4 without its first MiB", 512, "mkfs.ext4 -q $D; sync; dd if=/dev/zero of=$D bs=1M count=1"),
        (
            "ext4 of which one copy of its superblock is left",
            512,
            "mkfs.ext4 -q -b 4096 $D; sync; dd if=$D of=$S bs=4k skip=98304 count=1; blkdiscard -f $D
             dd if=$S of=$D bs=4k seek=98304 count=1",
        ),
        (
            "XFS of which one copy of its superblock is left",
            512,
            "mkfs.xfs -q $D; sync; dd if=$D of=$S bs=4k skip=98304 count=1; blkdiscard -f $D
             dd if=$S of=$D bs=4k seek=98304 count=1",
        ),
        (
            "100 MiB of data",
            512,
            "head -c 100M /dev/zero | tr '\\0' x | dd of=$D bs=1M seek=2 iflag=fullblock",
        ),
        (
            "100 MiB of data further on",
            16384,
            "head -c 100M /dev/zero | tr '\\0' x | dd of=$D bs=1M seek=9001",
        ),
        ("one byte", 512, "printf x | dd of=$D bs=1M seek=1"),
    ] {
        let disk = lab.disk("disk", mebibytes);
        let scratch = lab.path("scratch");
        run(&format!(
            "D={} S={}\n{{ {script}; sync; }} > /dev/null 2>&1\nblockdev --flushbufs $D",
            disk.name(),
            scratch.display()
        ));
        for kind in [Kind::Ext4, Kind::Xfs] {
            let error = refused(&lab, &disk, kind);
            assert!(error.contains("data of an unknown kind (at byte "), "{what}: {error}");
        }
    }
    // A large one that is blank is soon known to be.
    let disk = lab.disk("large", 4 << 20);
    assert_eq!(lab.wait(contents(&lab.guest, &disk.device)).unwrap(), Contents::Blank);
    assert_eq!(notes(), 0);
}

#[test]
fn a_disk_that_cannot_be_read_or_written_is_not_taken_for_a_blank_one() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 64);
    // Reading behind the end of its file fails.
    std::fs::File::options().write(true).open(&disk.file).unwrap().set_len(0).unwrap();
    let error = make(&lab, &disk, Kind::Ext4).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. } | Error::Program(_)), "{error:?}");
    assert_eq!(disk.file.metadata().unwrap().len(), 0);

    let fixed = lab.path("fixed");
    std::fs::File::create(&fixed).unwrap().set_len(64 << 20).unwrap();
    let fixed = Disk::of(fixed, "--read-only");
    assert!(matches!(make(&lab, &fixed, Kind::Ext4), Err(Error::ReadOnly { .. })));
    let no_device = lab.path("disk");
    let error = lab.format(&no_device, &wanted(Kind::Ext4)).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. }), "{error:?}");
    let missing = lab.format(Path::new("/dev/no-such"), &wanted(Kind::Ext4)).unwrap_err();
    assert!(matches!(missing, Error::Unreadable { .. }), "{missing:?}");

    // Who cannot look does not know.
    let blank = lab.disk("blank", 64);
    let script = lab.replace("blkid", "echo nothing was found >&2; exit 2");
    assert!(matches!(make(&lab, &blank, Kind::Ext4), Err(Error::Program(_))));
    drop(script);
    run("mount -t tmpfs none /usr/sbin");
    let error = make(&lab, &blank, Kind::Ext4).unwrap_err().to_string();
    assert_eq!(error, "blkid is not installed in this guest");
    nix::mount::umount("/usr/sbin").unwrap();
    // Nothing is begun without the program for it, and so nothing is noted.
    run(&format!(
        "cp /usr/sbin/blkid {0}; mount -t tmpfs none /usr/sbin; cp {0} /usr/sbin/blkid",
        lab.path("blkid").display()
    ));
    let error = make(&lab, &blank, Kind::Ext4).unwrap_err().to_string();
    assert_eq!(error, "mkfs.ext4 is not installed in this guest");
    nix::mount::umount("/usr/sbin").unwrap();
    assert_eq!(notes(), 0);

    // Somebody else is at it.
    let holder = std::fs::File::open(&blank.device).unwrap();
    holder.lock().unwrap();
    assert!(matches!(make(&lab, &blank, Kind::Ext4), Err(Error::Locked { .. })));
    drop(holder);
    assert!(make(&lab, &blank, Kind::Ext4).unwrap().made);
}

/// mkfs on a copy, whose first bytes, or all but those, come to the disk before it is killed.
const KILLED: &str = "for last; do :; done
size=$(blockdev --getsize64 $last); scratch=$0.disk; rm -f $scratch; truncate -s $size $scratch
while [ $# -gt 1 ]; do set -- \"$@\" \"$1\"; shift; [ \"$1\" = $last ] && break; done; shift
$REAL \"$@\" $scratch || exit
dd if=$scratch of=$last bs=16k conv=notrunc,sparse,fsync status=none skip=SKIP seek=SKIP count=COUNT
kill -9 $$";

#[test]
fn what_was_interrupted_is_taken_up_and_nothing_else_is() {
    let Some(lab) = enter() else { return };
    for (kind, program) in [
        (Kind::Ext4, "mkfs.ext4"),
        (Kind::Xfs, "mkfs.xfs"),
        (Kind::Btrfs, "mkfs.btrfs"),
        (Kind::Swap, "mkswap"),
    ] {
        let pieces = size(kind) * 64;
        let disk = lab.disk(&format!("killed-{}", kind.name()), size(kind));
        for (skip, count) in [(0, 0), (0, 1), (0, 40), (0, pieces), (1, pieces)] {
            disk.clear();
            run(&format!("truncate -s 0 {0}; truncate -s {1}M {0}", disk.file.display(), size(kind)));
            run(&format!("blockdev --flushbufs {}", disk.name()));
            let script = KILLED.replace("SKIP", &skip.to_string()).replace("COUNT", &count.to_string());
            let script = lab.replace(program, &script);
            let error = make(&lab, &disk, kind).unwrap_err().to_string();
            assert!(error.contains("failed (signal: 9 (SIGKILL))"), "{error}");
            assert_eq!(notes(), 1);
            // Again: killed in the same way, and still nothing is lost. Of swap space this is all there is.
            if count == 40 && kind != Kind::Swap {
                make(&lab, &disk, kind).unwrap_err();
            }
            drop(script);
            // Another disk with the same contents has no note.
            let other = Format { identity: "another", ..wanted(kind) };
            let before = disk.sum();
            let left = lab.wait(contents(&lab.guest, &disk.device)).unwrap();
            if matches!(left, Contents::Unknown { .. }) {
                lab.format(&disk.device, &other).unwrap_err();
                assert_eq!(disk.sum(), before);
            }
            let made = make(&lab, &disk, kind)
                .unwrap_or_else(|error| panic!("{kind:?} {skip} {count} {left:?}: {error}"));
            assert_eq!(Some(disk.blkid("UUID")), made.uuid, "{kind:?} {skip} {count}");
            assert_eq!(disk.blkid("TYPE"), kind.name());
            assert_eq!(notes(), 0);
            match kind {
                Kind::Ext4 => drop(run(&format!("e2fsck -fn {}", disk.name()))),
                Kind::Xfs => drop(run(&format!("xfs_repair -n {} 2>&1", disk.name()))),
                Kind::Btrfs => drop(run(&format!("btrfs check {} 2>&1", disk.name()))),
                _ => {}
            }
        }
    }
    // Somebody put something else there in between.
    let disk = lab.disk("other", size(Kind::Xfs));
    let script = lab.replace("mkfs.ext4", "kill -9 $$");
    make(&lab, &disk, Kind::Ext4).unwrap_err();
    drop(script);
    run(&format!("mkfs.xfs -q {}", disk.name()));
    let error = refused(&lab, &disk, Kind::Ext4);
    assert!(error.contains("it holds xfs"), "{error}");
    // From then on it is not the note's disk any more.
    assert_eq!(notes(), 0);
}

#[test]
fn a_program_that_outlives_the_agent_keeps_others_away() {
    let Some(lab) = enter() else { return };
    let disk = lab.disk("disk", 64);
    let gate = lab.path("gate");
    run(&format!("mkfifo {}", gate.display()));
    let script = format!("read go < {} && exec $REAL \"$@\"", gate.display());
    let script = lab.replace("mkfs.ext4", &script);
    // SAFETY: the child only runs the agent's code until it is killed.
    let child = match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let work = async {
                let held = Held::called(&lab.guest, &disk.device, "it is formatted").await.unwrap();
                format(&lab.guest, &held, &wanted(Kind::Ext4)).await
            };
            let _ = runtime.block_on(work);
            std::process::exit(1);
        }
        nix::unistd::ForkResult::Parent { child } => child,
    };
    // It is at it as soon as somebody reads there.
    let mut gate = std::fs::File::options().write(true).open(gate).unwrap();
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
    nix::sys::wait::waitpid(child, None).unwrap();
    let error = make(&lab, &disk, Kind::Ext4).unwrap_err().to_string();
    assert!(error.ends_with("is busy: a program that was started earlier is still working on it"), "{error}");
    // And when that is done, it is done.
    gate.write_all(b"go\n").unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let done = loop {
        match make(&lab, &disk, Kind::Ext4) {
            Err(Error::Busy { .. }) => assert!(std::time::Instant::now() < deadline),
            done => break done.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(done, Formatted { uuid: Some(disk.blkid("UUID")), made: false });
    drop(script);
}
