//! What goes wrong in between: disks that are late, gone or broken, calls at the same time, and ends in the middle.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::time::{Duration, Instant};

use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::disk::{Disk, Machine};
use crate::kubelet::{Volume, block, mount, with_group, with_mode};
use crate::lab::{Lab, is_outside, run, serves, until, wait};
use crate::volumes::{is, mounted, options};

/// Puts a script into the place of a program, where `$REAL` is what was there.
fn replace(lab: &Lab, program: &str, script: &str) {
    let program = run(&format!("readlink -f $(command -v {program})"));
    let name = program.rsplit('/').next().unwrap();
    let (real, path) = (lab.path(&format!("real-{name}")), lab.path(&format!("script-{name}")));
    std::fs::copy(&program, &real).unwrap();
    let (real, path) = (real.display(), path.display());
    std::fs::write(path.to_string(), format!("#!/bin/sh\nREAL={real}\n{script}\n")).unwrap();
    run(&format!("chmod 755 {path}; mount --bind {path} {program}"));
}

#[test]
fn a_disk_is_waited_for_and_looked_for() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let late = machine.disk("late", 64);
        let volume = Volume::new(&lab, "pvc-late", &late.serial);
        let staging = volume.clone();
        let staged = tokio::spawn(async move { staging.stage(&mount("", &[])).await });
        tokio::task::yield_now().await;
        late.plug();
        staged.await.unwrap().unwrap();
        volume.unstage().await.unwrap();

        // Attached by who does not say by what it is known: by the volume's name, on any bus.
        let named = machine.disk("pvc-0a1b2c3d", 64);
        let volume = Volume::new(&lab, "pvc-0a1b2c3d", "");
        let staging = volume.clone();
        let staged = tokio::spawn(async move { staging.stage(&mount("", &[])).await });
        // Before it is given up the SCSI buses are looked at.
        let scan = || std::fs::read_to_string("/sys/class/scsi_host/host0/scan").unwrap();
        until("the bus is looked at", || scan() == "- - -");
        named.plug();
        staged.await.unwrap().unwrap();
        assert!(options(&volume.staging).starts_with("ext4"));
        let twin = machine.plugged("pvc-0a1b2c3d", 64);
        until("both are seen", || lab.disks().contains(&twin.name));
        is(volume.stage(&mount("", &[])).await, Code::FailedPrecondition, "any of several disks");
        volume.unstage().await.unwrap();
    });
}

#[test]
fn a_disk_that_is_only_called_alike_is_taken_last_and_never_formatted() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let blank = machine.plugged("copy-of-pvc-0blank", 64);
        let full = machine.plugged("old-pvc-0full-b", 64);
        let alike = machine.plugged("not-pvc-0late-b", 64);
        let cut = machine.plugged(&"pvc-0a1b2c3d-1111-22"[..20], 64);
        run(&format!("mkfs.ext4 -q {}", full.device()));
        until("all are seen", || lab.disks().contains(&cut.name));
        let read = |disk: &Disk| std::fs::read(&disk.file).unwrap();
        let before = [&blank, &alike, &cut].map(read);
        let begun = Instant::now();
        let staged = ["pvc-0blank", "pvc-0full", "pvc-0late", "pvc-0a1b2c3d-1111-2222"].map(|id| {
            let volume = Volume::new(&lab, id, "");
            tokio::spawn(async move { (volume.stage(&mount("", &[])).await, begun.elapsed(), volume) })
        });
        // The one that is meant comes in the middle of the wait.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let late = machine.plugged("pvc-0late", 64);
        let [on_blank, on_full, on_late, on_cut] = staged;
        let (staged, after, volume) = on_late.await.unwrap();
        staged.unwrap();
        assert!(after.as_secs() < 20, "{after:?}");
        assert!(run(&format!("findmnt -n -o SOURCE {}", volume.staging.display())).ends_with(&late.name));
        volume.unstage().await.unwrap();
        for refused in [on_blank, on_cut] {
            let (staged, after, _) = refused.await.unwrap();
            is(staged, Code::FailedPrecondition, "and so is not formatted");
            assert!(after.as_secs() >= 29, "{after:?}");
        }
        let (staged, after, volume) = on_full.await.unwrap();
        staged.unwrap();
        assert!(after.as_secs() >= 29, "{after:?}");
        volume.unstage().await.unwrap();
        assert!([&blank, &alike, &cut].map(read) == before);
    });
}

