//! Volumes that a backend keeps for clusters and plugs into VMs: what is asked for, what there is, and what can go
//! wrong.
//!
//! **Who holds a volume is asked of the backend** ([`Volumes::holder`]), and never concluded from what is not seen: a VM that
//! is in no list, or does not answer, may hold it all the same.
//!
//! The backend is where volumes are remembered, with their owner and the VM that has each of them: what it has said is
//! so after any crash. It decides nothing: whose volume it is, who may have it and whether there is room in a quota is
//! asked above, in [`volumes`](crate::host::volumes), which also lets only one operation at a time begin on a volume.
//! Every operation may be repeated, from wherever an attempt before ended.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use super::super::metrics::Room;
use super::disks::{Bus, DiskError, GuestSide, Known};

/// Volumes that [`Volumes::list`] asks for at a time.
const PART: usize = 256;

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Unique for ever; at most 128 bytes of letters, digits, `-` and `.`.
    pub id: String,
    /// Unique in its cluster; any text of 1 to 128 bytes.
    pub name: String,
    /// Whose it is.
    pub cluster: String,
    /// Its storage class.
    pub class: String,
    /// Bytes.
    pub size: u64,
    /// What people know it by in the cluster, such as `namespace/name` of a claim; may be empty.
    pub claim: String,
    /// The VM that has it, or is to have it. Never of a share, which is no disk.
    pub published: Option<Published>,
    /// Of a share: the VMs that may mount it, in the order of their UUIDs. None of a disk.
    pub sharers: Option<Vec<Sharer>>,
    /// Why it cannot be used, if it cannot.
    pub problem: Option<String>,
}

/// Which VM has a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Published {
    /// The VM's UUID.
    pub uuid: String,
    /// Its name at that time.
    pub vm: String,
    /// How the cluster names the node.
    pub node: String,
    /// The guest cannot write.
    pub read_only: bool,
    /// It is being taken away.
    pub leaving: bool,
}

impl Published {
    /// The VM, by the name that it had.
    pub fn place(&self) -> Place {
        Place { uuid: self.uuid.clone(), vm: self.vm.clone() }
    }
}

/// A VM that may mount a share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sharer {
    /// The VM's UUID.
    pub uuid: String,
    /// Its name at that time.
    pub vm: String,
    /// How the cluster names the node.
    pub node: String,
    /// The guest is to mount it read-only.
    pub read_only: bool,
}

/// Where a share is served, as an NFS client needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// The address of the server.
    pub server: String,
    /// What it serves the share as, from the slash on.
    pub path: String,
    /// The mount options that whoever runs the server recommends, separated by commas; may be empty.
    pub options: String,
}

/// Who holds a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Holder {
    /// This VM does, or may at any moment.
    On(Place),
    /// Nobody does, and that is proved.
    Off,
    /// It cannot be told, and so the volume must be taken for held; in words why, for the host.
    Unknown(String),
}

impl Holder {
    /// The VM that holds it, if that is proved and it is not the one that is remembered.
    pub fn other_than(self, record: Option<&Published>) -> Option<Place> {
        match self {
            Self::On(place) => {
                Some(place).filter(|place| record.is_none_or(|record| record.uuid != place.uuid))
            }
            Self::Off | Self::Unknown(_) => None,
        }
    }
}

/// A VM that holds a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// Its UUID.
    pub uuid: String,
    /// Its present name.
    pub vm: String,
}

/// A volume to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVolume {
    /// See [`Volume::name`].
    pub name: String,
    /// See [`Volume::cluster`].
    pub cluster: String,
    /// One of [`Volumes::classes`].
    pub class: String,
    /// Bytes, a multiple of 512.
    pub size: u64,
    /// See [`Volume::claim`].
    pub claim: String,
    /// It is to be a share, if this backend has [`Shares`].
    pub is_share: bool,
}

/// A storage class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// Its name.
    pub name: String,
    /// For volumes that name none.
    pub is_default: bool,
}

/// How much room a class has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes in all; 0 if that is not said, as some file systems do not.
    pub size: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes of the largest volume that could be made.
    pub largest: u64,
}

/// How much volumes come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Volumes.
    pub volumes: u64,
    /// Bytes of them together.
    pub bytes: u64,
}

/// What a cluster has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usages {
    /// In all.
    pub all: Usage,
    /// In the class that was asked for.
    pub in_class: Usage,
}

/// A volume of a cluster that is being made or made larger: room is set aside for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coming {
    /// See [`Volume::name`].
    pub name: String,
    /// See [`Volume::class`].
    pub class: String,
    /// Bytes that it is to have.
    pub size: u64,
}

/// How the guest knows a volume that is plugged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugged {
    /// By what.
    pub disk: Known,
    /// What the guest sees it on.
    pub bus: Bus,
}

