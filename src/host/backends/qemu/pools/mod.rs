//! Pools: directories of this machine that store volumes as images, one pool for each storage class.
//!
//! ```text
//!            create                       plug (record, then disk)
//!  nothing ─────────▶ record, image ─────────────────────────────▶ record with the VM, disk plugged
//!     ▲                  │     ▲                                            │
//!     └──────────────────┘     └────────────────────────────────────────────┘
//!            remove                 unplug (record: leaving; disk; record)
//! ```
//!
//! `index` has the known state of all volumes, and `contents` that of one pool's volumes with their indexes.
//! `store` carries out the operations on disk, with a `folder` for each pool, and `access` ensures that a pool
//! that hangs blocks no other: each has its own `worker`. Disks are plugged and unplugged through [`hotplug`],
//! which reads their state back from QEMU. To store a further property of a volume, add a field in `record`.

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

/// Default timeout of a call to a pool: longer than a busy disk needs, and long enough that kubelet and the
/// sidecars repeat their calls.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Allocation of an image's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Space is allocated as the guest writes.
    Thin,
    /// All space is allocated at creation.
    Full,
}

/// Pool according to the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Name of the storage class.
    pub name: String,
    /// Directory of the pool.
    pub path: PathBuf,
    /// Format of the images.
    pub format: Format,
    /// Allocation of the images' space.
    pub allocation: Allocation,
    /// Bus on which guests see the volumes; `None` for SCSI if the VM has a controller, and virtio-blk otherwise.
    pub bus: Option<Bus>,
    /// True for the class of volumes that name none.
    pub is_default: bool,
    /// Timeout of a call to its file system, after which the caller gets an error.
    pub patience: Duration,
}

/// Backend for volumes in pools.
#[derive(Debug)]
pub struct Pools {
    settings: watch::Receiver<Vec<Pool>>,
    access: Access,
    hotplug: Hotplug,
}

impl Pools {
    /// Creates the pools of these settings, whose volumes are plugged by `hotplug`. The directory `state` holds the
    /// register of the pools.
    pub fn new(settings: watch::Receiver<Vec<Pool>>, state: PathBuf, hotplug: Hotplug) -> Self {
        Self { access: Access::new(settings.clone(), Register::new(state)), settings, hotplug }
    }

    async fn publish(&self, id: &str, published: Option<Published>) -> Result<(), VolumeError> {
        let wanted = id.to_owned();
        self.access.in_pool_of(id, move |store| store.publish(&wanted, published)).await
    }

    /// Returns the buses to try, in this order, for a volume that is not plugged yet.
    fn buses(&self, class: &str) -> Vec<Bus> {
        let set = self.settings.borrow().iter().find(|pool| pool.name == class).and_then(|pool| pool.bus);
        set.map_or(vec![Bus::Scsi, Bus::VirtioBlk], |bus| vec![bus])
    }

    /// Returns the present and possible disks on the bus, of these, that the next volume will be plugged into.
    async fn room(&self, vm: &str, buses: Vec<Bus>) -> Result<Option<hotplug::Places>, VolumeError> {
        for bus in buses {
            match self.hotplug.room(vm, bus).await {
                Err(DiskError::NoController(_)) => {}
                room => return Ok(Some(room?)),
            }
        }
        Ok(None)
    }

    /// Plugs the disk according to its record.
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

/// Finds guestlet's disk with this serial number.
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
                // The disk will be plugged again with the recorded size.
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
        // Check what would fail before anything is recorded.
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
                // QEMU may still have the image open, and as long as it has, the VM must stay on record.
                self.check_closed(&entry, vm).await?;
                self.publish(id, None).await
            }
            Err(error) => {
                // In all other cases the disk may be on its way out, and must not be plugged again. That includes a guest
                // whose agent does not release it now: its kernel may have been asked before, and can release the disk at any
                // time.
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
            // The VM stays on record for as long as it has the volume.
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
