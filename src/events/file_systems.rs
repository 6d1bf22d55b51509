//! File systems that are mounted and unmounted.

use super::Happening;
use super::state::{Change, Excess};
use crate::wire::heap;
use crate::wire::proto::v1::{FileSystemMounted, FileSystemUnmounted, MountedFileSystem};
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
        // The one mounted last goes first, as umount(2) has it.
        match state.file_systems.iter().rposition(|known| known == unmounted) {
            Some(place) => room.give_back(heap::entry(&state.file_systems.remove(place))),
            None => cut.file_systems = cut.file_systems.saturating_sub(1),
        }
        Ok(())
    }
}

/// Such as `/data (xfs from /dev/vdb)`.
pub fn words(mounted: Option<&MountedFileSystem>) -> String {
    mounted.map_or("-".to_owned(), |mounted| {
        format!("{} ({} from {})", mounted.mount_point, mounted.r#type, mounted.source)
    })
}
