//! A volume's way from a disk to a pod and back, as kubelet asks for it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use guestlet::wire::proto::csi;
use tonic::{Code, Status};

use crate::disk::Machine;
use crate::kubelet::{Volume, block, mount, node};
use crate::lab::{Lab, ext4_grows, is_outside, run, wait};

pub fn is(answer: Result<impl std::fmt::Debug, Status>, code: Code, words: &str) {
    let status = answer.expect_err("it was done");
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(words), "{status}");
}

/// How many mounts there are at a place.
pub fn mounted(path: &Path) -> usize {
    let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    list.lines().filter(|line| line.split(' ').nth(4) == path.to_str()).count()
}

pub fn options(path: &Path) -> String {
    run(&format!("findmnt -n -o FSTYPE,OPTIONS {}", path.display()))
}

#[test]
fn a_file_system_is_made_mounted_shown_grown_and_taken_away() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        for (kind, size) in [("", 64), ("xfs", 320), ("btrfs", 256)] {
            let disk = machine.plugged(&format!("serial-{kind}"), size);
            let volume = Volume::new(&lab, &format!("pvc-{kind}-1"), &disk.serial);
            let wanted = mount(kind, &["noatime"]);
            for _ in 0..2 {
                volume.stage(&wanted).await.unwrap();
            }
            assert_eq!(mounted(&volume.staging), 1);
            let found = options(&volume.staging);
            assert!(found.starts_with(if kind.is_empty() { "ext4" } else { kind }), "{found}");
            assert!(found.contains("noatime"), "{found}");
            let (pod, other) = (volume.target(&lab, "pod-1"), volume.target(&lab, "pod-2"));
            for _ in 0..2 {
                volume.publish(&pod, &wanted, false).await.unwrap();
                volume.publish(&other, &wanted, true).await.unwrap();
            }
            assert_eq!((mounted(&pod), mounted(&other)), (1, 1));
            std::fs::write(pod.join("file"), "kept").unwrap();
            assert_eq!(std::fs::read(other.join("file")).unwrap(), b"kept");
            assert!(std::fs::write(other.join("file"), "x").is_err());

            // How full it is, before and after it has grown under the pod.
            let stats = volume.stats(&pod).await.unwrap();
            let condition = stats.volume_condition.unwrap();
            assert!(!condition.abnormal, "{condition:?}");
            let (bytes, inodes) = (&stats.usage[0], stats.usage.get(1));
            assert!(bytes.total > 0 && bytes.used > 0 && bytes.available > 0, "{bytes:?}");
            assert_eq!(inodes.is_none(), kind == "btrfs");
            if kind.is_empty() {
                is(volume.expand(&pod, (size + 64) << 20, 0).await, Code::OutOfRange, "it has not grown yet");
            }
            disk.resize(size * 2);
            is(volume.expand(&pod, 0, 1 << 20).await, Code::OutOfRange, "which is more than");
            let grows = !kind.is_empty() || ext4_grows();
            if !grows {
                is(volume.expand(&pod, 0, 0).await, Code::Internal, "cannot be grown");
            }
            for path in [&volume.staging, &pod].into_iter().filter(|_| grows) {
                let told = volume.expand(path, (size * 2) << 20, 0).await.unwrap();
                assert_eq!(told.capacity_bytes, i64::try_from((size * 2) << 20).unwrap());
            }
            let after = volume.stats(&volume.staging).await.unwrap().usage[0].total;
            assert_eq!(after > bytes.total * 3 / 2, grows, "{after} {}", bytes.total);

            for _ in 0..2 {
                volume.unpublish(&pod).await.unwrap();
                volume.unpublish(&other).await.unwrap();
                volume.unstage().await.unwrap();
            }
            assert!(!pod.exists() && !other.exists());
            assert_eq!(mounted(&volume.staging), 0);
            // It is the same when it comes again, and is taken as it is.
            volume.stage(&mount("", &[])).await.unwrap();
            assert_eq!(std::fs::read(volume.staging.join("file")).unwrap(), b"kept");
            volume.unstage().await.unwrap();
        }
    });
}