/// Why it cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is none of this identifier.
    #[error("there is no volume {0:?}")]
    Unknown(String),
    /// There is no such class.
    #[error("there is no storage class {0:?}")]
    NoClass(String),
    /// There is no room for it.
    #[error("{0}")]
    Full(String),
    /// What holds the volume cannot be looked at now.
    #[error("{0}")]
    Unavailable(String),
    /// Others have to do something first, or have not done it in time: in words for guests, and more of them for the host.
    #[error("{words}: {detail}")]
    Waiting {
        /// For everybody.
        words: String,
        /// For the host.
        detail: String,
    },
    /// It cannot be done as things are; in words for everybody.
    #[error("{0}")]
    Refused(String),
    /// It is kept by another host, or in a pool that is not in the settings: nobody here can tell whether it is there.
    #[error("{0}")]
    Elsewhere(String),
    /// It is there and cannot be used.
    #[error("{0}")]
    Damaged(String),
    /// It is there, and has not been given to guestlet, or not all of what it takes for that.
    #[error("{words}")]
    NotGiven {
        /// Whose it is; nobody else is told that it is there. May be empty.
        cluster: String,
        /// In words what to do, for its cluster.
        words: String,
    },
    /// Somebody has it open.
    #[error("{0}")]
    InUse(String),
    /// It was plugged, or was so before, and somebody else has it as well, who asks nobody: the caller has it unplugged again. In
    /// words who.
    #[error("{0}")]
    Contested(String),
    /// It cannot be plugged or unplugged.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The system refused something about a file.
    #[error("cannot {0} {1:?}: {2}")]
    System(&'static str, PathBuf, #[source] io::Error),
}

/// Keeps volumes.
#[tonic::async_trait]
pub trait Volumes: Send + Sync + fmt::Debug {
    /// The storage classes, in the order of the settings.
    fn classes(&self) -> Vec<Class>;

    /// How much room a class has.
    async fn capacity(&self, class: &str) -> Result<Capacity, VolumeError>;

    /// The room of each class, as far as it is known. Nothing is looked at for it, so it is there at once.
    fn rooms(&self) -> Vec<Room>;

    /// The volumes of a cluster, or of all, whose identifiers come after this one, in their order: so many at most, and fewer only
    /// if there are no more. As all lookups here, it takes no walk over those that it does not return.
    async fn part(&self, cluster: Option<&str>, after: &str, most: usize)
    -> Result<Vec<Volume>, VolumeError>;

    /// All volumes, or those of a cluster, in the order of their identifiers. What comes or goes meanwhile may be among them. Not for
    /// what guests ask: it has them all.
    async fn list(&self, cluster: Option<&str>) -> Result<Vec<Volume>, VolumeError> {
        let mut all: Vec<Volume> = Vec::new();
        loop {
            let after = all.last().map(|volume| volume.id.clone()).unwrap_or_default();
            let part = self.part(cluster, &after, PART).await?;
            let is_last = part.len() < PART;
            all.extend(part);
            if is_last {
                return Ok(all);
            }
            // Others have their turn in between.
            tokio::task::yield_now().await;
        }
    }

    /// The volume that has this name in a cluster, if one is listed.
    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError>;

    /// What a cluster has, in all and in one class, with what is `coming`, at one moment. What is coming and is there already counts
    /// once, with the larger of both sizes.
    async fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError>;

    /// The identifiers of the volumes that the VM of this UUID is remembered to have.
    async fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError>;

    /// One volume, if there is one. It is an error if there may be one that cannot be looked at.
    async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError>;

    /// Makes a volume; the caller has seen to it that its cluster has none of this name. After an error nothing of it
    /// is left.
    async fn create(&self, new: NewVolume) -> Result<Volume, VolumeError>;

    /// Who holds a volume. If several VMs do, it is the one that is remembered, from which it can be taken.
    async fn holder(&self, id: &str) -> Result<Holder, VolumeError>;

    /// Removes a volume that no VM has, with its bytes. [`VolumeError::InUse`] if somebody has it open all the same.
    async fn remove(&self, id: &str) -> Result<(), VolumeError>;

    /// Makes a volume at least so many bytes large; `vm` is the name of the running VM that has it. Returns the size.
    async fn grow(&self, id: &str, size: u64, vm: Option<&str>) -> Result<u64, VolumeError>;

    /// Remembers that a VM has the volume, then plugs it in under its present name `vm`; success if it is plugged
    /// already. Where nothing was plugged for certain, nothing is remembered. After [`VolumeError::Contested`] it is remembered, and
    /// has to be unplugged.
    async fn plug(&self, id: &str, published: Published, vm: &str) -> Result<Plugged, VolumeError>;

