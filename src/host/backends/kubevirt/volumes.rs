//! Volumes as claims of the host cluster, which KubeVirt plugs.
//!
//! Lists come from caches that watches keep up to date; decisions are based on what is read from the API
//! server. A volume counts as free only when nothing that is read shows a holder ([`authority`]), and only then
//! is its record cleared, or is it published to another VM or deleted.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use tokio::time::Instant;

use super::adopted::obstacle;
use super::adopting::Attempt;
use super::api::{Cluster, Written};
use super::authority;
use super::claims::{self, PUBLISHED};
use super::controller::listing::Listing;
use super::copies::{Copies, UNREAD};
use super::detach::still_held;
use super::hotplug::{Hotplug, Patience};
use super::names::{Claim, PREFIX, is_label};
use super::read::Read;
use super::shares::Upkeep;
use crate::host::backends::disks::{Bus, DiskError, GuestSide};
use crate::host::backends::volumes::{
    Capacity, Class, Coming, Holder, NewVolume, Place, Plugged, Published, Room, Shares, Usages, Volume,
    VolumeError, Volumes,
};

/// Maximum number of attempts at a change that conflicts with those of others.
const TRIES: usize = 8;
/// Maximum size of a volume in bytes: 64 TiB.
const LARGEST: u64 = 64 << 40;

/// Volumes that are claims of the host cluster.
#[derive(Debug)]
pub struct Claims {
    pub(super) cluster: Cluster,
    pub(super) copies: Copies,
    pub(super) hotplug: Hotplug,
    pub(super) patience: Patience,
    access_mode: String,
    /// VMs that list volumes of guestlet's; without this listing, every VM may have some.
    listing: Option<Listing>,
    pub(super) upkeep: Upkeep,
}

impl Claims {
    /// Creates the backend's volumes for this cluster, with this access mode for new claims. Returns after all
    /// claims have been read.
    pub async fn new(cluster: Cluster, patience: Patience, access_mode: String) -> Self {
        let claims = Self::begin(cluster, patience, access_mode);
        claims.read_all().await;
        claims
    }

    /// Returns the same without waiting: requests that need all claims fail until they have been read.
    pub fn begin(cluster: Cluster, patience: Patience, access_mode: String) -> Self {
        let copies = Copies::begin(&cluster);
        let hotplug = Hotplug::new(cluster.clone(), patience);
        Self { cluster, copies, hotplug, patience, access_mode, listing: None, upkeep: Upkeep::default() }
    }

    /// Waits until all claims have been read.
    pub async fn read_all(&self) {
        self.copies.there().await;
    }

    /// Adds the listing of VMs that may have volumes of guestlet's, so that the others need not be asked.
    #[must_use]
    pub fn with_listing(self, listing: Listing) -> Self {
        Self { listing: Some(listing), ..self }
    }

    /// Reads the claim of guestlet's that an identifier refers to. A claim with a name of guestlet's but without
    /// its marks may belong to any cluster and be in any VM: it must not be reported as a deleted volume.
    pub(super) async fn read(&self, id: &str) -> Result<Option<Read>, VolumeError> {
        let Some(claim) = Claim::of_id(id) else { return Ok(None) };
        let Some(object) = self.cluster.claim(&claim).await? else { return Ok(None) };
        let Some(volume) = claims::volume(&object) else {
            return Err(if claim.is_made() { unknown(&claim, &object) } else { obstacle(&claim, &object) });
        };
        // An unreadable record means that the VM is unknown, and must not be treated as no VM.
        claims::published(&object).map_err(VolumeError::Damaged)?;
        claims::sharers(&object).map_err(VolumeError::Damaged)?;
        Ok(Some(Read { claim, object, volume }))
    }

