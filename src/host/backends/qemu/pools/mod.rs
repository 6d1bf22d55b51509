//! Pools: directories of this machine in which volumes are kept as images, one pool for each storage class.
//!
//! ```text
//!            create                       plug (record, then disk)
//!  nothing ─────────▶ record, image ─────────────────────────────▶ record says which VM, disk plugged
//!     ▲                  │     ▲                                            │
//!     └──────────────────┘     └────────────────────────────────────────────┘
//!            remove                 unplug (record: leaving, disk gone, record)
//! ```
//!
//! `index` is what is known of all volumes, `contents` of those of one pool, by what they are looked for, `store` does what is done on disk, in a `folder` for each pool, and `access`
//! sees to it that a pool that hangs stops nobody else: each has one `worker`. The disks themselves come and go through
//! [`hotplug`], which reads back what QEMU has. To add something that is kept of a volume: a field in
//! `record`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;

use super::super::disks::{AttachedDisk, Bus, DiskError, Disks, Format, GuestSide, Known, NewDisk, Source};
use super::super::volumes::{
    Capacity, Class, Coming, Holder, NewVolume, Place, Plugged, Published, Room, Usages, Volume, VolumeError,
    Volumes,
};
use super::hotplug::{self, Hotplug, place};

mod access;
mod authority;
mod contents;
mod entry;
mod folder;
mod health;
pub mod identity;
mod index;
mod marker;
mod record;
mod register;
mod steps;
mod store;
#[cfg(test)]
mod tests;

use access::Access;
use entry::Entry;
use register::Register;

/// How long a pool may take for a call where the settings say nothing: longer than a disk that is busy takes; kubelet and
/// the sidecars have repeated their calls by then.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How much of an image is there from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// What was written.
    Thin,
    /// All of it.
    Full,
}

/// A pool, as the settings have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// The name of the storage class.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
    /// How images are kept.
    pub format: Format,
    /// How much of them is there.
    pub allocation: Allocation,
    /// What guests see its volumes on; none: SCSI where the VM has a controller, else virtio-blk.
    pub bus: Option<Bus>,
    /// For volumes that name no class.
    pub is_default: bool,
    /// How long its file system may take for a call, until the caller is told that it does not answer.
    pub patience: Duration,
}

/// Keeps volumes in pools.
#[derive(Debug)]
pub struct Pools {
    settings: watch::Receiver<Vec<Pool>>,
    access: Access,
    hotplug: Hotplug,
}

impl Pools {
    /// The pools of these settings, whose volumes are plugged by `hotplug`; which pools they are is kept in the directory
    /// `state`.
    pub fn new(settings: watch::Receiver<Vec<Pool>>, state: PathBuf, hotplug: Hotplug) -> Self {
        Self { access: Access::new(settings.clone(), Register::new(state)), settings, hotplug }
    }

    async fn publish(&self, id: &str, published: Option<Published>) -> Result<(), VolumeError> {
        let wanted = id.to_owned();
        self.access.in_pool_of(id, move |store| store.publish(&wanted, published)).await
    }

    /// On which bus a volume that is not plugged yet is tried, one after the other.
    fn buses(&self, class: &str) -> Vec<Bus> {
        let set = self.settings.borrow().iter().find(|pool| pool.name == class).and_then(|pool| pool.bus);
        set.map_or(vec![Bus::Scsi, Bus::VirtioBlk], |bus| vec![bus])
    }

    /// What there is on that of these buses on which a volume is plugged that comes next.
    async fn room(&self, vm: &str, buses: Vec<Bus>) -> Result<Option<hotplug::Places>, VolumeError> {
        for bus in buses {
            match self.hotplug.room(vm, bus).await {
                Err(DiskError::NoController(_)) => {}
                room => return Ok(Some(room?)),
            }
        }
        Ok(None)
    }

