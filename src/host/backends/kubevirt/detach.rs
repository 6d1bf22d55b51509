//! Takes a volume out of a VM: its guest is asked, KubeVirt is told, and then nobody must be seen to have it any more.

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
    /// Waits until nobody holds a volume that the VM at `from` has let go of; not for another VM, which keeps it for as long as it likes.
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
            // Each look reads all that may use the claim.
            let left = patience.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(self.patience.look);
        }
    }

    /// Has a VM let go of a volume, once its guest has released it. All of it is decided by what the VM has now.
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
        // One that has not started has no agent yet, which could not say so of what another program has plugged: KubeVirt is not told then.
        let is_asked = |seen: &Seen| {
            seen.instance.as_ref().is_some_and(has_guest) && (!disk.as_is || seen.run().has_started)
        };
        let runs = seen.as_ref().is_some_and(is_asked);
        let stage = seen.as_ref().map_or(Stage::Absent, |seen| seen.stage(&disk.volume()));
        // What another program has plugged and KubeVirt is taking away, its guest may not have any more.
        let is_there = stage != Stage::Absent && !(disk.as_is && matches!(stage, Stage::Leaving(_)));
        let mut at = None;
        if runs && is_there {
            let unknown = |why| {
                held(format!("the guest cannot be asked to release the volume {}: {why}", disk.volume()))
            };
            guest.release(&known.map_err(unknown)?).await?;
            at = Some(Instant::now());
        }
        // As it was before the guest was asked: what has changed since may have another one. One that was not asked says nothing of what
        // is plugged again.
        let was_asked = is_there || !disk.as_is;
        let run = seen.filter(|_| was_asked || !runs).map(|seen| seen.run()).unwrap_or_default();
        let released = Released { run, at, by_force: guest.is_forced() };
        self.hotplug.unplug(&from.vm, &from.uuid, disk, released).await
    }

    /// Takes a volume out of a VM, and waits until nobody has it.
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

/// Something of a volume is still where it is to be taken away; in words what, for the host.
pub(super) fn still_held(detail: String) -> VolumeError {
    VolumeError::Waiting { words: "the host cluster has not released the volume yet".to_owned(), detail }
}

/// Whether a guest may run in a VM, as its run says.
fn has_guest(run: &objects::Instance) -> bool {
    !matches!(run.status.phase.as_str(), "" | "Pending" | "Scheduling" | "Succeeded" | "Failed")
}