    /// Reads the claim again, if it still has this UID: a claim that was created later under the same name is not
    /// the caller's.
    async fn read_again(&self, id: &str, uid: Option<&str>) -> Result<Option<Read>, VolumeError> {
        if let (Some(uid), Some(claim)) = (uid, Claim::of_id(id)) {
            let now = self.cluster.claim(&claim).await?;
            if now.and_then(|now| now.metadata.uid).is_none_or(|now| now != uid) {
                return Ok(None);
            }
        }
        let read = self.read(id).await?;
        Ok(read.filter(|read| uid.is_none_or(|uid| read.object.metadata.uid.as_deref() == Some(uid))))
    }

    pub(super) async fn expect(&self, id: &str) -> Result<Read, VolumeError> {
        self.read(id).await?.ok_or_else(|| VolumeError::Unknown(id.to_owned()))
    }

    pub(super) async fn held_by(&self, read: &Read) -> Result<Holder, VolumeError> {
        let evidence = self.cluster.evidence(&read.claim, read.persistent_volume()).await?;
        Ok(authority::judge(&read.claim, &evidence))
    }

    /// Changes the VM on record for a volume, if the record is still `expected`.
    async fn record(
        &self,
        id: &str,
        expected: Option<&Published>,
        published: Option<&Published>,
    ) -> Result<Read, VolumeError> {
        for _ in 0..TRIES {
            let read = self.expect(id).await?;
            if read.volume.published.as_ref() != expected {
                return Err(VolumeError::Disk(DiskError::Busy(id.to_owned())));
            }
            let text = published.map(claims::record);
            match self.cluster.annotate(&read.claim, &read.object, (PUBLISHED, text)).await? {
                Written::Yes => return Ok(read),
                // Conflict: another client has changed the claim, so read it again and retry.
                Written::Conflict => {}
                Written::Gone => return Err(VolumeError::Unknown(id.to_owned())),
            }
        }
        Err(VolumeError::Disk(DiskError::Busy(id.to_owned())))
    }

