//! Volumes that a backend stores for clusters and plugs into VMs: requests, results and errors.
//!
//! **The holder of a volume is always queried from the backend** ([`Volumes::holder`]), and never inferred from
//! a VM's absence: a VM that is in no list, or does not answer, may still hold the volume.
//!
//! The backend is the record of all volumes, with the owner of each and the VM that it is published to; what it
//! has confirmed survives any crash. It makes no policy decisions: ownership, permissions and quotas are
//! checked above it, in [`volumes`](crate::host::volumes), which also starts only one operation at a time on a
//! volume. All operations are idempotent, and can be repeated from whatever point an earlier attempt reached.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use super::super::metrics::Room;
use super::disks::{Bus, DiskError, GuestSide, Known};

/// Number of volumes that [`Volumes::list`] requests at a time.
const PART: usize = 256;

/// Volume that a backend stores for a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Identifier, never reused; at most 128 bytes of letters, digits, `-` and `.`.
    pub id: String,
    /// Name, unique in its cluster; any text of 1 to 128 bytes.
    pub name: String,
    /// Cluster that owns it.
    pub cluster: String,
    /// Storage class.
    pub class: String,
    /// Size in bytes.
    pub size: u64,
    /// Name by which people in the cluster know it, such as the `namespace/name` of a claim; may be empty.
    pub claim: String,
    /// VM that has it, or is to have it. Always `None` for a share, which is not a disk.
    pub published: Option<Published>,
    /// For a share: the VMs that may mount it, ordered by UUID. `None` for a disk.
    pub sharers: Option<Vec<Sharer>>,
    /// Reason why the volume is unusable; `None` if it is usable.
    pub problem: Option<String>,
}

/// VM that a volume is published to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Published {
    /// UUID of the VM.
    pub uuid: String,
    /// Name of the VM at the time of publishing.
    pub vm: String,
    /// Name of the node in the guest cluster.
    pub node: String,
    /// True if the guest may not write.
    pub read_only: bool,
    /// True while the volume is being detached.
    pub leaving: bool,
}

impl Published {
    /// Returns the VM, under its name at that time.
    pub fn place(&self) -> Place {
        Place { uuid: self.uuid.clone(), vm: self.vm.clone() }
    }
}

/// VM that may mount a share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sharer {
    /// UUID of the VM.
    pub uuid: String,
    /// Name of the VM when it was given access.
    pub vm: String,
    /// Name of the node in the guest cluster.
    pub node: String,
    /// True if the guest is to mount it read-only.
    pub read_only: bool,
}

/// NFS export of a share, as a client needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Address of the server.
    pub server: String,
    /// Exported path, beginning with a slash.
    pub path: String,
    /// Mount options that the server's operator recommends, separated by commas; may be empty.
    pub options: String,
}

/// Holder of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Holder {
    /// This VM holds it, or may at any moment.
    On(Place),
    /// No VM holds it, which has been proved.
    Off,
    /// The holder cannot be determined, and the volume must be treated as held; the text is the reason, for the
    /// host.
    Unknown(String),
}

impl Holder {
    /// Returns the VM that holds it, if that is proved and differs from the VM on record.
    pub fn other_than(self, record: Option<&Published>) -> Option<Place> {
        match self {
            Self::On(place) => {
                Some(place).filter(|place| record.is_none_or(|record| record.uuid != place.uuid))
            }
            Self::Off | Self::Unknown(_) => None,
        }
    }
}

/// VM that holds a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// UUID of the VM.
    pub uuid: String,
    /// Present name of the VM.
    pub vm: String,
}

/// Volume to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVolume {
    /// Name in the cluster; see [`Volume::name`].
    pub name: String,
    /// Owner; see [`Volume::cluster`].
    pub cluster: String,
    /// Storage class, one of [`Volumes::classes`].
    pub class: String,
    /// Size in bytes, a multiple of 512.
    pub size: u64,
    /// Name for people; see [`Volume::claim`].
    pub claim: String,
    /// True if the volume is to be a share, in a backend that has [`Shares`].
    pub is_share: bool,
}

/// Storage class that clusters can choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// Name of the class.
    pub name: String,
    /// True for the class of volumes that name none.
    pub is_default: bool,
}

/// Total and free space of a storage class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Total size in bytes; 0 if it is unknown, as with some file systems.
    pub size: u64,
    /// Free space in bytes.
    pub free: u64,
    /// Size in bytes of the largest volume that could be created.
    pub largest: u64,
}

/// Number and total size of a set of volumes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of volumes.
    pub volumes: u64,
    /// Total size in bytes.
    pub bytes: u64,
}

/// Usage of a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usages {
    /// Usage in all classes together.
    pub all: Usage,
    /// Usage in the requested class.
    pub in_class: Usage,
}

/// Volume of a cluster that is being created or expanded, for which quota is reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coming {
    /// Name in the cluster; see [`Volume::name`].
    pub name: String,
    /// Storage class; see [`Volume::class`].
    pub class: String,
    /// Size in bytes that it will have.
    pub size: u64,
}

