//! Events about file systems that are mounted or unmounted, about to fill, or read-only.

use super::Happening;
use super::state::{Change, Excess};
use crate::text;
use crate::wire::heap;
use crate::wire::proto::v1::{
    FileSystemFilling, FileSystemMounted, FileSystemReadOnly, FileSystemUnmounted, MountedFileSystem,
};
use crate::wire::weigh::List;

impl Happening for FileSystemMounted {
    fn words(&self) -> String {
        format!("file system mounted: {}", words(self.file_system.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(mounted) = &self.file_system else { return Ok(()) };
        change.add(List::FileSystems, mounted, |state, cut| (&mut state.file_systems, &mut cut.file_systems))
    }
}

impl Happening for FileSystemUnmounted {
    fn words(&self) -> String {
        format!("file system unmounted: {}", words(self.file_system.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(unmounted) = &self.file_system else { return Ok(()) };
        let (state, cut, room) = change.parts();
        // Of several identical mounts, the last one is unmounted first, see umount(2).
        match state.file_systems.iter().rposition(|known| known == unmounted) {
            Some(place) => room.give_back(heap::entry(&state.file_systems.remove(place))),
            None => cut.file_systems = cut.file_systems.saturating_sub(1),
        }
        Ok(())
    }
}

impl Happening for FileSystemFilling {
    fn words(&self) -> String {
        let what = if self.filling { "is about to fill" } else { "has room again" };
        let (free, all) = (text::size(self.available_bytes), text::size(self.bytes));
        let inodes = match (self.free_inodes, self.inodes) {
            (_, 0) => String::new(),
            (free, all) => format!(", {free} of {all} inodes"),
        };
        format!("file system {what}: {}: {free} of {all} free{inodes}", words(self.file_system.as_ref()))
    }
}

impl Happening for FileSystemReadOnly {
    fn words(&self) -> String {
        let what = if self.read_only { "has become read-only" } else { "is writable again" };
        format!("file system {what}: {}", words(self.file_system.as_ref()))
    }
}

/// Describes a mounted file system, for example `/data (xfs from /dev/vdb)`.
pub fn words(mounted: Option<&MountedFileSystem>) -> String {
    mounted.map_or("-".to_owned(), |mounted| {
        format!("{} ({} from {})", mounted.mount_point, mounted.r#type, mounted.source)
    })
}