    /// Waits until a claim is bound to a PersistentVolume: KubeVirt ignores it before that.
    pub(super) async fn bound(&self, id: &str) -> Result<Read, VolumeError> {
        let begun = Instant::now();
        loop {
            let read = self.expect(id).await?;
            if let Some(problem) = &read.volume.problem {
                return Err(VolumeError::Damaged(problem.clone()));
            }
            let phase = read.object.status.as_ref().and_then(|status| status.phase.as_deref());
            if phase == Some("Bound") {
                return Ok(read);
            }
            if begun.elapsed() >= self.patience.settle {
                let Claim { namespace, name } = &read.claim;
                let why = self.cluster.warning(namespace, "PersistentVolumeClaim", name).await;
                let why = why.unwrap_or_else(|| {
                    "no reason is given; a storage class that waits for the first pod never binds it"
                        .to_owned()
                });
                return Err(VolumeError::Waiting {
                    words: "the host cluster has not bound the volume's claim".to_owned(),
                    detail: format!("{namespace}/{name}: {why}"),
                });
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }
}

/// Returns the error for a claim of which it cannot be determined to which cluster it belongs.
fn unknown(claim: &Claim, object: &PersistentVolumeClaim) -> VolumeError {
    let Claim { namespace, name } = claim;
    let lacks = claims::lacks(object);
    VolumeError::Damaged(format!("the claim {namespace}/{name} has lost {lacks}; restore it"))
}

#[tonic::async_trait]
impl Volumes for Claims {
    fn classes(&self) -> Vec<Class> {
        self.copies.classes()
    }

    async fn capacity(&self, class: &str) -> Result<Capacity, VolumeError> {
        self.unread().map_or(Ok(()), |words| Err(VolumeError::Unavailable(words.to_owned())))?;
        if !self.classes().iter().any(|one| one.name == class) {
            return Err(VolumeError::NoClass(class.to_owned()));
        }
        // Storage classes do not report their capacity.
        Ok(Capacity { size: 0, free: LARGEST, largest: LARGEST })
    }

    fn rooms(&self) -> Vec<Room> {
        Vec::new()
    }

    async fn part(
        &self,
        cluster: Option<&str>,
        after: &str,
        most: usize,
    ) -> Result<Vec<Volume>, VolumeError> {
        self.copies.part(cluster, after, most)
    }

    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError> {
        self.copies.named(cluster, name)
    }

    async fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError> {
        self.copies.usage(cluster, class, coming)
    }

    async fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError> {
        self.copies.of_vm(uuid)
    }

    async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        Ok(self.read(id).await?.map(|read| read.volume))
    }

    async fn create(&self, new: NewVolume) -> Result<Volume, VolumeError> {
        if claims::place(&new.cluster).is_none() {
            let words = format!("the cluster {:?} names no namespace of the host cluster", new.cluster);
            return Err(VolumeError::Refused(words));
        }
        let claim = Claim::of_name(&new.cluster, &new.name);
        let object = claims::build(&claim, &new, &self.access_mode);
        let made = match self.cluster.make(&claim.namespace, &object).await? {
            Some(made) => claims::volume(&made),
            // The cache may be stale, and the existing claim may be the requested one.
            None => self.get(&claim.id()).await?,
        };
        match made {
            Some(Volume { problem: Some(problem), .. }) => Err(VolumeError::Damaged(problem)),
            Some(volume) if (&volume.cluster, &volume.name) == (&new.cluster, &new.name) => {
                self.copies.shows(&claim, self.patience.look).await;
                Ok(volume)
            }
            _ => Err(VolumeError::Refused(format!(
                "the host cluster already has a claim {}/{}, which is not that of this volume",
                claim.namespace, claim.name
            ))),
        }
    }

    async fn holder(&self, id: &str) -> Result<Holder, VolumeError> {
        let read = self.expect(id).await?;
        let evidence = self.cluster.evidence(&read.claim, read.persistent_volume()).await?;
        let remembered = read.volume.published.as_ref().map(|published| published.uuid.as_str());
        Ok(authority::judge_remembered(&read.claim, remembered, &evidence))
    }

    async fn remove(&self, id: &str) -> Result<(), VolumeError> {
        let begun = Instant::now();
        let mut first = None;
        loop {
            let Some(read) = self.read_again(id, first.as_deref()).await? else { return Ok(()) };
            first.clone_from(&read.object.metadata.uid);
            if read.object.metadata.deletion_timestamp.is_none() {
                match self.held_by(&read).await? {
                    Holder::Off => {}
                    Holder::On(place) => {
                        return Err(VolumeError::InUse(format!("the VM {} has it", place.vm)));
                    }
                    Holder::Unknown(why) => return Err(VolumeError::InUse(why)),
                }
                self.retire(&read, begun + self.patience.settle).await?;
                self.cluster.delete(&read.claim, &read.object).await?;
            } else if begun.elapsed() >= self.patience.settle {
                let finalizers = read.object.metadata.finalizers.unwrap_or_default().join(", ");
                return Err(VolumeError::Waiting {
                    words: "the host cluster has not deleted the volume's claim yet".to_owned(),
                    detail: format!("{}/{} waits for {finalizers}", read.claim.namespace, read.claim.name),
                });
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    async fn grow(&self, id: &str, size: u64, _: Option<&str>) -> Result<u64, VolumeError> {
        let read = self.expect(id).await?;
        if read.volume.size < size && self.cluster.resize(&read.claim, size).await? == Written::Gone {
            return Err(VolumeError::Unknown(id.to_owned()));
        }
        let begun = Instant::now();
        loop {
            let read = self.expect(id).await?;
            let is_bound = read.object.spec.as_ref().is_some_and(|spec| spec.volume_name.is_some());
            // Harvester expands a share when it is served.
            let is_unserved = read.volume.sharers.as_ref().is_some_and(Vec::is_empty);
            if !is_bound || is_unserved || claims::capacity(&read.object).is_some_and(|there| there >= size) {
                return Ok(read.volume.size.max(size));
            }
            if begun.elapsed() >= self.patience.settle {
                let Claim { namespace, name } = &read.claim;
                let why = self.cluster.warning(namespace, "PersistentVolumeClaim", name).await;
                return Err(VolumeError::Waiting {
                    words: "the host cluster has not expanded the volume yet".to_owned(),
                    detail: format!("{namespace}/{name}: {}", why.unwrap_or_default()),
                });
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    async fn plug(&self, id: &str, published: Published, vm: &str) -> Result<Plugged, VolumeError> {
        let read = self.bound(id).await?;
        if read.volume.sharers.is_some() {
            return Err(VolumeError::Refused(format!("the volume {id} is a share, which cannot be plugged")));
        }
        let before = read.volume.published.clone();
        if before.as_ref().is_some_and(|before| before.uuid != published.uuid) {
            return Err(VolumeError::Disk(DiskError::Busy(id.to_owned())));
        }
        if before.as_ref() != Some(&published) {
            self.record(id, before.as_ref(), Some(&published)).await?;
        }
        // Plug only after this VM is on record, so that concurrent requests find the volume taken.
        let Attempt { was_told, outcome } = self.attempt(&read, &published, vm).await;
        match outcome {
            Ok(disk) => Ok(Plugged { disk, bus: Bus::Scsi }),
            Err(error) => {
                let is_free = async || self.held_by(&read).await.is_ok_and(|holder| holder == Holder::Off);
                if before.is_none() && (!was_told || is_free().await) {
                    self.record(id, Some(&published), None).await?;
                }
                Err(error)
            }
        }
    }

    async fn unplug(
        &self,
        id: &str,
        vm: &str,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError> {
        let read = self.expect(id).await?;
        let Some(before) = read.volume.published.clone() else { return Ok(()) };
        let leaving = Published { leaving: true, ..before.clone() };
        if before != leaving {
            self.record(id, Some(&before), Some(&leaving)).await?;
        }
        let place = Place { uuid: before.uuid.clone(), vm: vm.to_owned() };
        match self.detach(&read, &place, patience, &*guest).await {
            Ok(()) => match self.record(id, Some(&leaving), None).await {
                // Another client has deleted the claim, which remained only because it was in use.
                Err(VolumeError::Unknown(_)) => Ok(()),
                recorded => recorded.map(drop),
            },
            Err(error) => {
                let stays = matches!(
                    error,
                    VolumeError::Disk(
                        DiskError::NotReleased(_)
                            | DiskError::GuestRefuses(_)
                            | DiskError::Untold(_)
                            | DiskError::Held(_)
                    )
                );
                if stays {
                    self.record(id, Some(&leaving), Some(&Published { leaving: false, ..before })).await?;
                }
                Err(error)
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
        let read = self.expect(id).await?;
        self.check_ours(&read, from).await?;
        if read.volume.published.is_none() {
            // The VM stays on record for as long as it has the volume.
            let (uuid, vm, node) = (from.uuid.clone(), from.vm.clone(), from.uuid.clone());
            let found = Published { uuid, vm, node, read_only: false, leaving: true };
            self.record(id, None, Some(&found)).await?;
            return self.unplug(id, &from.vm, patience, guest).await;
        }
        self.unplug_from(&read, from, &*guest).await
    }

    async fn recognise(&self, id: &str, published: Published) -> Result<bool, VolumeError> {
        let read = self.expect(id).await?;
        let is_there = self.has_as_is(&read, &published).await?;
        if is_there && read.volume.published.is_none() {
            self.record(id, None, Some(&published)).await?;
        }
        Ok(is_there)
    }

    async fn concede(&self, id: &str) -> Result<Option<Place>, VolumeError> {
        let read = self.expect(id).await?;
        let record = read.volume.published.as_ref();
        let evidence = self.cluster.evidence(&read.claim, read.persistent_volume()).await?;
        let holder = authority::judge(&read.claim, &evidence);
        let Some(other) = holder.other_than(record) else { return Ok(None) };
        match self.check_ours(&read, &other).await {
            // The volume was plugged by guestlet, so it may be unplugged.
            Ok(()) => return Ok(None),
            Err(VolumeError::Disk(DiskError::Held(_))) => {}
            Err(error) => return Err(error),
        }
        if record.is_some() {
            if let Some(why) = authority::leftover(&other.uuid, &evidence) {
                return Err(still_held(why));
            }
            self.record(id, record, None).await?;
        }
        Ok(Some(other))
    }

    async fn forget(&self, id: &str) -> Result<(), VolumeError> {
        let read = self.expect(id).await?;
        match read.volume.published {
            None => Ok(()),
            Some(published) => self.record(id, Some(&published), None).await.map(drop),
        }
    }

    async fn places(&self, _: &str) -> Result<Option<usize>, VolumeError> {
        Ok(None)
    }

    async fn plugged(&self, vm: &str) -> Result<BTreeSet<String>, VolumeError> {
        let Some((namespace, name)) = vm.split_once('/') else { return Err(DiskError::UnknownVm.into()) };
        let seen = self.cluster.seen(namespace, name).await?.ok_or(DiskError::UnknownVm)?;
        let wanted = seen.vm.spec.template.spec.volumes.iter();
        let runs = seen.instance.iter().flat_map(|instance| instance.spec.volumes.iter());
        let listed = wanted.chain(runs).map(|volume| (&volume.name, volume.claim()));
        let coming = seen.vm.asked_for().map(|one| (&one.name, one.volume_source.claim()));
        let uid = seen.vm.metadata.uid.as_deref().unwrap_or_default();
        let of = |(volume, claim): (&String, Option<&str>)| {
            let claim = Claim { namespace: namespace.to_owned(), name: claim?.to_owned() };
            // A volume that another program has plugged counts only if it is published to this VM.
            let is_ours = volume.starts_with(PREFIX)
                || *volume == claim.name && self.copies.is_published(&claim, &uid.to_lowercase());
            is_ours.then(|| claim.id())
        };
        Ok(listed.chain(coming).filter_map(of).collect())
    }

    fn serial(&self, id: &str) -> Option<String> {
        Claim::of_id(id).map(|claim| claim.serial())
    }

    fn id(&self, cluster: &str, handle: &str) -> String {
        let place = claims::place(cluster).filter(|_| is_label(handle));
        place.map_or_else(|| handle.to_owned(), |(namespace, _)| format!("{namespace}.{handle}"))
    }

    fn may_be_of(&self, id: &str, cluster: &str) -> bool {
        let namespace = claims::place(cluster).map(|(namespace, _)| namespace);
        Claim::of_id(id).is_none_or(|claim| namespace == Some(&claim.namespace))
    }

    fn handle(&self, id: &str) -> String {
        // Harvester's driver has used this handle, and the PersistentVolume still contains it.
        let adopted = Claim::of_id(id).filter(|claim| !claim.is_made() && is_label(&claim.name));
        adopted.map_or_else(|| id.to_owned(), |claim| claim.name)
    }

    fn other_names(&self, id: &str) -> Vec<String> {
        let adopted = Claim::of_id(id).filter(|claim| !claim.is_made());
        adopted.map_or_else(Vec::new, |claim| vec![claim.alias(), claim.name])
    }

    fn out_of_turn(&self) -> Option<&'static str> {
        let words = "this replica of the controller is not the leader; ask the one that the Lease guestlet-controller names";
        (!self.cluster.is_changeable()).then_some(words)
    }

    fn unread(&self) -> Option<&'static str> {
        (!self.copies.are_there()).then_some(UNREAD)
    }

    fn may_have(&self, vm: &str) -> bool {
        self.listing.as_ref().is_none_or(|listing| listing.has(vm))
    }

    fn shares(&self) -> Option<&dyn Shares> {
        Some(self)
    }

    fn are_of_one_host(&self) -> bool {
        false
    }

    /// KubeVirt reports what its VMs are to have and what it has done about it, not what the guest sees.
    fn needs_the_guests_word(&self) -> bool {
        true
    }
}
