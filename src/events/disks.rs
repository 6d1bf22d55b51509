//! Events about disks that are added, changed or removed.

use super::state::{Change, Excess};
use super::{Happening, few};
use crate::text;
use crate::wire::heap;
use crate::wire::proto::v1::{
    Disk, DiskAdded, DiskChanged, DiskFailed, DiskMounted, DiskRemoved, DiskResized,
};
use crate::wire::weigh::List;

impl Happening for DiskAdded {
    fn words(&self) -> String {
        format!("disk added: {}", words(self.disk.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(disk) = &self.disk else { return Ok(()) };
        change.add(List::Disks, disk, |state, cut| (&mut state.disks, &mut cut.disks))
    }

    fn slim(&mut self, _: usize) {
        self.disk.iter_mut().for_each(slim);
    }
}

impl Happening for DiskRemoved {
    fn words(&self) -> String {
        let disk = words(self.disk.as_ref());
        if self.in_use.is_empty() {
            return format!("disk removed: {disk}");
        }
        format!("disk removed while in use: {disk}; it was used for {}", self.in_use.join(", "))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let (state, cut, room) = change.parts();
        room.remove(&mut state.disks, |known| known.generation == disk.generation, &mut cut.disks);
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        few(&mut self.in_use);
        self.disk.iter_mut().for_each(slim);
    }
}

impl Happening for DiskResized {
    fn words(&self) -> String {
        let before = text::size(self.bytes_before);
        format!("disk resized: {}; it had {before}", words(self.disk.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        self.disk.iter().for_each(|disk| is_now(disk, change));
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        self.disk.iter_mut().for_each(slim);
    }
}

impl Happening for DiskChanged {
    fn words(&self) -> String {
        format!("disk changed: {}", words(self.disk.as_ref()))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        self.disk.iter().for_each(|disk| is_now(disk, change));
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        self.disk.iter_mut().for_each(slim);
    }
}

impl Happening for DiskMounted {
    fn words(&self) -> String {
        format!("disk mounted: {} on {} ({})", words(self.disk.as_ref()), self.mount_point, self.r#type)
    }

    fn slim(&mut self, _: usize) {
        self.disk.iter_mut().for_each(slim);
    }
}

impl Happening for DiskFailed {
    fn words(&self) -> String {
        format!("disk failed: {}: {}", words(self.disk.as_ref()), self.problem)
    }

    fn slim(&mut self, _: usize) {
        self.disk.iter_mut().for_each(slim);
    }
}

/// Describes a disk, for example `vdb (virtio, 10 GiB, serial number data-1)`.
pub fn words(disk: Option<&Disk>) -> String {
    let Some(disk) = disk else { return "-".to_owned() };
    let serial = match disk.serials.first() {
        Some(serial) => format!("serial number {}", serial.value),
        None => "no serial number".to_owned(),
    };
    format!("{} ({}, {}, {serial})", disk.name, disk.bus, text::size(disk.bytes))
}

/// Replaces what is known of the disk.
fn is_now(disk: &Disk, change: &mut Change<'_>) {
    let (state, cut, room) = change.parts();
    let place = state.disks.iter().position(|known| known.generation == disk.generation);
    let Some(place) = place else { return };
    room.give_back(heap::entry(&state.disks[place]));
    if room.take(heap::entry(disk)) {
        state.disks[place].clone_from(disk);
    } else {
        // The old entry would be wrong, and the new one does not fit.
        state.disks.remove(place);
        cut.disks = cut.disks.saturating_add(1);
    }
}

fn slim(disk: &mut Disk) {
    disk.partitions = Vec::new();
    disk.holders = Vec::new();
    disk.serials.truncate(1);
}
