//! Backend without hypervisors or files, for tests: VMs and volumes are whatever the test sets up, and last as
//! long as the test.
//!
//! It implements the contract of [`Volumes`] and nothing else, which shows the parts of the host half that need
//! no more.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::authority::{Open, Said, Verdict, judge};
use super::catalogue::{Catalogue, Entry, usages};
use super::disks::{Bus, DiskError, GuestSide, Known};
use super::volumes::{
    Capacity, Class, Coming, Export, Holder, NewVolume, Place, Plugged, Published, Room, Sharer, Shares,
    Usages, Volume, VolumeError, Volumes,
};

/// Name of the only storage class.
pub const CLASS: &str = "memory";
/// Capacity of the storage class in bytes.
pub const SIZE: u64 = 1 << 30;

/// Backend in memory; clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<Mutex<World>>);

#[derive(Debug, Default)]
struct World {
    volumes: BTreeMap<String, Volume>,
    vms: BTreeMap<String, Machine>,
    /// Number of volumes that were ever created.
    made: u64,
    /// True if volumes take no space until they are written to, which never happens here.
    is_thin: bool,
    /// Volumes that another program plugs elsewhere at the same moment.
    contested: BTreeSet<String>,
}

#[derive(Debug)]
struct Machine {
    uuid: String,
    answers: bool,
    /// Volumes that the VM has.
    disks: BTreeSet<String>,
    /// Volumes among them that another program has plugged.
    as_is: BTreeSet<String>,
}

impl World {
    fn volume(&mut self, id: &str) -> Result<&mut Volume, VolumeError> {
        self.volumes.get_mut(id).ok_or_else(|| VolumeError::Unknown(id.to_owned()))
    }

    /// Returns a VM that answers.
    fn vm(&mut self, name: &str) -> Result<&mut Machine, DiskError> {
        let vm = self.vms.get_mut(name).ok_or(DiskError::UnknownVm)?;
        if vm.answers { Ok(vm) } else { Err(DiskError::Unreachable(format!("{name} is silent"))) }
    }

    /// Returns the VM that has a volume, whether it answers or not.
    fn has(&self, id: &str) -> Option<(&String, &Machine)> {
        self.vms.iter().find(|(_, vm)| vm.disks.contains(id))
    }

    fn free(&self) -> u64 {
        let all = self.volumes.values().map(|volume| volume.size).sum();
        if self.is_thin { SIZE } else { SIZE.saturating_sub(all) }
    }

    fn said(&self, id: &str, uuid: &str) -> Said {
        match self.vms.iter().find(|(_, vm)| vm.uuid == uuid) {
            None => Said::Unlisted,
            Some((_, vm)) if !vm.answers => Said::Silent("it is silent".to_owned()),
            Some((name, vm)) if vm.disks.contains(id) => Said::Has(name.clone()),
            Some(_) => Said::HasNot,
        }
    }

    fn open(&self, id: &str) -> Open {
        match self.has(id) {
            None => Open::Nobody,
            Some((name, vm)) if vm.answers => Open::By(Place { uuid: vm.uuid.clone(), vm: name.clone() }),
            Some(_) => Open::BySomebody(id.to_owned()),
        }
    }
}

impl Memory {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// Starts a VM without volumes.
    pub fn start(&self, place: &Place) {
        let (disks, as_is) = Default::default();
        let vm = Machine { uuid: place.uuid.clone(), answers: true, disks, as_is };
        self.world().vms.insert(place.vm.clone(), vm);
    }

    /// Makes volumes take no space from now on until they are written to.
    pub fn is_thin(&self) {
        self.world().is_thin = true;
    }

    /// Sets whether another program is to have this volume plugged as well whenever it is plugged from now on.
    pub fn contest(&self, id: &str, is_contested: bool) {
        let mut world = self.world();
        world.contested.remove(id);
        if is_contested {
            world.contested.insert(id.to_owned());
        }
    }

    /// Ends a VM, which releases all of its volumes.
    pub fn end(&self, vm: &str) {
        self.world().vms.remove(vm);
    }

    /// Makes a running VM stop answering.
    ///
    /// # Panics
    /// If there is no VM with this name.
    pub fn be_silent(&self, vm: &str) {
        self.world().vms.get_mut(vm).unwrap().answers = false;
    }

    /// Plugs a volume into a VM as another program would.
    ///
    /// # Panics
    /// If there is no VM with this name.
    pub fn plug_behind(&self, vm: &str, id: &str) {
        let mut world = self.world();
        let vm = world.vms.get_mut(vm).unwrap();
        vm.disks.insert(id.to_owned());
        vm.as_is.insert(id.to_owned());
    }

