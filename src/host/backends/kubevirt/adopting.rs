//! Handles claims that another program may have plugged: one that still runs and does not know about guestlet.
//! This is expected for claims that guestlet did not create; for the others, an administrator may have done it.
//! Each decision is based on what the API server says at that moment.

use super::adopted::{self, AsIs, Plugged};
use super::authority;
use super::hotplug::patch::Disk;
use super::hotplug::seen::{Seen, Stage};
use super::read::Read;
use super::volumes::Claims;
use crate::host::backends::disks::{DiskError, Known};
use crate::host::backends::volumes::{Holder, Place, Published, VolumeError};

/// Outcome of an attempt to plug a volume.
pub(super) struct Attempt {
    /// True if a request was sent to KubeVirt.
    pub(super) was_told: bool,
    /// Property by which the guest identifies the disk.
    pub(super) outcome: Result<Known, VolumeError>,
}

impl Read {
    /// Reports whether guestlet did not create the claim.
    pub(super) fn is_adopted(&self) -> bool {
        adopted::is_adopted(&self.claim, &self.object)
    }
}

impl Claims {
    /// Plugs a volume into the VM with this present name; succeeds if the VM already has it.
    pub(super) async fn attempt(&self, read: &Read, published: &Published, vm: &str) -> Attempt {
        match self.try_to_plug(read, published, vm).await {
            Attempt { outcome: Err(VolumeError::InUse(why)), .. }
                if read.is_adopted() && self.must_give_way(read, &published.uuid, vm).await =>
            {
                Attempt { was_told: true, outcome: Err(VolumeError::Contested(why)) }
            }
            attempt => attempt,
        }
    }

    /// Reports whether guestlet has plugged an adopted volume into a VM and another VM or pod certainly has it as
    /// well. What may be a leftover of a migration does not count.
    async fn must_give_way(&self, read: &Read, uuid: &str, vm: &str) -> bool {
        let Ok(Some(seen)) = self.see(uuid, vm).await else { return false };
        if adopted::plugged(&seen, &read.claim) != Plugged::Ours {
            return false;
        }
        let evidence = self.cluster.evidence(&read.claim, read.persistent_volume()).await;
        evidence.is_ok_and(|evidence| authority::has_rival(uuid, &read.claim, &evidence))
    }

    async fn try_to_plug(&self, read: &Read, published: &Published, vm: &str) -> Attempt {
        match self.before(read, published, vm).await {
            Ok(None) => {}
            Ok(Some(known)) => return Attempt { was_told: false, outcome: Ok(known) },
            Err(error) => return Attempt { was_told: false, outcome: Err(error) },
        }
        let disk = Disk { claim: read.claim.clone(), read_only: published.read_only, as_is: false };
        let plugged = async {
            self.hotplug.plug(vm, &published.uuid, disk).await?;
            if read.is_adopted() {
                // The other program plugs volumes without asking guestlet, so check again after plugging.
                self.is_theirs_alone(read, &published.uuid).await?;
                self.is_there_once(read, &published.uuid, vm).await?;
            }
            Ok(Known::serial(read.claim.serial()))
        };
        Attempt { was_told: true, outcome: plugged.await }
    }

    /// Checks, before KubeVirt is asked to plug the volume, that nothing else has it. Returns how the guest
    /// identifies the disk if the VM has the volume "as it is".
    async fn before(
        &self,
        read: &Read,
        published: &Published,
        vm: &str,
    ) -> Result<Option<Known>, VolumeError> {
        match self.held_by(read).await? {
            Holder::Off => return Ok(None),
            Holder::On(place) if place.uuid == published.uuid => {}
            Holder::On(place) => return Err(VolumeError::InUse(format!("the VM {} has it", place.vm))),
            Holder::Unknown(why) => return Err(VolumeError::InUse(why)),
        }
        let Some(seen) = self.see(&published.uuid, vm).await? else { return Ok(None) };
        let as_is = match adopted::plugged(&seen, &read.claim) {
            Plugged::Not | Plugged::Ours => return Ok(None),
            Plugged::Twice(why) | Plugged::Otherwise(why) => return Err(VolumeError::Refused(why)),
            Plugged::AsIs(_) if !read.is_adopted() => return Err(VolumeError::Refused(theirs(vm, read))),
            Plugged::AsIs(as_is) => as_is,
        };
        let stage = seen.stage(&read.claim.name);
        if stage != Stage::Ready {
            let words =
                "the volume is being plugged into the node or unplugged by a program other than guestlet"
                    .to_owned();
            return Err(VolumeError::Waiting { words, detail: format!("the volume {}", stage.words()) });
        }
        let known = usable(as_is, published.read_only)?;
        self.is_theirs_alone(read, &published.uuid).await?;
        Ok(Some(known))
    }