    /// Takes a volume away from the VM with that name, after its guest has released it, and forgets that the VM had it
    /// once the hypervisor says that the disk is gone.
    async fn unplug(
        &self,
        id: &str,
        vm: &str,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError>;

    /// Takes a volume away from the VM at this place, which holds it and is not remembered to have it.
    async fn take_back(
        &self,
        id: &str,
        from: &Place,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError>;

    /// Whether another program has plugged the volume into this VM, in a way that can be taken over. If nothing is remembered of
    /// the volume, it is then remembered that the VM has it.
    async fn recognise(&self, _id: &str, _published: Published) -> Result<bool, VolumeError> {
        Ok(false)
    }

    /// The VM that has the volume for certain, although it is not remembered to, because another program has plugged it there. If
    /// another VM was remembered to have it, that is forgotten: that one does not have it, and from this one it cannot be taken as
    /// long as it is that program's.
    async fn concede(&self, _id: &str) -> Result<Option<Place>, VolumeError> {
        Ok(None)
    }

    /// Forgets that a VM had the volume. The caller knows by [`Volumes::holder`] that nobody has it, or answers for it; or the disk is
    /// another program's, and stays that.
    async fn forget(&self, id: &str) -> Result<(), VolumeError>;

    /// How many volumes the VM with that name can have at a time, with those that it has; none where nothing bounds it.
    async fn places(&self, vm: &str) -> Result<Option<usize>, VolumeError>;

    /// The identifiers of the volumes that the hypervisor has plugged into the VM with that name.
    async fn plugged(&self, vm: &str) -> Result<BTreeSet<String>, VolumeError>;

    /// The serial number with which a volume is plugged.
    fn serial(&self, id: &str) -> Option<String>;

    /// The identifier of the volume that its cluster may call so. Whose it is, is not said by that.
    fn id(&self, _cluster: &str, handle: &str) -> String {
        handle.to_owned()
    }

    /// Whether a cluster can have a volume of this identifier at all, whatever there is.
    fn may_be_of(&self, _id: &str, _cluster: &str) -> bool {
        true
    }

    /// What its cluster calls a volume of this identifier: not so if it is another program that has told the cluster of it.
    fn handle(&self, id: &str) -> String {
        id.to_owned()
    }

    /// What else a guest may know it by, of one that another program may have plugged.
    fn other_names(&self, _id: &str) -> Vec<String> {
        Vec::new()
    }

    /// Its shares, where it has any.
    fn shares(&self) -> Option<&dyn Shares> {
        None
    }

    /// Whether only VMs of one host can have its volumes.
    fn are_of_one_host(&self) -> bool {
        true
    }

    /// Whether a volume is plugged only when its guest says that it sees it: where the word of who plugs it is not enough.
    fn needs_the_guests_word(&self) -> bool {
        false
    }

    /// Why nothing can be changed now, where that is for another program to do.
    fn out_of_turn(&self) -> Option<&'static str> {
        None
    }

    /// Why it cannot be told yet which volumes there are.
    fn unread(&self) -> Option<&'static str> {
        None
    }

    /// Whether the VM of this name may have volumes plugged that nobody remembers. If not, [`Volumes::plugged`] need not be
    /// asked.
    fn may_have(&self, _vm: &str) -> bool {
        true
    }
}

/// Serves volumes that many VMs have at a time: file systems on the network, which guests mount by themselves. Nothing is
/// plugged into a VM for one, so that neither [`Holder`] nor [`Volumes::plug`] is about them; they are made, listed, grown and
/// removed as other volumes are.
///
/// A share is served as long as there is a VM that may mount it. Every operation may be repeated, from wherever an attempt
/// before ended.
#[tonic::async_trait]
pub trait Shares: Send + Sync + fmt::Debug {
    /// Whether there can be shares; [`VolumeError::Refused`] says why not.
    async fn check(&self) -> Result<(), VolumeError>;

    /// Remembers that a VM may mount a share, and returns where it is served, once it is. After an error the VM is remembered
    /// all the same: whoever asked for it repeats the call, or says that the VM is not to have it.
    async fn share(&self, id: &str, with: Sharer) -> Result<Export, VolumeError>;

    /// Forgets that the VM of this UUID may mount a share, or that any may; success if it may not. Nobody waits until the
    /// server has stopped.
    async fn unshare(&self, id: &str, uuid: Option<&str>) -> Result<(), VolumeError>;

    /// Where a share is served now, which changes nothing; [`VolumeError::Waiting`] if it is not served, or not yet.
    async fn find(&self, id: &str) -> Result<Export, VolumeError>;

    /// Puts right what is not served, or is, as it should be, and removes what is left of shares that are gone.
    async fn repair(&self) -> Result<(), VolumeError>;
}