    /// Plugs the disk as it is remembered.
    async fn attach(
        &self,
        entry: &Entry,
        vm: &str,
        read_only: bool,
        there: Option<Bus>,
    ) -> Result<AttachedDisk, VolumeError> {
        let (id, owner) = (entry.record.id.clone(), self.hotplug.owner(vm));
        let image = self.access.in_pool_of(&entry.record.id, move |store| store.give(&id, owner)).await?;
        let mut buses =
            there.map_or_else(|| self.buses(&entry.record.class), |bus| vec![bus]).into_iter().peekable();
        while let Some(bus) = buses.next() {
            let disk = NewDisk {
                serial: entry.serial().to_owned(),
                bus,
                source: Source::Image(image.clone()),
                format: Some(entry.record.format()),
                is_whole: true,
                read_only,
            };
            match self.hotplug.attach(vm, disk).await {
                Err(DiskError::NoController(_)) if buses.peek().is_some() => {}
                outcome => return Ok(outcome?),
            }
        }
        Err(place::no_controller().into())
    }
}

/// Ours with this serial number.
fn find<'d>(disks: &'d [AttachedDisk], serial: &str) -> Option<&'d AttachedDisk> {
    disks.iter().find(|disk| disk.ours && disk.serial == serial)
}

#[tonic::async_trait]
impl Volumes for Pools {
    fn classes(&self) -> Vec<Class> {
        let class = |pool: &Pool| Class { name: pool.name.clone(), is_default: pool.is_default };
        self.settings.borrow().iter().map(class).collect()
    }

    async fn capacity(&self, class: &str) -> Result<Capacity, VolumeError> {
        let wanted = class.to_owned();
        self.access.in_class(class, move |store| store.capacity(&wanted)).await
    }

    fn rooms(&self) -> Vec<Room> {
        self.access.rooms()
    }

    async fn part(
        &self,
        cluster: Option<&str>,
        after: &str,
        most: usize,
    ) -> Result<Vec<Volume>, VolumeError> {
        Ok(self.access.known(|index| index.part(cluster, after, most)).await)
    }

    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError> {
        Ok(self.access.known(|index| index.named(cluster, name)).await)
    }

    async fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError> {
        Ok(self.access.known(|index| index.usage(cluster, class, coming)).await)
    }

    async fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError> {
        Ok(self.access.known(|index| index.of_vm(uuid)).await)
    }