#[test]
fn a_disk_that_is_on_its_way_out_is_not_taken_for_the_one_that_comes() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let old = machine.plugged("same", 64);
        let volume = Volume::new(&lab, "pvc-same", &old.serial);
        until("it is seen", || lab.disks().contains(&old.name));
        // Its name is there, and nothing behind it.
        let dead = lab.path("dead").display().to_string();
        run(&format!("mknod {dead} b 240 77; mount --bind {dead} {}", old.device()));
        is(volume.stage(&mount("", &[])).await, Code::Internal, "No such device");
        let staging = volume.clone();
        let staged = tokio::spawn(async move { staging.stage(&mount("", &[])).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        old.unplug();
        let mut new = machine.disk("new", 64);
        new.serial.clone_from(&old.serial);
        new.plug();
        staged.await.unwrap().unwrap();
        assert!(options(&volume.staging).starts_with("ext4"));
        volume.unstage().await.unwrap();
        run(&format!("umount {}", old.device()));
    });
}

#[test]
fn a_disk_that_took_the_name_of_another_is_not_written_to() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("first", 64);
        let volume = Volume::new(&lab, "pvc-first", &disk.serial);
        until("it is seen", || lab.disks().contains(&disk.name));
        let other = lab.path("other");
        std::fs::File::create(&other).unwrap().set_len(64 << 20).unwrap();
        disk.change_to(&other, "second");
        for access in [mount("ext4", &[]), block()] {
            is(volume.stage(&access).await, Code::Unavailable, "is not the expected disk");
        }
        // Nothing has been written anywhere.
        assert_eq!(std::fs::metadata(&other).unwrap().blocks(), 0);
        assert_eq!(std::fs::metadata(&disk.file).unwrap().blocks(), 0);
        // Who asks for the one that is there gets it, as soon as the kernel has said so.
        disk.unplug();
        disk.plug();
        volume.stage(&mount("ext4", &[])).await.unwrap();
        volume.unstage().await.unwrap();
    });
}

#[test]
fn what_is_left_of_a_disk_that_is_gone_is_taken_away() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        for access in [mount("xfs", &[]), block()] {
            let is_block = access == block();
            let disk = machine.plugged(&format!("gone-{is_block}"), 320);
            let volume = Volume::new(&lab, &format!("pvc-{is_block}"), &disk.serial);
            let pod = volume.target(&lab, "pod");
            volume.stage(&access).await.unwrap();
            volume.publish(&pod, &access, false).await.unwrap();
            let open = (!is_block).then(|| std::fs::File::create(pod.join("open")).unwrap());
            disk.unplug();
            until("that it is gone is told", || !lab.disks().contains(&disk.name));
            let condition = volume.stats(&pod).await.unwrap().volume_condition.unwrap();
            assert!(condition.abnormal && condition.message == "the disk was removed", "{condition:?}");
            is(volume.expand(&pod, 0, 0).await, Code::FailedPrecondition, "was removed");
            is(volume.publish(&pod, &access, false).await, Code::FailedPrecondition, "was removed");
            // It comes back while what is left of it is still there: the pod's part stays as dead as it is.
            if is_block {
                volume.unpublish(&pod).await.unwrap();
            } else {
                // Although somebody still has a file of it open.
                volume.unpublish(&pod).await.unwrap();
                drop(open);
            }
            for _ in 0..2 {
                volume.unstage().await.unwrap();
                volume.unpublish(&pod).await.unwrap();
            }
            assert_eq!((mounted(&pod), mounted(&volume.staging)), (0, 0));
            assert!(!pod.exists());
            disk.plug();
            volume.stage(&access).await.unwrap();
            volume.publish(&pod, &access, false).await.unwrap();
            assert!(!volume.stats(&pod).await.unwrap().volume_condition.unwrap().abnormal);
            volume.unpublish(&pod).await.unwrap();
            volume.unstage().await.unwrap();
        }
    });
}