/// Identification of a plugged volume inside its guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugged {
    /// Property by which the guest identifies the disk.
    pub disk: Known,
    /// Bus on which the guest sees the disk.
    pub bus: Bus,
}

/// Reason why an operation on a volume failed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// No volume has this identifier.
    #[error("there is no volume {0:?}")]
    Unknown(String),
    /// No storage class has this name.
    #[error("there is no storage class {0:?}")]
    NoClass(String),
    /// Not enough free space is left for it.
    #[error("{0}")]
    Full(String),
    /// The storage of the volume cannot be accessed at present.
    #[error("{0}")]
    Unavailable(String),
    /// Another program has to act first, or has not done so in time. There is one text for guests, and more detail
    /// for the host.
    #[error("{words}: {detail}")]
    Waiting {
        /// Text for guests and host.
        words: String,
        /// Further detail, for the host only.
        detail: String,
    },
    /// The operation is impossible in the present configuration or state; the text is for guests and host.
    #[error("{0}")]
    Refused(String),
    /// The volume belongs to another host, or to a pool that is not in the settings: this host cannot determine
    /// whether it exists.
    #[error("{0}")]
    Elsewhere(String),
    /// The volume exists but is unusable.
    #[error("{0}")]
    Damaged(String),
    /// The volume exists but has not been given to guestlet, or not with all that this requires.
    #[error("{words}")]
    NotGiven {
        /// Owner of the volume; no other cluster may learn that it exists. May be empty.
        cluster: String,
        /// Instructions for the owner.
        words: String,
    },
    /// A process has it open.
    #[error("{0}")]
    InUse(String),
    /// The volume was plugged, now or before, but another program, which does not coordinate with guestlet, uses it
    /// as well: the caller has to unplug it again. The text names that user.
    #[error("{0}")]
    Contested(String),
    /// The disk of the volume cannot be plugged or unplugged.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A system call on a file failed.
    #[error("cannot {0} {1:?}: {2}")]
    System(&'static str, PathBuf, #[source] io::Error),
}

/// Stores volumes and plugs them into VMs.
#[tonic::async_trait]
pub trait Volumes: Send + Sync + fmt::Debug {
    /// Returns the storage classes, in the order of the settings.
    fn classes(&self) -> Vec<Class>;

    /// Returns the total and free space of a class.
    async fn capacity(&self, class: &str) -> Result<Capacity, VolumeError>;

    /// Returns the known total and free space of all classes, at once and without accessing the storage.
    fn rooms(&self) -> Vec<Room>;

    /// Returns the volumes of a cluster, or of all clusters, whose identifiers sort after `after`, in that order:
    /// at most `most`, and fewer only at the end. Like all lookups here, it does not walk over volumes that it does
    /// not return.
    async fn part(&self, cluster: Option<&str>, after: &str, most: usize)
    -> Result<Vec<Volume>, VolumeError>;

