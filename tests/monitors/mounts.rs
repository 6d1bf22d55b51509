use std::time::Instant;

use guestlet::guest::Guest;
use guestlet::guest::events::Kind;
use guestlet::guest::monitor::Settings;
use guestlet::wire::proto::v1::{FileSystemMounted, FileSystemUnmounted, MountedFileSystem};

use crate::{beside, event, idle, is_outside_of, run, silence, wakeups};

fn is_mounted(event: &Kind, name: &str) -> bool {
    matches!(event, Kind::FileSystemMounted(FileSystemMounted {
        file_system: Some(MountedFileSystem { mount_point, source, r#type }),
    }) if mount_point.ends_with(name) && source.starts_with("/dev/loop") && r#type == "ext4")
}

fn is_unmounted(event: &Kind, name: &str) -> bool {
    matches!(event, Kind::FileSystemUnmounted(FileSystemUnmounted {
        file_system: Some(MountedFileSystem { mount_point, .. }),
    }) if mount_point.ends_with(name))
}

#[tokio::test]
async fn file_systems_that_come_and_go() {
    // All mounts are private there, and go with the namespace.
    if is_outside_of("--mount") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    run(&format!(
        "mount -t tmpfs tmpfs {at}; cd {at}; mkdir many 'a b' c; \
         for disk in 1 2; do truncate -s 8M disk$disk; mkfs.ext4 -q disk$disk; done; mount -o loop disk1 'a b'"
    ));
    let guest = Guest::default();
    let (_, mut watcher) = guest.events.watch(None);
    beside(&guest, "mounts", Settings::default(), async {
        // What is there: the machine's own, then ours, which was mounted last.
        let mut told = event(&mut watcher).await;
        while !is_mounted(&told, "/a b") {
            assert!(matches!(told, Kind::FileSystemMounted(_)), "{told:?}");
            told = event(&mut watcher).await;
        }
        silence(&mut watcher).await;

        run(&format!("cd {at}; mount -o loop disk2 c; mkdir c/part; mount -t tmpfs x many; umount many"));
        let told = event(&mut watcher).await;
        assert!(is_mounted(&told, "/c"), "{told:?}");

        // Bind mounts are not another file system.
        run(&format!("cd {at}; mount --bind c/part many; mount --bind 'a b' many; umount many many"));
        silence(&mut watcher).await;

        // A burst costs a few looks, and nothing is told of what does not count.
        let (before, begun) = (wakeups(), Instant::now());
        let many = format!(
            "cd {at}; for number in $(seq 1000); do mkdir many/$number; \
             echo x$number $PWD/many/$number tmpfs rw 0 0; done > table; mount -a -T table; umount 'a b'"
        );
        let busy = tokio::task::spawn_blocking(move || run(&many));
        let told = event(&mut watcher).await;
        assert!(is_unmounted(&told, "/a b"), "{told:?}");
        busy.await.unwrap();
        let (woken, took) = (wakeups() - before, begun.elapsed());
        assert!(u128::from(woken) < 20 + took.as_millis() / 10, "{woken} wakeups in {took:?}");
        idle(&mut watcher).await;

        run(&format!("umount {at}/c"));
        let told = event(&mut watcher).await;
        assert!(is_unmounted(&told, "/c"), "{told:?}");
    })
    .await;
    run(&format!("cd /; umount -l {at}"));
}