/// A SCSI address that is taken again at once: the kernel may see the end of the disk before after the new one has come,
/// takes that away, finds it again, and it has another number. kubelet stages once, and repeats only the publish.
#[test]
fn a_disk_that_left_after_it_was_staged_and_is_back_is_published() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let mut lab = Lab::new().await;
        for access in [mount("ext4", &["nosuid"]), block()] {
            let is_block = access == block();
            let mut disk = machine.plugged(&format!("back-{is_block}"), 64);
            let volume = Volume::new(&lab, &format!("pvc-{is_block}"), &disk.serial);
            let (early, pod) = (volume.target(&lab, "early"), volume.target(&lab, "pod"));
            volume.stage(&access).await.unwrap();
            if is_block {
                std::fs::write(disk.device(), "kept").unwrap();
            } else {
                std::fs::write(volume.staging.join("data"), "kept").unwrap();
                run(&format!("sync -f {}", volume.staging.display()));
            }
            volume.publish(&early, &access, false).await.unwrap();
            disk = machine.under_another_number(disk);
            until("that it is back is told", || lab.disks().contains(&disk.name));
            volume.publish(&pod, &access, false).await.unwrap();
            // As does the pod that had it before, when kubelet repeats its publish.
            volume.publish(&early, &access, false).await.unwrap();
            for place in [&pod, &early] {
                let condition = volume.stats(place).await.unwrap().volume_condition.unwrap();
                assert!(!condition.abnormal, "{condition:?}");
                let data = if is_block {
                    run(&format!("head -c 4 {}", place.display()))
                } else {
                    assert!(options(place).contains("nosuid"), "{}", options(place));
                    std::fs::read_to_string(place.join("data")).unwrap()
                };
                assert_eq!(data, "kept");
            }
            for place in [&pod, &early] {
                volume.unpublish(place).await.unwrap();
            }
            volume.unstage().await.unwrap();
            assert_eq!((mounted(&pod), mounted(&early), mounted(&volume.staging)), (0, 0, 0));
        }

        // What comes back blank is not what was staged, and is not formatted.
        let disk = machine.plugged("blank", 64);
        let (volume, access) = (Volume::new(&lab, "pvc-blank", &disk.serial), mount("", &[]));
        let pod = volume.target(&lab, "pod");
        volume.stage(&access).await.unwrap();
        disk.unplug();
        until("that it is gone is told", || !lab.disks().contains(&disk.name));
        let mut other = machine.disk("other", 64);
        other.serial.clone_from(&disk.serial);
        other.plug();
        until("the other one is told", || lab.disks().contains(&other.name));
        is(volume.publish(&pod, &access, false).await, Code::FailedPrecondition, "it holds nothing");
        let blank = std::fs::read(&other.file).unwrap();
        assert!(blank.iter().all(|byte| *byte == 0), "it was written to");
        // The one that is meant comes after all, to where nothing is mounted any more, and to another run of the agent.
        other.unplug();
        lab.kill();
        lab.start();
        until("it serves again", || serves(&lab.socket()));
        disk.plug();
        until("it is told again", || lab.disks().contains(&disk.name));
        volume.publish(&pod, &access, false).await.unwrap();
        volume.unpublish(&pod).await.unwrap();
        volume.unstage().await.unwrap();
        is(volume.publish(&pod, &access, false).await, Code::FailedPrecondition, "not staged");
    });
}