#[test]
fn a_device_is_shown_as_a_file() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("raw", 16);
        let volume = Volume::new(&lab, "pvc-raw", &disk.serial);
        let pod = volume.target(&lab, "pod");
        is(volume.publish(&pod, &block(), false).await, Code::FailedPrecondition, "not staged");
        for _ in 0..2 {
            volume.stage(&block()).await.unwrap();
            volume.publish(&pod, &block(), false).await.unwrap();
        }
        is(volume.stage(&mount("", &[])).await, Code::AlreadyExists, "a block volume is staged there");
        is(
            volume.publish(&pod, &mount("", &[]), false).await,
            Code::FailedPrecondition,
            "with the other volume mode",
        );
        let device = std::fs::metadata(&pod).unwrap();
        assert_eq!(device.rdev(), std::fs::metadata(disk.device()).unwrap().rdev());
        run(&format!("echo written | dd of={} conv=notrunc status=none; sync", pod.display()));
        assert!(std::fs::read(&disk.file).unwrap().starts_with(b"written"));
        let stats = volume.stats(&pod).await.unwrap();
        assert_eq!((stats.usage.len(), stats.usage[0].total), (1, 16 << 20));
        assert!(!stats.volume_condition.unwrap().abnormal);
        disk.resize(24);
        assert_eq!(volume.expand(&pod, 24 << 20, 0).await.unwrap().capacity_bytes, 24 << 20);
        // Whoever releases the disk is told that kubelet has it.
        let told = lab.release(&disk.serial).await.unwrap_err();
        let place = volume.staging.join("device").display().to_string();
        assert!(told.message().contains(&format!("staged for kubelet at {place}")), "{told}");
        for _ in 0..2 {
            volume.unpublish(&pod).await.unwrap();
            volume.unstage().await.unwrap();
        }
        assert!(!pod.exists() && std::fs::read_dir(&volume.staging).unwrap().next().is_none());
    });
}

#[test]
fn what_is_missing_or_cannot_be_is_refused() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("one", 64);
        let volume = Volume::new(&lab, "pvc-one", &disk.serial);
        let (pod, wanted) = (volume.target(&lab, "pod"), mount("ext4", &[]));
        let mut client = node(&lab.socket()).await;

        // What is missing, and what cannot be.
        let whole = volume.stage_request(&wanted);
        for (request, words) in [
            (
                csi::NodeStageVolumeRequest { volume_id: String::new(), ..whole.clone() },
                "volume_id is missing",
            ),
            (
                csi::NodeStageVolumeRequest { staging_target_path: String::new(), ..whole.clone() },
                "staging_target_path is missing",
            ),
            (
                csi::NodeStageVolumeRequest { volume_capability: None, ..whole.clone() },
                "volume_capability is missing",
            ),
            (volume.stage_request(&mount("ntfs", &[])), "fs_type"),
            (volume.stage_request(&mount("", &["bind"])), "the mount option"),
            (
                csi::NodeStageVolumeRequest { staging_target_path: "/srv/x".to_owned(), ..whole.clone() },
                "not below",
            ),
            (
                csi::NodeStageVolumeRequest {
                    staging_target_path: format!("{}/../../srv", lab.root().display()),
                    ..whole.clone()
                },
                "\"..\"",
            ),
        ] {
            is(client.node_stage_volume(request).await, Code::InvalidArgument, words);
        }
        let whole = volume.publish_request(&pod, &wanted, false);
        for (request, code, words) in [
            (
                csi::NodePublishVolumeRequest { volume_id: String::new(), ..whole.clone() },
                Code::InvalidArgument,
                "volume_id is missing",
            ),
            (
                csi::NodePublishVolumeRequest { target_path: String::new(), ..whole.clone() },
                Code::InvalidArgument,
                "target_path is missing",
            ),
            (
                csi::NodePublishVolumeRequest { volume_capability: None, ..whole.clone() },
                Code::InvalidArgument,
                "volume_capability is missing",
            ),
            (
                csi::NodePublishVolumeRequest { staging_target_path: String::new(), ..whole.clone() },
                Code::FailedPrecondition,
                "staging_target_path is missing",
            ),
            (whole.clone(), Code::FailedPrecondition, "not staged"),
            (
                csi::NodePublishVolumeRequest { target_path: "/etc/x".to_owned(), ..whole.clone() },
                Code::InvalidArgument,
                "not below",
            ),
        ] {
            is(client.node_publish_volume(request).await, code, words);
        }
        let (id, path) = (|| "pvc-one".to_owned(), |path: &PathBuf| path.display().to_string());
        for (volume_id, staging_target_path) in
            [(String::new(), path(&volume.staging)), (id(), String::new())]
        {
            let request = csi::NodeUnstageVolumeRequest { volume_id, staging_target_path };
            is(client.node_unstage_volume(request).await, Code::InvalidArgument, "is missing");
        }
        for (volume_id, target_path) in [(String::new(), path(&pod)), (id(), String::new())] {
            let request = csi::NodeUnpublishVolumeRequest { volume_id, target_path };
            is(client.node_unpublish_volume(request).await, Code::InvalidArgument, "is missing");
        }
        for (volume_id, volume_path) in [(String::new(), path(&pod)), (id(), String::new())] {
            let (volume, at) = (volume_id.clone(), volume_path.clone());
            let request = csi::NodeGetVolumeStatsRequest { volume_id, volume_path, ..Default::default() };
            is(client.node_get_volume_stats(request).await, Code::InvalidArgument, "is missing");
            let request =
                csi::NodeExpandVolumeRequest { volume_id: volume, volume_path: at, ..Default::default() };
            is(client.node_expand_volume(request).await, Code::InvalidArgument, "is missing");
        }
    });
}

