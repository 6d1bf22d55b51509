//! A file system that is full when the agent starts, and in which the kernel finds an error: what a host half is told.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Event, MountedFileSystem};
use tonic::Streaming;

use crate::agent::Agent;
use crate::host::{Control, next};
use crate::namespace::{is_outside, run};

/// The next event of one of these kinds about what is mounted there.
async fn about(events: &mut Streaming<Event>, point: &str) -> Kind {
    let is_ours = |one: &Option<MountedFileSystem>| one.as_ref().is_some_and(|one| one.mount_point == point);
    loop {
        match next(events).await.kind {
            Some(Kind::FileSystemFilling(event)) if is_ours(&event.file_system) => return event.into(),
            Some(Kind::FileSystemReadOnly(event)) if is_ours(&event.file_system) => return event.into(),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_file_system_that_fills_and_turns_read_only_is_told() {
    // All mounts are private there, and go with the namespace.
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    run(&format!(
        "mount -t tmpfs tmpfs {at}; cd {at}; mkdir 'a b'; truncate -s 64M disk; mkfs.ext4 -q -m 0 disk; \
         mount -o loop,errors=remount-ro disk 'a b'; fallocate -l 52M 'a b/large'"
    ));
    let point = format!("{at}/a b");
    let settings = "[file-systems]\ninterval = '10s'\nfull-percent = 80\n";
    let agent = Agent::start_set(&[], settings);
    let control = Control::dial(agent.folder.path()).await;
    let mut events = control.watch("one", None).await.unwrap();
    match about(&mut events, &point).await {
        Kind::FileSystemFilling(event) => {
            assert!(event.filling && event.available_bytes * 5 <= event.bytes, "{event:?}");
            assert!(event.free_inodes > 0 && event.free_inodes <= event.inodes, "{event:?}");
        }
        other => panic!("{other:?}"),
    }
    run(&format!(
        "echo provoked > /sys/fs/ext4/$(basename $(findmnt -n -o SOURCE '{point}'))/trigger_fs_error"
    ));
    match about(&mut events, &point).await {
        Kind::FileSystemReadOnly(event) => assert!(event.read_only, "{event:?}"),
        other => panic!("{other:?}"),
    }
    drop(agent);
    run(&format!("cd /; umount -l {at}"));
}