#[test]
fn whatever_a_crash_has_left_is_completed() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let mut lab = Lab::new().await;
        let disk = machine.plugged("left", 64);
        let volume = Volume::new(&lab, "pvc-left", &disk.serial);
        let (pod, wanted) = (volume.target(&lab, "pod"), mount("", &[]));
        // Ended between one step and the next: a folder or file that nothing is mounted on.
        std::fs::create_dir(&pod).unwrap();
        volume.stage(&wanted).await.unwrap();
        lab.kill();
        lab.start();
        until("it serves again", || serves(&lab.socket()));
        volume.stage(&wanted).await.unwrap();
        volume.publish(&pod, &wanted, false).await.unwrap();
        // Mounted more than once.
        let at = pod.display();
        run(&format!("mount --bind {at} {at}; mount --bind {} {at}", volume.staging.display()));
        assert_eq!(mounted(&pod), 3);
        volume.publish(&pod, &wanted, false).await.unwrap();
        volume.unpublish(&pod).await.unwrap();
        assert_eq!(mounted(&pod), 0);
        // The mount is gone, the folder is not.
        std::fs::create_dir(&pod).unwrap();
        volume.unpublish(&pod).await.unwrap();
        assert!(!pod.exists());
        // What somebody has put there is not removed, and keeps nothing from going on.
        std::fs::create_dir(&pod).unwrap();
        std::fs::write(pod.join("file"), "kept").unwrap();
        volume.publish(&pod, &wanted, false).await.unwrap();
        volume.unpublish(&pod).await.unwrap();
        assert_eq!(std::fs::read(pod.join("file")).unwrap(), b"kept");
        volume.unstage().await.unwrap();

        // Killed while it formats: the program lives on, and is not disturbed. Then what it has begun is completed.
        let second = machine.plugged("second", 64);
        let volume = Volume::new(&lab, "pvc-second", &second.serial);
        let gate = lab.path("gate").display().to_string();
        replace(
            &lab,
            "mkfs.ext4",
            &format!(
                "echo run >> {gate}.runs\nwhile [ ! -e {gate} ]; do sleep 0.02; done\nexec $REAL \"$@\""
            ),
        );
        let staging = volume.clone();
        let first = tokio::spawn(async move { staging.stage(&mount("", &[])).await });
        until("it is being formatted", || std::path::Path::new(&format!("{gate}.runs")).exists());
        lab.kill();
        first.await.unwrap().unwrap_err();
        lab.start();
        until("it serves again", || serves(&lab.socket()));
        let busy = volume.stage(&mount("", &[])).await.unwrap_err();
        assert!(matches!(busy.code(), Code::Aborted | Code::FailedPrecondition), "{busy}");
        std::fs::write(&gate, "").unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while let Err(error) = volume.stage(&mount("", &[])).await {
            assert!(Instant::now() < end, "{error}");
        }
        volume.unstage().await.unwrap();
    });
}

#[test]
fn one_thing_at_a_time_is_done_to_a_volume_and_to_its_end() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let (slow, fast) = (machine.plugged("slow", 64), machine.plugged("fast", 320));
        let volume = Volume::new(&lab, "pvc-slow", &slow.serial);
        let gate = lab.path("gate").display().to_string();
        replace(
            &lab,
            "mkfs.ext4",
            &format!(
                "echo run >> {gate}.runs\nwhile [ ! -e {gate} ]; do sleep 0.02; done\nexec $REAL \"$@\""
            ),
        );
        let staging = volume.clone();
        let first = tokio::spawn(async move { staging.stage(&mount("", &[])).await });
        until("it is being formatted", || std::path::Path::new(&format!("{gate}.runs")).exists());
        // Whoever asked hangs up.
        first.abort();
        for _ in 0..3 {
            is(volume.stage(&mount("", &[])).await, Code::Aborted, "it is being staged");
            is(volume.unstage().await, Code::Aborted, "it is being staged");
        }
        let other = Volume::new(&lab, "pvc-fast", &fast.serial);
        other.stage(&mount("xfs", &[])).await.unwrap();
        other.unstage().await.unwrap();
        std::fs::write(&gate, "").unwrap();
        until("it is staged", || mounted(&volume.staging) == 1);
        let end = Instant::now() + Duration::from_secs(30);
        while let Err(error) = volume.stage(&mount("", &[])).await {
            assert!(error.code() == Code::Aborted && Instant::now() < end, "{error}");
        }
        assert_eq!(std::fs::read_to_string(format!("{gate}.runs")).unwrap().lines().count(), 1);
        volume.unstage().await.unwrap();
    });
}