#[test]
fn what_is_not_there_or_is_there_in_another_way_is_told_apart() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    wait(async {
        let lab = Lab::new().await;
        let disk = machine.plugged("one", 64);
        let volume = Volume::new(&lab, "pvc-one", &disk.serial);
        let (pod, wanted) = (volume.target(&lab, "pod"), mount("ext4", &[]));
        // What is not there.
        is(volume.stats(&pod).await, Code::NotFound, "there is no volume at");
        is(volume.expand(&pod, 0, 0).await, Code::NotFound, "there is no volume at");
        is(volume.stats(&lab.root().join("pods/none/at/all")).await, Code::NotFound, "there is no volume at");
        // As csi-sanity asks.
        for nowhere in ["some/path", "/etc", "/"] {
            is(volume.stats(nowhere.as_ref()).await, Code::NotFound, "there is no volume at");
            is(volume.expand(nowhere.as_ref(), 0, 0).await, Code::NotFound, "there is no volume at");
        }
        volume.unpublish(&lab.root().join("pods/none/at/all")).await.unwrap();
        is(volume.unpublish(&PathBuf::from("/etc")).await, Code::InvalidArgument, "not below");

        // What is there in another way.
        volume.stage(&wanted).await.unwrap();
        is(volume.stage(&mount("xfs", &[])).await, Code::AlreadyExists, "something else mounted");
        is(volume.stage(&mount("", &["nosuid"])).await, Code::AlreadyExists, "something else mounted");
        is(volume.stage(&block()).await, Code::AlreadyExists, "a volume with ext4 is staged there");
        volume.publish(&pod, &wanted, false).await.unwrap();
        is(volume.publish(&pod, &wanted, true).await, Code::AlreadyExists, "something else mounted");
        is(volume.expand(&pod, -1, 0).await, Code::InvalidArgument, "below 0");
        let other = machine.plugged("two", 64);
        let second = Volume { serial: other.serial.clone(), ..volume.clone() };
        is(second.stage(&wanted).await, Code::AlreadyExists, "something else mounted");
        is(second.publish(&pod, &wanted, false).await, Code::FailedPrecondition, "another disk");
        // For one pod only.
        let single = csi::volume_capability::access_mode::Mode::SingleNodeSingleWriter;
        let single = crate::kubelet::with_mode(wanted.clone(), single);
        volume.publish(&pod, &single, false).await.unwrap();
        let second = volume.target(&lab, "second");
        is(volume.publish(&second, &single, false).await, Code::FailedPrecondition, "one pod at a time");
        // Somebody works there.
        let file = std::fs::File::create(pod.join("open")).unwrap();
        is(volume.unpublish(&pod).await, Code::FailedPrecondition, "is in use");
        drop(file);
        volume.unpublish(&pod).await.unwrap();
        volume.unstage().await.unwrap();
        // Not blank, and no file system.
        run(&format!("mkswap {} > /dev/null", other.device()));
        let third = Volume::new(&lab, "pvc-two", &other.serial);
        is(third.stage(&mount("", &[])).await, Code::FailedPrecondition, "swap");
        for line in lab.log().lines() {
            assert!(!line.contains(crate::kubelet::SECRET), "{line}");
        }
    });
}
