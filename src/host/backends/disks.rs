//! Disks that a backend plugs into running VMs: what is asked for, what there is, and what can go wrong.
//!
//! A disk is known by its serial number, which its guest reads too. Every operation may be repeated: what is already
//! so is success.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

/// What the guest sees the disk on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bus {
    /// A disk of a virtio-scsi controller that the VM has. It shows 36 bytes of the serial number as that, and up to 64 as
    /// the text of page 83h.
    Scsi,
    /// A virtio-blk device of its own, which takes a free PCI Express root port. It shows 20 bytes of the serial number.
    VirtioBlk,
}

impl Bus {
    /// The longest serial number, in bytes: what the guest can read of it. Page 83h has room for more than this.
    pub fn longest_serial(self) -> usize {
        match self {
            Self::Scsi => 64,
            Self::VirtioBlk => 20,
        }
    }
}

impl fmt::Display for Bus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Scsi => "scsi",
            Self::VirtioBlk => "virtio",
        })
    }
}

/// How an image file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Its bytes are the disk's.
    Raw,
    /// It has a table of where they are.
    Qcow2,
}

impl Format {
    /// As the endings of files name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// What holds the disk's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An image file or a block device that is there; an absolute path.
    File(PathBuf),
    /// An image of the backend's own: a regular file, whose path has no links. Nobody looks at it again.
    Image(PathBuf),
    /// The VM's volume of this serial number, made with so many bytes if it is not there.
    Volume(u64),
}

/// A disk to attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDisk {
    /// Unique in the VM.
    pub serial: String,
    /// Where to plug it.
    pub bus: Bus,
    /// What holds its bytes.
    pub source: Source,
    /// How they are read. None: raw for volumes, and what a file's name ends with. Never found out from what is in
    /// the file: the guest writes that, and could make any file of the host the base of its image.
    pub format: Option<Format>,
    /// All bytes are in this one file: a base that it may name is not opened.
    pub is_whole: bool,
    /// The guest cannot write.
    pub read_only: bool,
}

/// A disk that a VM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// As the guest can read it; may be empty for one that was not attached by us.
    pub serial: String,
    /// None for one that was not attached by us.
    pub bus: Option<Bus>,
    /// What holds its bytes, as the hypervisor names it.
    pub file: String,
    /// The hypervisor's word for how they are read.
    pub format: String,
    /// Bytes.
    pub size: u64,
    /// The guest cannot write.
    pub read_only: bool,
    /// The hypervisor's name of the device.
    pub device: String,
    /// Attached by us. Others are only shown.
    pub ours: bool,
}

/// What a detach found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    /// It was there, and is not any more.
    Now,
    /// There was none.
    Before,
}

/// A volume that was made with its disk, whether or not that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskVolume {
    /// The VM for which it was made; it may be in no list any more.
    pub vm: String,
    /// The serial number of its disk.
    pub serial: String,
    /// Where it is.
    pub file: PathBuf,
    /// How it is read.
    pub format: Format,
    /// Bytes that the guest sees; none if that cannot be found out.
    pub size: Option<u64>,
    /// Bytes that it takes on the host.
    pub allocated: u64,
}