    /// Returns all volumes, or those of a cluster, ordered by identifier. Volumes that are created or removed
    /// meanwhile may be included. Not for requests from guests, because it holds the whole list in memory.
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
            // Give other tasks a turn between the pages.
            tokio::task::yield_now().await;
        }
    }

    /// Returns the listed volume with this name in a cluster, if there is one.
    async fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError>;

    /// Returns the usage of a cluster at one moment, in total and in one class, including the volumes that are
    /// `coming`. A coming volume that already exists counts once, with the larger of the two sizes.
    async fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError>;

    /// Returns the identifiers of the volumes that the VM with this UUID is on record for.
    async fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError>;

    /// Returns a volume; `None` if it does not exist. Fails if it may exist but cannot be accessed.
    async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError>;

    /// Creates a volume; the caller has checked that its cluster has none with this name. After an error, nothing
    /// is left behind.
    async fn create(&self, new: NewVolume) -> Result<Volume, VolumeError>;

    /// Returns the holder of a volume. If several VMs hold it, the one on record is returned, because it can be
    /// unplugged from that one.
    async fn holder(&self, id: &str) -> Result<Holder, VolumeError>;

    /// Removes a volume that no VM has, including its data. [`VolumeError::InUse`] if a process has it open
    /// nevertheless.
    async fn remove(&self, id: &str) -> Result<(), VolumeError>;

    /// Expands a volume to at least `size` bytes; `vm` is the name of the running VM that has it. Returns the new
    /// size.
    async fn grow(&self, id: &str, size: u64, vm: Option<&str>) -> Result<u64, VolumeError>;

    /// Records that a VM has the volume, then plugs it into the VM, whose present name is `vm`; succeeds if it is
    /// already plugged. If it is certain that nothing was plugged, the record is cleared again. After
    /// [`VolumeError::Contested`] the record remains, and the volume has to be unplugged.
    async fn plug(&self, id: &str, published: Published, vm: &str) -> Result<Plugged, VolumeError>;

    /// Unplugs a volume from the VM with that name after its guest has released it, and clears the record of the VM
    /// once the hypervisor confirms that the disk has been removed.
    async fn unplug(
        &self,
        id: &str,
        vm: &str,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError>;

    /// Unplugs a volume from the VM at this place, which holds it without being on record.
    async fn take_back(
        &self,
        id: &str,
        from: &Place,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Result<(), VolumeError>;

    /// Reports whether another program has plugged the volume into this VM in a way that guestlet can take over. If
    /// no VM is on record for the volume, this VM is recorded.
    async fn recognise(&self, _id: &str, _published: Published) -> Result<bool, VolumeError> {
        Ok(false)
    }

    /// Returns the VM that certainly has the volume without being on record, because another program plugged it
    /// there. If a different VM is on record, the record is cleared: that VM does not have the volume, and from the
    /// present one it cannot be unplugged while it belongs to the other program.
    async fn concede(&self, _id: &str) -> Result<Option<Place>, VolumeError> {
        Ok(None)
    }

    /// Clears the record of the VM that had the volume. The caller knows from [`Volumes::holder`] that no VM holds
    /// it, or takes responsibility for that; or the disk belongs to another program and stays attached.
    async fn forget(&self, id: &str) -> Result<(), VolumeError>;

    /// Returns how many volumes the VM with that name can have at a time, including its present ones; `None` if
    /// there is no limit.
    async fn places(&self, vm: &str) -> Result<Option<usize>, VolumeError>;

    /// Returns the identifiers of the volumes that the hypervisor has plugged into the VM with that name.
    async fn plugged(&self, vm: &str) -> Result<BTreeSet<String>, VolumeError>;

    /// Returns the serial number with which a volume is plugged.
    fn serial(&self, id: &str) -> Option<String>;

    /// Returns the identifier of the volume for which its cluster may use this handle. This does not prove who owns
    /// it.
    fn id(&self, _cluster: &str, handle: &str) -> String {
        handle.to_owned()
    }

    /// Reports whether a volume with this identifier could belong to the cluster at all, judging by the identifier
    /// alone.
    fn may_be_of(&self, _id: &str, _cluster: &str) -> bool {
        true
    }

    /// Returns the cluster's handle for the volume with this identifier. It differs from the identifier if another
    /// program announced the volume to the cluster.
    fn handle(&self, id: &str) -> String {
        id.to_owned()
    }

    /// Returns the other names by which a guest may know a volume that another program may have plugged.
    fn other_names(&self, _id: &str) -> Vec<String> {
        Vec::new()
    }

    /// Returns the implementation of shares, if the backend supports them.
    fn shares(&self) -> Option<&dyn Shares> {
        None
    }

    /// Reports whether only VMs of one host can use the volumes.
    fn are_of_one_host(&self) -> bool {
        true
    }

    /// Reports whether a volume counts as plugged only when its guest confirms that it sees the disk: true where
    /// the confirmation of the program that plugs it is not sufficient.
    fn needs_the_guests_word(&self) -> bool {
        false
    }

    /// Returns the reason why this program must not make changes now, if another program is responsible for them.
    fn out_of_turn(&self) -> Option<&'static str> {
        None
    }

    /// Returns the reason why the list of volumes is not yet known.
    fn unread(&self) -> Option<&'static str> {
        None
    }

    /// Reports whether the VM with this name may have volumes plugged that are not on record for it. If not, the
    /// caller can skip [`Volumes::plugged`].
    fn may_have(&self, _vm: &str) -> bool {
        true
    }
}

/// Serves volumes that many VMs use at the same time: network file systems, which guests mount by themselves.
/// No disk is plugged into a VM for a share, so [`Holder`] and [`Volumes::plug`] do not apply. Shares are
/// created, listed, expanded and removed like other volumes.
///
/// A share is served for as long as at least one VM may mount it. All operations are idempotent, and can be
/// repeated from whatever point an earlier attempt reached.
#[tonic::async_trait]
pub trait Shares: Send + Sync + fmt::Debug {
    /// Checks that shares are possible; [`VolumeError::Refused`] says why they are not.
    async fn check(&self) -> Result<(), VolumeError>;

    /// Records that a VM may mount a share, and returns the export once it is served. After an error the VM stays
    /// on record: the caller either repeats the call or revokes the VM's access.
    async fn share(&self, id: &str, with: Sharer) -> Result<Export, VolumeError>;

    /// Revokes the access of the VM with this UUID, or of all VMs, to a share; succeeds if there is none. Does not
    /// wait until the server has stopped.
    async fn unshare(&self, id: &str, uuid: Option<&str>) -> Result<(), VolumeError>;

    /// Returns the present export of a share without changing anything; [`VolumeError::Waiting`] if it is not
    /// served (yet).
    async fn find(&self, id: &str) -> Result<Export, VolumeError>;

    /// Restores every share to its intended state, and removes leftovers of shares that no longer exist.
    async fn repair(&self) -> Result<(), VolumeError>;
}
