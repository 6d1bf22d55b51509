//! Determines which VM holds a volume of a pool, from its QEMU and from the [use](super::super::claim) of its
//! image. The decision is made in [`authority`](super::super::super::authority).

use std::path::PathBuf;

use super::super::super::authority::{Open, Verdict, judge};
use super::super::super::disks::DiskError;
use super::super::super::volumes::{Holder, Place, VolumeError};
use super::super::claim::Use;
use super::Pools;
use super::entry::Entry;
use super::store::Store;

impl Pools {
    /// Returns the path of the image with links resolved, as QEMU is given it; unresolved if that fails.
    async fn image(&self, entry: &Entry) -> Result<PathBuf, VolumeError> {
        let image = entry.image();
        let resolve = move |_: &Store| Ok(image.canonicalize().unwrap_or(image));
        self.access.in_pool_of(&entry.record.id, resolve).await
    }

    /// Checks that the QEMU of the VM with this name, which reports that it no longer has the disk, does not have
    /// its image open otherwise.
    ///
    /// # Errors
    /// If it has the image open under another name, such as a disk that it was started with, or does not answer.
    pub(super) async fn check_closed(&self, entry: &Entry, vm: &str) -> Result<(), VolumeError> {
        let image = self.image(entry).await?;
        match self.hotplug.has_open(vm, &image).await? {
            None => Ok(()),
            Some(how) => Err(DiskError::Held(format!(
                "QEMU of the VM {vm} has the image {} open {how}, which guestlet has not plugged as this \
                 volume; make QEMU close it, or start the VM without it, and repeat the call",
                image.display()
            ))
            .into()),
        }
    }

    /// Makes QEMU close the leftover of a disk whose volume is to be removed and is not published to any VM: a
    /// block node without a device, left by an attempt to plug it that was interrupted or completed late. Otherwise
    /// the image would stay in use for as long as the VM runs. Other uses of the image are left alone, and are
    /// detected when it is removed.
    pub(super) async fn close_left(&self, entry: &Entry) {
        let (id, serial) = (entry.record.id.clone(), entry.serial());
        match self.access.in_pool_of(&entry.record.id, move |store| store.look(&id)).await {
            Ok(Some(Use::Somebody | Use::Untold(_))) => {}
            Ok(None | Some(Use::Nobody(_))) | Err(_) => return,
        }
        let Ok(image) = self.image(entry).await else { return };
        while let Some(place) = self.hotplug.who_has(serial, &image).await {
            match self.hotplug.close_left(&place.vm, serial.to_owned()).await {
                Ok(true) => {
                    tracing::info!(
                        vm = place.vm,
                        serial,
                        "closed a block node that no disk used, of a volume to be removed"
                    );
                }
                Ok(false) => return,
                Err(error) => {
                    return tracing::debug!(vm = place.vm, serial, %error, "a block node may remain");
                }
            }
        }
    }

    /// Determines the holder of a volume.
    pub(super) async fn ask(&self, entry: &Entry) -> Result<Holder, VolumeError> {
        let (id, serial) = (&entry.record.id, entry.serial());
        let image = self.image(entry).await?;
        let remembered = match &entry.record.published {
            Some(published) => {
                let said = self.hotplug.ask(published.uuid(), serial, &image).await;
                Some((Place { uuid: published.uuid().to_owned(), vm: published.vm().to_owned() }, said))
            }
            None => None,
        };
        let remembered = remembered.as_ref().map(|(place, said)| (place, said));
        if let Verdict::Is(holder) = judge(remembered, None) {
            return Ok(holder);
        }
        let wanted = id.clone();
        let open = match self.access.in_pool_of(id, move |store| store.look(&wanted)).await? {
            None | Some(Use::Nobody(_)) => Open::Nobody,
            Some(Use::Somebody) => match self.hotplug.who_has(serial, &image).await {
                Some(place) => Open::By(place),
                None => Open::BySomebody(format!("its image {}", image.display())),
            },
            Some(Use::Untold(why)) => Open::Untold(format!("{}: {why}", image.display())),
        };
        match judge(remembered, Some(open)) {
            Verdict::Is(holder) => Ok(holder),
            Verdict::Look => Ok(Holder::Unknown("cannot examine an image".to_owned())),
        }
    }
}