/// Why it cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The VM is in no list.
    #[error("there is no such VM")]
    UnknownVm,
    /// Nobody can be asked to plug; in the backend's words, which say what to do about it.
    #[error("{0}")]
    NoHypervisor(String),
    /// The hypervisor cannot be asked.
    #[error("{0}")]
    Unreachable(String),
    /// The hypervisor said no.
    #[error("{0}")]
    Refused(String),
    /// The hypervisor said what cannot be understood; in the backend's words.
    #[error("{0}")]
    Strange(String),
    /// The serial number cannot be one.
    #[error("serial {0}")]
    Serial(String),
    /// The size cannot be one.
    #[error("size {0}")]
    Size(String),
    /// The file cannot be used.
    #[error("file {0:?} {1}")]
    File(PathBuf, String),
    /// The system refused something about a file.
    #[error("cannot {0} {1:?}: {2}")]
    System(&'static str, PathBuf, #[source] io::Error),
    /// How the file is read was not said, and its name does not say it.
    #[error("file {0:?}: set its format, raw or qcow2, which its name does not show")]
    NoFormat(PathBuf),
    /// Another disk has the serial number.
    #[error("serial {serial:?} is in use: {device} has it")]
    SerialInUse {
        /// Which.
        serial: String,
        /// The hypervisor's name of the other.
        device: String,
    },
    /// Another disk has the file.
    #[error("file {file:?} is in use: it backs {device}")]
    FileInUse {
        /// Which.
        file: PathBuf,
        /// The hypervisor's name of the other.
        device: String,
    },
    /// The disk is there, but not as wanted.
    #[error("the disk {serial:?} is attached already with another {what}: {found}")]
    Different {
        /// Which.
        serial: String,
        /// In what.
        what: &'static str,
        /// How it is.
        found: String,
    },
    /// Nothing to plug it into, and never was; in the backend's words, which say what to do about it.
    #[error("{0}")]
    NoController(String),
    /// All controllers are full.
    #[error("all virtio-scsi controllers of the VM are full")]
    ControllersFull,
    /// All ports are taken; in the backend's words, likewise.
    #[error("{0}")]
    NoPort(String),
    /// There is no such disk.
    #[error("the VM has no disk with serial {0:?}")]
    NotAttached(String),
    /// There is one, but it is none of ours.
    #[error("the disk {serial:?} ({device}) was not attached by guestlet, and is left alone")]
    NotOurs {
        /// Which.
        serial: String,
        /// The hypervisor's name of it.
        device: String,
    },
    /// A disk never becomes smaller.
    #[error("the disk {serial:?} already has {found} bytes, and cannot shrink")]
    Shrinks {
        /// Which.
        serial: String,
        /// Bytes.
        found: u64,
    },
    /// The guest keeps it, so far.
    #[error(
        "the guest has not released the disk {serial:?} within {} s; it is detached as soon as the guest does",
        waited.as_secs()
    )]
    Kept {
        /// Which.
        serial: String,
        /// So long.
        waited: Duration,
    },
    /// The guest was not asked, or did not answer, or refused; in words.
    #[error("{0}")]
    NotReleased(String),
    /// It cannot be told what the guest says, for whoever has its session cannot be asked; in words.
    #[error("{0}")]
    Untold(String),
    /// The guest said that it keeps it.
    #[error("the guest refuses to release the disk {0:?}")]
    GuestRefuses(String),
    /// Somebody holds the volume, in words who.
    #[error("{0}")]
    Held(String),
    /// Somebody else is at it.
    #[error("another operation on the disk {0:?} is under way")]
    Busy(String),
}

/// Checks that a guest on `bus` could tell disks by this serial number, and read all of it.
///
/// # Errors
/// If it could not, with what is wrong.
pub fn check_serial(serial: &str, bus: Bus) -> Result<(), DiskError> {
    let wrong = |problem: String| Err(DiskError::Serial(problem));
    let most = bus.longest_serial();
    if serial.is_empty() {
        return wrong("is empty; the guest identifies the disk by it".into());
    }
    if !serial.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return wrong(format!("{serial:?} has characters that a disk cannot show; use printable ASCII"));
    }
    if serial.starts_with(' ') || serial.ends_with(' ') {
        return wrong(format!("{serial:?} begins or ends with a space, which guests strip"));
    }
    if serial.bytes().all(|byte| byte == b'0') {
        return wrong(format!("{serial:?} is all zeros, which means no serial number"));
    }
    if serial.len() > most {
        return wrong(format!(
            "{serial:?} has {} bytes, but a guest can read only {most} of a disk on the {bus} bus",
            serial.len()
        ));
    }
    Ok(())
}