    /// Unplugs a volume from a VM as another program would, whichever program has plugged it.
    ///
    /// # Panics
    /// If there is no VM with this name.
    pub fn unplug_behind(&self, vm: &str, id: &str) {
        let mut world = self.world();
        let vm = world.vms.get_mut(vm).unwrap();
        vm.disks.remove(id);
        vm.as_is.remove(id);
    }

    /// Returns the actual volumes of all VMs, with the VMs' names.
    pub fn truth(&self) -> Vec<(String, String)> {
        let world = self.world();
        let of = |(name, vm): (&String, &Machine)| {
            vm.disks.iter().map(|id| (name.clone(), id.clone())).collect::<Vec<_>>()
        };
        world.vms.iter().flat_map(of).collect()
    }

    /// Detaches a disk from a VM that answers, after its guest has released it.
    async fn detach(&self, id: &str, vm: &str, guest: &dyn GuestSide) -> Result<(), DiskError> {
        let is_adopted = self.world().vm(vm)?.as_is.contains(id);
        if self.world().vm(vm)?.disks.contains(id) {
            guest.release(&Known { is_adopted, ..Known::serial(id) }).await?;
            let mut world = self.world();
            let vm = world.vm(vm)?;
            vm.disks.remove(id);
            vm.as_is.remove(id);
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Volumes for Memory {
    fn classes(&self) -> Vec<Class> {
        vec![Class { name: CLASS.to_owned(), is_default: true }]
    }

    fn rooms(&self) -> Vec<Room> {
        vec![Room { class: CLASS.to_owned(), bytes: Some((SIZE, self.world().free())) }]
    }

    async fn capacity(&self, class: &str) -> Result<Capacity, VolumeError> {
        if class != CLASS {
            return Err(VolumeError::NoClass(class.to_owned()));
        }
        let free = self.world().free();
        Ok(Capacity { size: SIZE, free, largest: free })
    }

    async fn part(
        &self,
        cluster: Option<&str>,
        after: &str,
        most: usize,
    ) -> Result<Vec<Volume>, VolumeError> {
        let world = self.world();
        let rest = world.volumes.range::<str, _>((Bound::Excluded(after), Bound::Unbounded));
        let its = rest.map(|(_, volume)| volume).filter(|one| cluster.is_none_or(|of| one.cluster == of));
        Ok(its.take(most).cloned().collect())
    }

    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError> {
        let world = self.world();
        Ok(world.volumes.values().find(|one| one.cluster == cluster && one.name == name).cloned())
    }

    async fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError> {
        let catalogue: Catalogue = self.world().volumes.values().map(Entry::from).collect();
        Ok(usages(&std::iter::once(&catalogue), cluster, class, coming))
    }

    async fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError> {
        let is_its = |one: &&Volume| one.published.as_ref().is_some_and(|published| published.uuid == uuid);
        Ok(self.world().volumes.values().filter(is_its).map(|volume| volume.id.clone()).collect())
    }

    async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        Ok(self.world().volumes.get(id).cloned())
    }

    async fn create(&self, new: NewVolume) -> Result<Volume, VolumeError> {
        let mut world = self.world();
        let NewVolume { name, cluster, class, size, claim, is_share } = new;
        if class != CLASS {
            return Err(VolumeError::NoClass(class));
        }
        if size > world.free() {
            return Err(VolumeError::Full(format!("there is no room for {size} bytes")));
        }
        world.made += 1;
        let id = format!("{CLASS}.{}", world.made);
        let sharers = is_share.then(Vec::new);
        let volume =
            Volume { id, name, cluster, class, size, claim, published: None, sharers, problem: None };
        world.volumes.insert(volume.id.clone(), volume.clone());
        Ok(volume)
    }

    async fn holder(&self, id: &str) -> Result<Holder, VolumeError> {
        let mut world = self.world();
        let record = world.volume(id)?.published.clone();
        let place = record.map(|record| Place { uuid: record.uuid, vm: record.vm });
        let said = place.as_ref().map(|place| world.said(id, &place.uuid));
        match judge(place.as_ref().zip(said.as_ref()), Some(world.open(id))) {
            Verdict::Is(holder) => Ok(holder),
            Verdict::Look => unreachable!("it was looked"),
        }
    }

    async fn remove(&self, id: &str) -> Result<(), VolumeError> {
        let mut world = self.world();
        if let Some(sharer) = world.volume(id)?.sharers.iter().flatten().next() {
            return Err(VolumeError::InUse(format!("{} has it", sharer.vm)));
        }
        if let Some((vm, _)) = world.has(id) {
            return Err(VolumeError::InUse(format!("{vm} has it")));
        }
        world.volumes.remove(id);
        Ok(())
    }

    async fn grow(&self, id: &str, size: u64, vm: Option<&str>) -> Result<u64, VolumeError> {
        let mut world = self.world();
        if let Some(vm) = vm {
            world.vm(vm)?;
        }
        let (free, volume) = (world.free(), world.volume(id)?);
        if size.saturating_sub(volume.size) > free {
            return Err(VolumeError::Full(format!("there is no room for {size} bytes")));
        }
        volume.size = volume.size.max(size);
        Ok(volume.size)
    }

    async fn plug(&self, id: &str, published: Published, vm: &str) -> Result<Plugged, VolumeError> {
        let mut world = self.world();
        world.volume(id)?;
        world.vm(vm)?;
        if let Some((other, _)) = world.has(id).filter(|(other, _)| *other != vm) {
            return Err(VolumeError::InUse(format!("{other} has it")));
        }
        world.volume(id)?.published = Some(published);
        world.vm(vm)?.disks.insert(id.to_owned());
        if world.contested.contains(id) {
            return Err(VolumeError::Contested(format!("somebody else has {id}")));
        }
        Ok(Plugged { disk: Known::serial(id), bus: Bus::Scsi })
    }

    async fn unplug(
        &self,
        id: &str,
        vm: &str,
        _: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        if self.world().volume(id)?.published.is_none() {
            return Ok(());
        }
        self.detach(id, vm, &*guest).await?;
        self.world().volume(id)?.published = None;
        Ok(())
    }

    async fn take_back(
        &self,
        id: &str,
        from: &Place,
        _: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        if self.world().vm(&from.vm)?.as_is.contains(id) {
            return Err(DiskError::Held(format!("another program has plugged {id} into {}", from.vm)).into());
        }
        Ok(self.detach(id, &from.vm, &*guest).await?)
    }

    async fn recognise(&self, id: &str, published: Published) -> Result<bool, VolumeError> {
        let mut world = self.world();
        let is_there = world.vm(&published.vm)?.as_is.contains(id);
        if is_there {
            world.volume(id)?.published.get_or_insert(published);
        }
        Ok(is_there)
    }

    async fn concede(&self, id: &str) -> Result<Option<Place>, VolumeError> {
        let holder = self.holder(id).await?;
        let mut world = self.world();
        let record = world.volume(id)?.published.as_ref();
        let Some(other) = holder.other_than(record) else { return Ok(None) };
        if !world.vm(&other.vm)?.as_is.contains(id) {
            return Ok(None);
        }
        world.volume(id)?.published = None;
        Ok(Some(other))
    }

    async fn forget(&self, id: &str) -> Result<(), VolumeError> {
        self.world().volume(id)?.published = None;
        Ok(())
    }

    async fn places(&self, vm: &str) -> Result<Option<usize>, VolumeError> {
        self.world().vm(vm)?;
        Ok(None)
    }

    async fn plugged(&self, vm: &str) -> Result<BTreeSet<String>, VolumeError> {
        let mut world = self.world();
        let uuid = world.vm(vm)?.uuid.clone();
        let mut disks = world.vm(vm)?.disks.clone();
        let as_is = world.vm(vm)?.as_is.clone();
        let is_its = |id: &String| {
            world.volumes.get(id).and_then(|one| one.published.as_ref()).is_some_and(|one| one.uuid == uuid)
        };
        // A volume that another program has plugged counts only if it is on record for this VM.
        disks.retain(|id| !as_is.contains(id) || is_its(id));
        Ok(disks)
    }

    fn serial(&self, id: &str) -> Option<String> {
        Some(id.to_owned())
    }

    fn shares(&self) -> Option<&dyn Shares> {
        Some(self)
    }
}

#[tonic::async_trait]
impl Shares for Memory {
    async fn check(&self) -> Result<(), VolumeError> {
        Ok(())
    }

    async fn find(&self, id: &str) -> Result<Export, VolumeError> {
        self.world().volume(id)?;
        Ok(Export { server: "192.0.2.1".to_owned(), path: format!("/{id}"), options: String::new() })
    }

    async fn share(&self, id: &str, with: Sharer) -> Result<Export, VolumeError> {
        {
            let mut world = self.world();
            let sharers = world.volume(id)?.sharers.get_or_insert_default();
            sharers.retain(|sharer| sharer.uuid != with.uuid);
            sharers.push(with);
            sharers.sort();
        }
        self.find(id).await
    }

    async fn unshare(&self, id: &str, uuid: Option<&str>) -> Result<(), VolumeError> {
        let mut world = self.world();
        let sharers = world.volume(id)?.sharers.get_or_insert_default();
        sharers.retain(|sharer| uuid.is_some_and(|uuid| sharer.uuid != uuid));
        Ok(())
    }

    async fn repair(&self) -> Result<(), VolumeError> {
        Ok(())
    }
}
