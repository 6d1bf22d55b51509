//! A small ext4 that fills and is emptied, and that the kernel makes read-only.

use std::path::Path;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::events::{Kind, Watcher};
use guestlet::guest::monitor::Settings;
use guestlet::wire::proto::v1::{FileSystemFilling, FileSystemReadOnly, MountedFileSystem};

use crate::{beside, event, is_outside_of, run};

/// The next event about what is mounted there, in a few words; ticks go on until it comes. Other file systems of the machine
/// may fill, too.
async fn next(guest: &Guest, watcher: &mut Watcher, point: &Path) -> String {
    let ticks = async {
        loop {
            guest.events.tick();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let is_ours = |file_system: Option<MountedFileSystem>| {
        let MountedFileSystem { mount_point, source, r#type } = file_system.unwrap();
        let is_ours = Path::new(&mount_point) == point;
        assert!(!is_ours || (source.starts_with("/dev/loop") && r#type == "ext4"), "{source} {type}");
        is_ours
    };
    let told = async {
        loop {
            match event(watcher).await {
                Kind::FileSystemFilling(FileSystemFilling {
                    file_system,
                    filling,
                    bytes,
                    available_bytes,
                    ..
                }) if is_ours(file_system.clone()) => {
                    let is_full = available_bytes * 10 <= bytes;
                    return format!("filling {filling}, full {is_full}");
                }
                Kind::FileSystemReadOnly(FileSystemReadOnly { file_system, read_only })
                    if is_ours(file_system.clone()) =>
                {
                    return format!("read-only {read_only}");
                }
                Kind::FileSystemFilling(_) | Kind::FileSystemReadOnly(_) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        told = told => told,
        () = ticks => unreachable!(),
    }
}

#[tokio::test]
async fn file_systems_that_fill_and_turn_read_only() {
    // All mounts are private there, and go with the namespace.
    if is_outside_of("--mount") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    run(&format!(
        "mount -t tmpfs tmpfs {at}; cd {at}; mkdir data; truncate -s 64M disk; mkfs.ext4 -q -m 0 disk; \
         mount -o loop,errors=remount-ro disk data"
    ));
    let point = folder.path().join("data");
    let guest = Guest::default();
    let (_, mut watcher) = guest.events.watch(None);
    // Mounts are a reason to look, too; here only ticks are.
    let mut settings = Settings::default();
    settings.fullness.interval = Duration::from_secs(10);
    beside(&guest, "fullness", settings, async {
        run(&format!("fallocate -l 52M {at}/data/large"));
        assert_eq!(next(&guest, &mut watcher, &point).await, "filling true, full true");
        run(&format!("rm {at}/data/large"));
        assert_eq!(next(&guest, &mut watcher, &point).await, "filling false, full false");
        run(&format!("mount -o remount,ro {at}/data"));
        assert_eq!(next(&guest, &mut watcher, &point).await, "read-only true");
        run(&format!("mount -o remount,rw {at}/data"));
        assert_eq!(next(&guest, &mut watcher, &point).await, "read-only false");
        // The kernel finds an error, and nobody is told.
        run(&format!(
            "echo provoked > /sys/fs/ext4/$(basename $(findmnt -n -o SOURCE {at}/data))/trigger_fs_error"
        ));
        assert_eq!(next(&guest, &mut watcher, &point).await, "read-only true");
    })
    .await;
    run(&format!("cd /; umount -l {at}"));
}