/// By what a guest knows a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// What the guest compares.
    pub by: By,
    /// Another program than guestlet has plugged it, so that programs of the guest may use it of which its agent knows nothing.
    pub is_adopted: bool,
}

/// What a guest compares to know a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum By {
    /// Its serial number, in full.
    Serial(String),
    /// The text of page 83h, in full: what a SCSI disk shows that has no serial number.
    Alias(String),
}

impl Known {
    /// One that guestlet has plugged with this serial number.
    pub fn serial(serial: impl Into<String>) -> Self {
        Self { by: By::Serial(serial.into()), is_adopted: false }
    }

    /// The text that the guest compares.
    pub fn text(&self) -> &str {
        match &self.by {
            By::Serial(text) | By::Alias(text) => text,
        }
    }
}

/// What the guest of a disk is told while that is taken away.
#[tonic::async_trait]
pub trait GuestSide: Send + Sync {
    /// The disk is there, and is about to be taken away: may it? Nothing is done if not.
    ///
    /// # Errors
    /// [`DiskError::NotReleased`] if it must stay.
    async fn release(&self, disk: &Known) -> Result<(), DiskError>;

    /// It was released, and stays after all.
    async fn stays(&self, disk: &Known);

    /// Whether somebody answers for it that the guest can do without the disk, whatever it says of that.
    fn is_forced(&self) -> bool {
        false
    }
}

/// An answer to come.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, DiskError>> + Send>>;

/// Plugs disks into running VMs. What was begun goes on when nobody waits for the answer any more.
pub trait Disks: Send + Sync + fmt::Debug {
    /// Attaches a disk; success if it is already attached as wanted.
    fn attach(&self, vm: &str, disk: NewDisk) -> Answer<AttachedDisk>;
    /// Takes a disk away after its guest has released it, and waits so long for the guest's kernel to let go of it.
    fn detach(
        &self,
        vm: &str,
        serial: String,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Answer<Detached>;
    /// Makes a disk larger: so many bytes.
    fn resize(&self, vm: &str, serial: String, size: u64) -> Answer<AttachedDisk>;
    /// All disks of a VM, also those that are not ours.
    fn list(&self, vm: &str) -> Answer<Vec<AttachedDisk>>;
    /// The volumes that were made with their disks, of one VM or of all, in the order of the VMs and serial numbers.
    fn volumes(&self, vm: Option<&str>) -> Answer<Vec<DiskVolume>>;
    /// Removes the volume that was made with a disk; whether it was there. Only one that nobody holds, which is proved.
    fn remove_volume(&self, vm: &str, serial: &str) -> Answer<bool>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials() {
        let longest = "a".repeat(64);
        let too_long = "a".repeat(65);
        let cases = [
            ("data-1", Bus::VirtioBlk, None),
            ("with a space", Bus::Scsi, None),
            (&longest[..20], Bus::VirtioBlk, None),
            (&longest, Bus::Scsi, None),
            ("", Bus::Scsi, Some("is empty")),
            (
                &longest[..21],
                Bus::VirtioBlk,
                Some("has 21 bytes, but a guest can read only 20 of a disk on the virtio bus"),
            ),
            (
                &too_long,
                Bus::Scsi,
                Some("has 65 bytes, but a guest can read only 64 of a disk on the scsi bus"),
            ),
            ("a\tb", Bus::Scsi, Some("characters that a disk cannot show")),
            ("ä", Bus::Scsi, Some("characters that a disk cannot show")),
            (" a", Bus::Scsi, Some("begins or ends with a space")),
            ("000", Bus::Scsi, Some("all zeros")),
        ];
        for (serial, bus, expected) in cases {
            match (check_serial(serial, bus), expected) {
                (Ok(()), None) => {}
                (Err(error), Some(words)) => assert!(error.to_string().contains(words), "{serial}: {error}"),
                (outcome, _) => panic!("{serial:?} {bus}: {outcome:?}"),
            }
        }
    }
}
