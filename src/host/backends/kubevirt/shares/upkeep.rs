//! Checks periodically that shares are served as their claims require, and restores the required state: after
//! manual changes, after interrupted operations, and when Harvester's networkfs-manager is stuck.
//!
//! The cached claims determine what to check; everything is read again before it is changed. A failure with one
//! share does not keep the others from being checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::object::{NetworkFilesystem, Step, VOLUME, end, serve, unstick};
use crate::host::backends::kubevirt::names::Claim;
use crate::host::backends::kubevirt::volumes::Claims;
use crate::host::backends::volumes::{Sharer, Shares as _, Volume, VolumeError};

/// Interval between checks that the VMs with access to shares still exist.
const VMS: Duration = Duration::from_secs(600);
/// Number of settle timeouts after which an unchanged object in transition counts as stuck.
const STILL: u32 = 3;

/// State that is kept between the checks.
#[derive(Debug)]
pub struct Upkeep {
    /// True if there are objects, or may be.
    has_objects: AtomicBool,
    /// Version of each object in transition and the time when that version was first seen, by UID.
    since: Mutex<BTreeMap<String, (String, Instant)>>,
    /// Time of the last check for VMs.
    vms: Mutex<Option<Instant>>,
}

impl Default for Upkeep {
    fn default() -> Self {
        Self { has_objects: AtomicBool::new(true), since: Mutex::default(), vms: Mutex::default() }
    }
}

impl Upkeep {
    /// Returns the names of the objects that have been stuck for at least `patience`.
    fn still(&self, objects: &[NetworkFilesystem], patience: Duration) -> BTreeSet<String> {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = BTreeMap::new();
        let mut still = BTreeSet::new();
        for object in objects.iter().filter(|object| unstick(object).is_some()) {
            let (uid, version) = (object.metadata.uid.clone(), object.metadata.resource_version.clone());
            let (uid, version) = (uid.unwrap_or_default(), version.unwrap_or_default());
            let before = since.remove(&uid).filter(|(seen, _)| *seen == version);
            let (_, at) = now.entry(uid).or_insert(before.unwrap_or((version, Instant::now())));
            if at.elapsed() >= patience {
                still.insert(object.name().to_owned());
            }
        }
        *since = now;
        still
    }

    /// Reports whether the next check for VMs is due, and restarts the interval if so.
    fn is_due(&self) -> bool {
        let mut last = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| last.elapsed() >= VMS);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

fn sharers(volume: &Volume) -> &[Sharer] {
    volume.sharers.as_deref().unwrap_or_default()
}

/// Reports whether an object is in the state that its claim requires, or on its way there.
fn is_right(object: &NetworkFilesystem, volume: Option<&Volume>) -> bool {
    let step = match volume {
        None => return false,
        Some(volume) if sharers(volume).is_empty() => end(Some(object)),
        Some(_) => serve(Some(object)),
    };
    matches!(step, Step::Done | Step::Wait)
}

impl Claims {
    /// Restores the state that the claims require for all shares.
    ///
    /// # Errors
    /// If the objects cannot be listed. A failure to restore a single share is logged, and retried at the next
    /// check.
    pub(super) async fn put_shares_right(&self) -> Result<(), VolumeError> {
        // Before all claims are listed, the set of shares is unknown; the next check will do the work.
        let Some(volumes) = self.copies.volumes() else { return Ok(()) };
        let shares = volumes.into_iter().filter(|volume| volume.sharers.is_some());
        let shares: BTreeMap<_, _> = shares.map(|volume| (volume.id.clone(), volume)).collect();
        if shares.is_empty() && !self.upkeep.has_objects.load(Ordering::Relaxed) {
            return Ok(());
        }
        let objects = match self.cluster.our_shares().await {
            // If the kind does not exist there are no leftovers, and nothing can be done.
            Err(VolumeError::Refused(_)) if shares.is_empty() => Vec::new(),
            objects => objects?,
        };
        self.upkeep.has_objects.store(!objects.is_empty(), Ordering::Relaxed);
        if self.upkeep.is_due() {
            for share in shares.values() {
                told(&share.id, self.forget_vms(share).await);
            }
        }
        let still = self.upkeep.still(&objects, self.patience.settle * STILL);
        let mut served = BTreeSet::new();
        for object in &objects {
            let Some(id) = object.text(VOLUME) else { continue };
            served.insert(id);
            let is_still = still.contains(object.name());
            if is_still || !is_right(object, shares.get(id)) {
                told(id, Box::pin(self.put_right(id, object, is_still)).await);
            }
        }
        for (id, share) in &shares {
            if !served.contains(id.as_str()) && !sharers(share).is_empty() {
                told(id, self.make_again(id).await);
            }
        }
        Ok(())
    }

    /// Serves or ends one share, as its claim requires.
    async fn put_right(
        &self,
        id: &str,
        object: &NetworkFilesystem,
        is_still: bool,
    ) -> Result<(), VolumeError> {
        let Some(claim) = Claim::of_id(id) else { return Ok(()) };
        let read = match self.read(id).await? {
            Some(read) if read.persistent_volume() == Some(object.name()) => read,
            // The claim has lost its label or its cluster, and nodes may still use the share.
            None if self.cluster.claim(&claim).await?.is_some() => {
                tracing::debug!(
                    volume = id,
                    "the claim of a share no longer belongs to guestlet; leaving it alone"
                );
                return Ok(());
            }
            // The claim no longer exists, and the name of its PersistentVolume is never reused.
            _ => return self.clear(object, is_still).await,
        };
        let step = match unstick(object).filter(|_| is_still) {
            Some(state) => Step::Want(state),
            None if read.sharers().is_empty() => return self.end_unshared(id).await,
            None => serve(Some(object)),
        };
        if let Step::Want(state) = step {
            tracing::warn!(volume = id, "a share is not served as it should be: {}", object.words());
            self.cluster.want_share(object, state, read.version()).await?;
        }
        Ok(())
    }

    /// Creates the object of a share again, if VMs may mount the share and the object was deleted.
    async fn make_again(&self, id: &str) -> Result<(), VolumeError> {
        let Some(read) = self.read(id).await? else { return Ok(()) };
        let is_going = read.object.metadata.deletion_timestamp.is_some();
        let Some(volume) = read.persistent_volume().filter(|_| !is_going && !read.sharers().is_empty())
        else {
            return Ok(());
        };
        if self.cluster.share(volume).await?.is_none() {
            tracing::warn!(volume = id, "a share that nodes have was not served; serving it again");
            self.cluster.make_share(volume, id, read.version()).await?;
        }
        Ok(())
    }

    /// Revokes the access of VMs that no longer exist for certain.
    async fn forget_vms(&self, share: &Volume) -> Result<(), VolumeError> {
        for Sharer { uuid, vm, .. } in sharers(share) {
            let Some((namespace, name)) = vm.split_once('/') else { continue };
            if !self.cluster.has_vm(namespace, name, uuid).await? {
                tracing::warn!(
                    volume = share.id,
                    vm,
                    "a VM that had a share no longer exists; removing its record"
                );
                self.unshare(&share.id, Some(uuid)).await?;
            }
        }
        Ok(())
    }
}

fn told(volume: &str, outcome: Result<(), VolumeError>) {
    if let Err(error) = outcome {
        tracing::debug!(volume, %error, "cannot correct a share");
    }
}