    /// Checks that the VM with this UUID has a volume and that nothing else uses it.
    async fn is_theirs_alone(&self, read: &Read, uuid: &str) -> Result<(), VolumeError> {
        let evidence = self.cluster.evidence(&read.claim, read.persistent_volume()).await?;
        match authority::judge(&read.claim, &evidence) {
            Holder::On(place) if place.uuid == uuid => {}
            Holder::On(place) => return Err(VolumeError::InUse(format!("the VM {} has it", place.vm))),
            Holder::Off => {
                return Err(VolumeError::InUse("another program has unplugged it meanwhile".to_owned()));
            }
            Holder::Unknown(why) => return Err(VolumeError::InUse(why)),
        }
        authority::stranger(uuid, &evidence).map_or(Ok(()), |who| Err(VolumeError::InUse(who)))
    }

    /// Checks that the VM does not have a volume a second time, other than as plugged by guestlet: its guest would
    /// see two disks with the same data.
    async fn is_there_once(&self, read: &Read, uuid: &str, vm: &str) -> Result<(), VolumeError> {
        match self.see(uuid, vm).await?.map(|seen| adopted::plugged(&seen, &read.claim)) {
            Some(Plugged::Twice(why)) => Err(VolumeError::InUse(why)),
            _ => Ok(()),
        }
    }

    /// Reads the VM with this name, if its UUID is this one.
    async fn see(&self, uuid: &str, vm: &str) -> Result<Option<Seen>, VolumeError> {
        let Some((namespace, name)) = vm.split_once('/') else { return Ok(None) };
        let seen = self.cluster.seen_in_full(namespace, name).await?;
        let is_it =
            |seen: &Seen| seen.vm.metadata.uid.as_ref().is_some_and(|uid| uid.eq_ignore_ascii_case(uuid));
        Ok(seen.filter(is_it))
    }

    /// Reports whether the VM on record for an adopted volume has it in the way that another program plugged it.
    pub(super) async fn has_as_is(&self, read: &Read, published: &Published) -> Result<bool, VolumeError> {
        if !read.is_adopted() {
            return Ok(false);
        }
        let seen = self.see(&published.uuid, &published.vm).await?;
        Ok(seen.is_some_and(|seen| matches!(adopted::plugged(&seen, &read.claim), Plugged::AsIs(_))))
    }

    /// Refuses to take back a volume that guestlet has not plugged: it was not put there for guestlet, which must
    /// not unplug it.
    pub(super) async fn check_ours(&self, read: &Read, from: &Place) -> Result<(), VolumeError> {
        let Some(seen) = self.see(&from.uuid, &from.vm).await? else { return Ok(()) };
        match adopted::plugged(&seen, &read.claim) {
            Plugged::Not | Plugged::Ours => Ok(()),
            Plugged::AsIs(_) => Err(held(theirs(&from.vm, read))),
            Plugged::Twice(why) | Plugged::Otherwise(why) => Err(held(why)),
        }
    }
}

/// Describes that a VM has a claim in the way that another program plugged it.
fn theirs(vm: &str, read: &Read) -> String {
    let name = &read.claim.name;
    format!(
        "the VM {vm} has the claim {name}, plugged by a program other than guestlet, which has to unplug it"
    )
}

/// Returns the disk that a VM is to release, with the property by which its guest identifies that disk; or the
/// reason why the guest cannot be asked to release it.
///
/// # Errors
/// If guestlet may not unplug it.
pub(super) fn leaving(
    read: &Read,
    seen: Option<&Seen>,
) -> Result<(Disk, Result<Known, String>), VolumeError> {
    let claim = &read.claim;
    let disk = |as_is| Disk { claim: claim.clone(), read_only: false, as_is };
    let plugged = seen.filter(|_| read.is_adopted()).map(|seen| adopted::plugged(seen, claim));
    match plugged.unwrap_or(Plugged::Ours) {
        // If the VM has it twice, guestlet's disk is identified by guestlet's own serial number.
        Plugged::Not | Plugged::Ours | Plugged::Twice(_) => {
            Ok((disk(false), Ok(Known::serial(claim.serial()))))
        }
        Plugged::AsIs(AsIs { known, .. }) => Ok((disk(true), known)),
        Plugged::Otherwise(why) => Err(held(why)),
    }
}

pub(super) fn held(words: String) -> VolumeError {
    VolumeError::Disk(DiskError::Held(words))
}

/// Returns the property by which a guest identifies a disk plugged "as it is", if the disk suits the requested
/// use.
fn usable(as_is: AsIs, read_only: bool) -> Result<Known, VolumeError> {
    const ADVICE: &str = "have the program that plugged it unplug it, and guestlet will plug it itself";
    let refused = |why: &str| {
        VolumeError::Refused(format!(
            "a program other than guestlet has plugged the volume, and {why}; {ADVICE}"
        ))
    };
    let known = as_is.known.map_err(|why| refused(&why))?;
    if as_is.read_only != read_only {
        let how = if as_is.read_only { "read-only" } else { "writable" };
        return Err(refused(&format!("it is {how}")));
    }
    Ok(known)
}
