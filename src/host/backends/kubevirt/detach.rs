//! Unplugs a volume from a VM: asks its guest to release it, requests the removal from KubeVirt, and then
//! checks that nothing uses it any longer.

use std::time::Duration;

use tokio::time::Instant;

use super::adopting::{held, leaving};
use super::hotplug::seen::{Released, Seen, Stage};
use super::names::Claim;
use super::objects;
use super::read::Read;
use super::volumes::Claims;
use crate::host::backends::disks::GuestSide;
use crate::host::backends::volumes::{Holder, Place, VolumeError};

impl Claims {
    /// Waits until a volume that the VM at `from` has released has no holder. If another VM holds it, this does not
    /// wait, because that VM may keep it indefinitely.
    async fn off(&self, read: &Read, from: &Place, patience: Duration) -> Result<(), VolumeError> {
        let begun = Instant::now();
        let mut pause = self.patience.poll;
        loop {
            let why = match self.held_by(read).await? {
                Holder::Off => return Ok(()),
                Holder::On(place) => {
                    let why = format!("the VM {} lists it", place.vm);
                    if !place.uuid.eq_ignore_ascii_case(&from.uuid) {
                        return Err(still_held(why));
                    }
                    why
                }
                Holder::Unknown(why) => why,
            };
            if begun.elapsed() >= patience {
                return Err(still_held(why));
            }
            // Each check reads all objects that may use the claim.
            let left = patience.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(self.patience.look);
        }
    }

    /// Unplugs a volume from a VM after its guest has released it. All decisions are based on what the VM has now.
    pub(super) async fn unplug_from(
        &self,
        read: &Read,
        from: &Place,
        guest: &dyn GuestSide,
    ) -> Result<(), VolumeError> {
        let Claim { namespace, .. } = &read.claim;
        let name = from.vm.rsplit('/').next().unwrap_or_default();
        let seen = self.cluster.seen_in_full(namespace, name).await?;
        let is_its = |seen: &&Seen| {
            seen.vm.metadata.uid.as_ref().is_some_and(|uid| uid.eq_ignore_ascii_case(&from.uuid))
        };
        let (disk, known) = leaving(read, seen.as_ref().filter(is_its))?;
        // A VM that has not started has no agent to ask about a disk that another program has plugged; KubeVirt is
        // then not asked to remove the disk.
        let is_asked = |seen: &Seen| {
            seen.instance.as_ref().is_some_and(has_guest) && (!disk.as_is || seen.run().has_started)
        };
        let runs = seen.as_ref().is_some_and(is_asked);
        let stage = seen.as_ref().map_or(Stage::Absent, |seen| seen.stage(&disk.volume()));
        // A disk that another program plugged and that KubeVirt is already removing may have disappeared from its
        // guest.
        let is_there = stage != Stage::Absent && !(disk.as_is && matches!(stage, Stage::Leaving(_)));
        let mut at = None;
        if runs && is_there {
            let unknown = |why| {
                held(format!("the guest cannot be asked to release the volume {}: {why}", disk.volume()))
            };
            guest.release(&known.map_err(unknown)?).await?;
            at = Some(Instant::now());
        }
        // Use the run from before the guest was asked: one that started since may be using the disk. If the guest was
        // not asked about a disk of another program, no run counts, because the disk may be plugged again.
        let was_asked = is_there || !disk.as_is;
        let run = seen.filter(|_| was_asked || !runs).map(|seen| seen.run()).unwrap_or_default();
        let released = Released { run, at, by_force: guest.is_forced() };
        self.hotplug.unplug(&from.vm, &from.uuid, disk, released).await
    }

    /// Unplugs a volume from a VM, and waits until it has no holder.
    pub(super) async fn detach(
        &self,
        read: &Read,
        from: &Place,
        patience: Duration,
        guest: &dyn GuestSide,
    ) -> Result<(), VolumeError> {
        self.unplug_from(read, from, guest).await?;
        self.off(read, from, patience).await
    }
}

/// Returns the error for a volume that is still in use where it is to be unplugged; `detail` describes the
/// user, for the host.
pub(super) fn still_held(detail: String) -> VolumeError {
    VolumeError::Waiting { words: "the host cluster has not released the volume yet".to_owned(), detail }
}

/// Reports whether a guest may be running in a VM, judging by the phase of its run.
fn has_guest(run: &objects::Instance) -> bool {
    !matches!(run.status.phase.as_str(), "" | "Pending" | "Scheduling" | "Succeeded" | "Failed")
}