#[test]
fn groups_readers_and_file_systems_that_are_too_small_or_broken() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        // A pod's group has all of it, whoever had it before.
        let disk = machine.plugged("group", 320);
        let volume = Volume::new(&lab, "pvc-group", &disk.serial);
        let pod = volume.target(&lab, "pod");
        for group in [4711, 4712] {
            let wanted = with_group("xfs", &[], &group.to_string());
            volume.stage(&wanted).await.unwrap();
            volume.publish(&pod, &wanted, false).await.unwrap();
            let top = std::fs::metadata(&pod).unwrap();
            assert_eq!((top.gid(), top.mode() & 0o7070), (group, 0o2070));
            std::fs::write(pod.join(group.to_string()), "x").unwrap();
            assert_eq!(std::fs::metadata(pod.join("4711")).unwrap().gid(), group);
            volume.unpublish(&pod).await.unwrap();
            volume.unstage().await.unwrap();
        }
        // Nobody writes.
        let reader = with_mode(mount("", &[]), Mode::SingleNodeReaderOnly);
        volume.stage(&reader).await.unwrap();
        volume.publish(&pod, &reader, false).await.unwrap();
        std::fs::write(pod.join("new"), "x").unwrap_err();
        assert!(!volume.stats(&pod).await.unwrap().volume_condition.unwrap().abnormal);
        is(volume.expand(&pod, 0, 0).await, Code::FailedPrecondition, "is read-only");
        is(volume.stage(&mount("", &[])).await, Code::AlreadyExists, "something else mounted");
        volume.unpublish(&pod).await.unwrap();
        volume.unstage().await.unwrap();
        let blank = machine.plugged("blank", 64);
        let empty = Volume::new(&lab, "pvc-blank", &blank.serial);
        is(empty.stage(&reader).await, Code::FailedPrecondition, "it holds nothing");

        // Restored to a larger disk: it takes the room when it is staged.
        disk.resize(640);
        let wanted = mount("", &[]);
        volume.stage(&wanted).await.unwrap();
        assert!(volume.stats(&volume.staging).await.unwrap().usage[0].total > 500 << 20);
        // It meets an error.
        volume.publish(&pod, &wanted, false).await.unwrap();
        run(&format!("xfs_io -x -c shutdown {}", volume.staging.display()));
        let condition = volume.stats(&pod).await.unwrap().volume_condition.unwrap();
        assert!(condition.abnormal, "{condition:?}");
        assert!(condition.message.contains("file system"), "{condition:?}");
        volume.unpublish(&pod).await.unwrap();
        volume.unstage().await.unwrap();
        volume.stage(&wanted).await.unwrap();
        assert!(!volume.stats(&volume.staging).await.unwrap().volume_condition.unwrap().abnormal);
        volume.unstage().await.unwrap();
        // One that has become read-only.
        empty.stage(&wanted).await.unwrap();
        run(&format!(
            "echo 1 > /sys/fs/ext4/{}/trigger_fs_error; mount -o remount,abort {} 2> /dev/null || true",
            blank.name,
            empty.staging.display()
        ));
        let condition = empty.stats(&empty.staging).await.unwrap().volume_condition.unwrap();
        assert!(condition.abnormal, "{condition:?}");
        empty.unstage().await.unwrap();
        empty.stage(&wanted).await.unwrap();
        let condition = empty.stats(&empty.staging).await.unwrap().volume_condition.unwrap();
        assert!(!condition.abnormal, "{condition:?}");
        empty.unstage().await.unwrap();
    });
}

#[test]
fn links_lead_nowhere_outside() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("link", 64);
        let volume = Volume::new(&lab, "pvc-link", &disk.serial);
        volume.stage(&mount("", &[])).await.unwrap();
        let outside = lab.path("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::File::create(outside.join("file")).unwrap().write_all(b"").unwrap();
        symlink(&outside, lab.root().join("out")).unwrap();
        for path in [lab.root().join("out/file"), lab.root().join("out/new"), lab.root().join("out")] {
            for code in [
                volume.publish(&path, &mount("", &[]), false).await.unwrap_err().code(),
                volume.unpublish(&path).await.unwrap_err().code(),
            ] {
                assert_eq!(code, Code::InvalidArgument, "{}", path.display());
            }
            // No volume is there.
            for code in [
                volume.stats(&path).await.unwrap_err().code(),
                volume.expand(&path, 0, 0).await.unwrap_err().code(),
            ] {
                assert_eq!(code, Code::NotFound, "{}", path.display());
            }
        }
        assert!(outside.join("file").exists() && !outside.join("new").exists());
        volume.unstage().await.unwrap();
    });
}