    async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        self.access.get(id).await
    }

    async fn create(&self, new: NewVolume) -> Result<Volume, VolumeError> {
        let class = new.class.clone();
        self.access.in_class(&class, move |store| store.create(new)).await
    }

    async fn holder(&self, id: &str) -> Result<Holder, VolumeError> {
        let entry = self.access.entry(id).await?;
        self.ask(&entry).await
    }

    async fn remove(&self, id: &str) -> Result<(), VolumeError> {
        self.close_left(&self.access.entry(id).await?).await;
        let wanted = id.to_owned();
        self.access.in_pool_of(id, move |store| store.remove(&wanted)).await
    }

    async fn grow(&self, id: &str, size: u64, vm: Option<&str>) -> Result<u64, VolumeError> {
        let wanted = id.to_owned();
        let entry = self.access.in_pool_of(id, move |store| store.grow(&wanted, size)).await?;
        let serial = entry.serial().to_owned();
        if let Some(vm) = vm {
            match self.hotplug.resize(vm, serial, entry.record.size).await {
                Ok(_) | Err(DiskError::Shrinks { .. }) => return Ok(entry.record.size),
                // It is plugged again with the size that is remembered.
                Err(DiskError::NotAttached(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let wanted = id.to_owned();
        self.access.in_pool_of(id, move |store| store.lengthen(&wanted)).await?;
        Ok(entry.record.size)
    }

    async fn plug(&self, id: &str, published: Published, vm: &str) -> Result<Plugged, VolumeError> {
        let entry = self.access.entry(id).await?;
        let (before, read_only) = (entry.record.published.clone(), published.read_only);
        // What can fail does so before anything is remembered.
        let wanted = id.to_owned();
        self.access.in_pool_of(id, move |store| store.sound(&wanted)).await?;
        let disks = self.hotplug.list(vm).await?;
        let there = find(&disks, entry.serial()).and_then(|disk| disk.bus);
        self.publish(id, Some(published)).await?;
        let attached = self.attach(&entry, vm, read_only, there).await;
        let disk = match attached {
            Ok(disk) => disk,
            Err(error) => {
                let gone =
                    self.hotplug.list(vm).await.is_ok_and(|disks| find(&disks, entry.serial()).is_none());
                if gone && before.is_none() {
                    self.publish(id, None).await?;
                }
                return Err(error);
            }
        };
        if disk.size < entry.record.size {
            self.hotplug.resize(vm, disk.serial.clone(), entry.record.size).await?;
        }
        Ok(Plugged { disk: Known::serial(disk.serial), bus: disk.bus.unwrap_or(Bus::Scsi) })
    }

    async fn unplug(
        &self,
        id: &str,
        vm: &str,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        let entry = self.access.entry(id).await?;
        let Some(mut published) = entry.record.published.clone().map(Published::from) else { return Ok(()) };
        let was_leaving = std::mem::replace(&mut published.leaving, true);
        self.publish(id, Some(published.clone())).await?;
        match self.hotplug.detach(vm, entry.serial().to_owned(), patience, guest).await {
            Ok(_) => {
                // It may have the image all the same, and as long as it has, it is remembered to.
                self.check_closed(&entry, vm).await?;
                self.publish(id, None).await
            }
            Err(error) => {
                // Otherwise it may be on its way out, and is not to be plugged again: also where the guest does not release it now, but
                // its kernel was asked before, and lets go of it when it likes.
                let stays = match error {
                    DiskError::GuestRefuses(_) => true,
                    DiskError::NotReleased(_) => !was_leaving,
                    _ => false,
                };
                if stays {
                    published.leaving = false;
                    self.publish(id, Some(published)).await?;
                }
                Err(error.into())
            }
        }
    }

    async fn take_back(
        &self,
        id: &str,
        from: &Place,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        let entry = self.access.entry(id).await?;
        if entry.record.published.is_none() {
            // As long as it is there, it is remembered.
            let (uuid, vm, node) = (from.uuid.clone(), from.vm.clone(), from.uuid.clone());
            let found = Published { uuid, vm, node, read_only: false, leaving: true };
            self.publish(id, Some(found)).await?;
            return self.unplug(id, &from.vm, patience, guest).await;
        }
        self.hotplug.detach(&from.vm, entry.serial().to_owned(), patience, guest).await?;
        self.check_closed(&entry, &from.vm).await
    }

    async fn forget(&self, id: &str) -> Result<(), VolumeError> {
        self.publish(id, None).await
    }

    async fn places(&self, vm: &str) -> Result<Option<usize>, VolumeError> {
        let mut ways: Vec<_> = self.classes().iter().map(|class| self.buses(&class.name)).collect();
        ways.sort();
        ways.dedup();
        if ways.is_empty() {
            return Ok(None);
        }
        let mut fewest = None;
        for buses in ways {
            let places = match self.room(vm, buses).await? {
                Some(hotplug::Places { ours, free }) => {
                    let ours = ours.iter().map(String::as_str);
                    free + self.access.known(|index| index.with_serials(ours).len()).await
                }
                None => 0,
            };
            fewest = Some(fewest.map_or(places, |fewest: usize| fewest.min(places)));
        }
        Ok(fewest)
    }

    async fn plugged(&self, vm: &str) -> Result<BTreeSet<String>, VolumeError> {
        let disks = self.hotplug.list(vm).await?;
        let serials = disks.iter().filter(|disk| disk.ours).map(|disk| disk.serial.as_str());
        Ok(self.access.known(|index| index.with_serials(serials)).await)
    }

    fn serial(&self, id: &str) -> Option<String> {
        identity::parse(id).map(|parts| parts.serial.to_owned())
    }
}
