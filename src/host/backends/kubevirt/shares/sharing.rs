//! Carries out the steps that serve and end shares.

use std::time::Duration;

use tokio::time::Instant;

use super::object::{MARK, NetworkFilesystem, State, Step, end, serve, unstick};
use crate::host::backends::disks::DiskError;
use crate::host::backends::kubevirt::api::Written;
use crate::host::backends::kubevirt::claims::{self, SHARERS};
use crate::host::backends::kubevirt::read::Read;
use crate::host::backends::kubevirt::volumes::Claims;
use crate::host::backends::volumes::{Export, Sharer, Shares, VolumeError};

/// Maximum number of attempts at a change that conflicts with those of others.
const TRIES: usize = 8;

impl Read {
    pub(super) fn sharers(&self) -> &[Sharer] {
        self.volume.sharers.as_deref().unwrap_or_default()
    }

    /// Returns the version in which the claim was read.
    pub(super) fn version(&self) -> &str {
        self.object.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

#[tonic::async_trait]
impl Shares for Claims {
    async fn check(&self) -> Result<(), VolumeError> {
        self.cluster.our_shares().await.map(drop)
    }

    async fn share(&self, id: &str, with: Sharer) -> Result<Export, VolumeError> {
        self.bound(id).await?;
        let add = |sharers: &mut Vec<Sharer>| {
            sharers.retain(|sharer| sharer.uuid != with.uuid);
            sharers.push(with.clone());
            sharers.sort();
        };
        let read = self.write_sharers(id, add).await?;
        self.served(&read).await
    }

    async fn unshare(&self, id: &str, uuid: Option<&str>) -> Result<(), VolumeError> {
        self.write_sharers(id, |sharers| {
            sharers.retain(|sharer| uuid.is_some_and(|uuid| sharer.uuid != uuid));
        })
        .await?;
        self.end_unshared(id).await
    }

    async fn find(&self, id: &str) -> Result<Export, VolumeError> {
        let read = self.expect(id).await?;
        let object = match read.persistent_volume() {
            Some(volume) => self.cluster.share(volume).await?,
            None => None,
        };
        match object {
            Some(object) if serve(Some(&object)) == Step::Done => Ok(object.export()),
            object => Err(unserved(object.as_ref(), &read)),
        }
    }

    async fn repair(&self) -> Result<(), VolumeError> {
        Box::pin(self.put_shares_right()).await
    }
}

impl Claims {
    /// Changes which VMs may mount a share, and returns the resulting claim.
    async fn write_sharers(&self, id: &str, change: impl Fn(&mut Vec<Sharer>)) -> Result<Read, VolumeError> {
        for _ in 0..TRIES {
            let read = self.expect(id).await?;
            let Some(before) = &read.volume.sharers else {
                return Err(VolumeError::Refused(format!("the volume {id} is a disk, not a share")));
            };
            let mut after = before.clone();
            change(&mut after);
            if after == *before {
                return Ok(read);
            }
            let annotation = (SHARERS, claims::record_sharers(&after));
            match self.cluster.annotate(&read.claim, &read.object, annotation).await? {
                Written::Yes => return self.expect(id).await,
                Written::Conflict => {}
                Written::Gone => return Err(VolumeError::Unknown(id.to_owned())),
            }
        }
        Err(VolumeError::Disk(DiskError::Busy(id.to_owned())))
    }

    /// Waits until a share is served for this version of its claim, and returns the export.
    async fn served(&self, read: &Read) -> Result<Export, VolumeError> {
        let Some(volume) = read.persistent_volume() else {
            return Err(VolumeError::Damaged("its claim no longer has a PersistentVolume".to_owned()));
        };
        let (begun, mark, mut is_marked) = (Instant::now(), read.version(), false);
        loop {
            let object = self.cluster.share(volume).await?;
            let step = serve(object.as_ref());
            if let (Step::Done, Some(object)) = (&step, &object)
                && object.text(MARK) == Some(mark)
            {
                return Ok(object.export());
            }
            match (step, &object) {
                (Step::Make, _) => {
                    self.cluster.make_share(volume, &read.volume.id, mark).await?;
                }
                (Step::Want(state), Some(object)) => {
                    self.cluster.want_share(object, state, mark).await?;
                }
                // Write the object even though it is in the desired state: a program that is about to end the share has read
                // an older version of it, and its write then fails. Check the result again, the first time without delay.
                (Step::Done, Some(object)) => {
                    self.cluster.want_share(object, State::Enabled, mark).await?;
                    if !std::mem::replace(&mut is_marked, true) {
                        continue;
                    }
                }
                _ => {}
            }
            if begun.elapsed() >= self.patience.settle {
                return Err(unserved(object.as_ref(), read));
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    /// Ends a share that no VM may mount, without waiting for the result.
    pub(super) async fn end_unshared(&self, id: &str) -> Result<(), VolumeError> {
        for _ in 0..TRIES {
            let Some(read) = self.read(id).await? else { return Ok(()) };
            let Some(volume) = read.persistent_volume() else { return Ok(()) };
            let object = self.cluster.share(volume).await?;
            // Read the claim again, after the object: see the module's documentation.
            let Some(read) = self.read(id).await? else { return Ok(()) };
            let (Step::Want(state), Some(object), true) =
                (end(object.as_ref()), &object, read.sharers().is_empty())
            else {
                return Ok(());
            };
            match self.cluster.want_share(object, state, read.version()).await? {
                Written::Yes | Written::Gone => return Ok(()),
                Written::Conflict => {}
            }
        }
        Err(VolumeError::Disk(DiskError::Busy(id.to_owned())))
    }

    /// Removes the server of a claim that is about to be deleted; does nothing for a disk.
    ///
    /// # Errors
    /// If VMs may still mount it, or it has not ended before `deadline`.
    pub(in crate::host::backends::kubevirt) async fn retire(
        &self,
        read: &Read,
        deadline: Instant,
    ) -> Result<(), VolumeError> {
        if let Some(sharer) = read.sharers().first() {
            return Err(VolumeError::InUse(format!("it is shared with the VM {}", sharer.vm)));
        }
        let (true, Some(volume)) = (read.volume.sharers.is_some(), read.persistent_volume()) else {
            return Ok(());
        };
        while let Some(object) = self.cluster.share(volume).await? {
            // Check the claim after the object: see the module's documentation.
            if let Some(sharer) =
                self.read(&read.volume.id).await?.as_ref().and_then(|read| read.sharers().first())
            {
                return Err(VolumeError::InUse(format!("it is shared with the VM {}", sharer.vm)));
            }
            let is_late = Instant::now() >= deadline;
            self.clear(&object, is_late).await?;
            if is_late {
                return Err(VolumeError::Waiting {
                    words: "the host cluster has not stopped serving the volume yet".to_owned(),
                    detail: object.words(),
                });
            }
            tokio::time::sleep(self.patience.poll.min(Duration::from_millis(200))).await;
        }
        Ok(())
    }

    /// Takes the next step towards the removal of an object; `is_still` is set if it makes no progress.
    pub(super) async fn clear(&self, object: &NetworkFilesystem, is_still: bool) -> Result<(), VolumeError> {
        let mark = object.text(MARK).unwrap_or_default();
        let step = match end(Some(object)) {
            Step::Wait if is_still => unstick(object).map_or(Step::Wait, Step::Want),
            step => step,
        };
        match step {
            Step::Want(state) => self.cluster.want_share(object, state, mark).await.map(drop),
            Step::Done => self.cluster.delete_share(object).await.map(drop),
            Step::Make | Step::Wait => Ok(()),
        }
    }
}

/// Returns the error for a share that is not served (yet).
fn unserved(object: Option<&NetworkFilesystem>, read: &Read) -> VolumeError {
    let none = || format!("there is no NetworkFilesystem of {}, or it was made just now", read.volume.id);
    VolumeError::Waiting {
        words: "the host cluster does not serve the volume yet".to_owned(),
        detail: object.map_or_else(none, NetworkFilesystem::words),
    }
}
