//! Disks that a backend plugs into running VMs: requests, results and errors.
//!
//! A disk is identified by its serial number, which the guest reads too. All operations are idempotent: a
//! request whose result is already in place succeeds.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

/// Bus on which the guest sees the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bus {
    /// Disk on one of the VM's virtio-scsi controllers. It shows 36 bytes of the serial number as such, and up to
    /// 64 bytes as the text of page 83h.
    Scsi,
    /// Separate virtio-blk device, which takes a free PCI Express root port. It shows 20 bytes of the serial
    /// number.
    VirtioBlk,
}

impl Bus {
    /// Returns the maximum length of a serial number in bytes: the part of it that the guest can read. Page 83h has
    /// room for more.
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

/// Format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The bytes of the file are the bytes of the disk.
    Raw,
    /// QEMU's copy-on-write format, whose tables map disk blocks to places in the file.
    Qcow2,
}

impl Format {
    /// Returns the format's name, which is also the file extension.
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

/// Storage behind a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Existing image file or block device; an absolute path.
    File(PathBuf),
    /// Image of the backend's own: a regular file whose path is free of links. It is not checked again.
    Image(PathBuf),
    /// Volume of the VM with this serial number, created with this size in bytes if it does not exist.
    Volume(u64),
}

/// Disk to attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDisk {
    /// Serial number, unique in the VM.
    pub serial: String,
    /// Bus to plug the disk into.
    pub bus: Bus,
    /// Storage that holds the data.
    pub source: Source,
    /// Format of the image. `None` means raw for volumes, and the format given by the file's extension otherwise.
    /// The format is never detected from the contents: the guest writes those, and could name any file of the host
    /// as the backing file.
    pub format: Option<Format>,
    /// True if all data is in this one file: a backing file that it names is not opened.
    pub is_whole: bool,
    /// True if the guest may not write.
    pub read_only: bool,
}

/// Disk that a VM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedDisk {
    /// Serial number as the guest can read it; may be empty for a disk that guestlet did not attach.
    pub serial: String,
    /// Bus of the disk; `None` if guestlet did not attach it.
    pub bus: Option<Bus>,
    /// Backing storage, as the hypervisor names it.
    pub file: String,
    /// Format, in the hypervisor's terms.
    pub format: String,
    /// Size in bytes.
    pub size: u64,
    /// True if the guest may not write.
    pub read_only: bool,
    /// Hypervisor's name of the device.
    pub device: String,
    /// True if guestlet attached the disk. Others are only listed.
    pub ours: bool,
}

/// Result of a detach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    /// The disk was attached and has been removed.
    Now,
    /// No such disk was attached.
    Before,
}

/// Volume that was created together with its disk, whether or not the disk is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskVolume {
    /// VM for which the volume was created; it may no longer be in any list.
    pub vm: String,
    /// Serial number of its disk.
    pub serial: String,
    /// Path of the image.
    pub file: PathBuf,
    /// Format of the image.
    pub format: Format,
    /// Size in bytes that the guest sees; `None` if it cannot be determined.
    pub size: Option<u64>,
    /// Space in bytes that it occupies on the host.
    pub allocated: u64,
}

/// Reason why an operation on a disk failed.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The VM is in no list.
    #[error("there is no such VM")]
    UnknownVm,
    /// The VM has no hypervisor that could be asked to plug disks; the backend's text says what to do.
    #[error("{0}")]
    NoHypervisor(String),
    /// The hypervisor cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    /// The hypervisor refused.
    #[error("{0}")]
    Refused(String),
    /// The hypervisor gave an answer that cannot be parsed.
    #[error("{0}")]
    Strange(String),
    /// The serial number is invalid.
    #[error("serial {0}")]
    Serial(String),
    /// The size is invalid.
    #[error("size {0}")]
    Size(String),
    /// The file is unusable.
    #[error("file {0:?} {1}")]
    File(PathBuf, String),
    /// A system call on a file failed.
    #[error("cannot {0} {1:?}: {2}")]
    System(&'static str, PathBuf, #[source] io::Error),
    /// No format was given, and the file's extension does not show it.
    #[error("file {0:?}: set its format, raw or qcow2, which its name does not show")]
    NoFormat(PathBuf),
    /// Another disk of the VM has this serial number.
    #[error("serial {serial:?} is in use: {device} has it")]
    SerialInUse {
        /// Serial number that is in use.
        serial: String,
        /// Hypervisor's name of the other disk.
        device: String,
    },
    /// Another disk of the VM uses this file.
    #[error("file {file:?} is in use: it backs {device}")]
    FileInUse {
        /// File that is in use.
        file: PathBuf,
        /// Hypervisor's name of the other disk.
        device: String,
    },
    /// The disk is attached, but differs from the requested one.
    #[error("the disk {serial:?} is already attached with another {what}: {found}")]
    Different {
        /// Serial number of the attached disk.
        serial: String,
        /// Name of the property that differs.
        what: &'static str,
        /// Present value of that property.
        found: String,
    },
    /// The VM was started without a controller to plug the disk into; the backend's text says what to do.
    #[error("{0}")]
    NoController(String),
    /// All virtio-scsi controllers of the VM are full.
    #[error("all virtio-scsi controllers of the VM are full")]
    ControllersFull,
    /// All ports for hot-plug are taken; the backend's text says what to do.
    #[error("{0}")]
    NoPort(String),
    /// The VM has no disk with this serial number.
    #[error("the VM has no disk with serial {0:?}")]
    NotAttached(String),
    /// The disk exists but was not attached by guestlet.
    #[error("the disk {serial:?} ({device}) was not attached by guestlet, and is left alone")]
    NotOurs {
        /// Serial number of the disk.
        serial: String,
        /// Hypervisor's name of the disk.
        device: String,
    },
    /// The requested size is smaller than the present one.
    #[error("the disk {serial:?} already has {found} bytes, and cannot shrink")]
    Shrinks {
        /// Serial number of the disk.
        serial: String,
        /// Present size in bytes.
        found: u64,
    },
    /// The guest has not released the disk yet.
    #[error(
        "the guest has not released the disk {serial:?} within {} s; it is detached as soon as the guest does",
        waited.as_secs()
    )]
    Kept {
        /// Serial number of the disk.
        serial: String,
        /// Time spent waiting for the guest.
        waited: Duration,
    },
    /// The guest was not asked, did not answer, or refused; the text says which.
    #[error("{0}")]
    NotReleased(String),
    /// The guest's answer cannot be obtained, because the host half that holds its session cannot be reached; the
    /// text says why.
    #[error("{0}")]
    Untold(String),
    /// The guest's kernel refused to release the device.
    #[error("the guest refuses to release the disk {0:?}")]
    GuestRefuses(String),
    /// The volume has a holder; the text names it.
    #[error("{0}")]
    Held(String),
    /// Another operation on the same disk is in progress.
    #[error("another operation on the disk {0:?} is under way")]
    Busy(String),
}

/// Checks that a guest can distinguish disks on `bus` by this serial number, and can read all of it.
///
/// # Errors
/// If it cannot; the text says why.
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

/// Property by which a guest identifies a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Text that the guest compares.
    pub by: By,
    /// True if a program other than guestlet plugged the disk. Programs in the guest may then use it without the
    /// knowledge of the agent.
    pub is_adopted: bool,
}

/// Text that a guest compares to identify a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum By {
    /// Full serial number.
    Serial(String),
    /// Full text of page 83h, which identifies a SCSI disk without a serial number.
    Alias(String),
}

impl Known {
    /// Creates the identification of a disk that guestlet has plugged with this serial number.
    pub fn serial(serial: impl Into<String>) -> Self {
        Self { by: By::Serial(serial.into()), is_adopted: false }
    }

    /// Returns the text that the guest compares.
    pub fn text(&self) -> &str {
        match &self.by {
            By::Serial(text) | By::Alias(text) => text,
        }
    }
}

/// Guest side of a detach: notifies the guest while its disk is being removed.
#[tonic::async_trait]
pub trait GuestSide: Send + Sync {
    /// Asks the guest to release a disk that is about to be removed. The disk is not touched unless the guest
    /// agrees.
    ///
    /// # Errors
    /// [`DiskError::NotReleased`] if the disk must stay.
    async fn release(&self, disk: &Known) -> Result<(), DiskError>;

    /// Notifies the guest that a disk that it has released stays attached after all.
    async fn stays(&self, disk: &Known);

    /// Reports whether the caller takes responsibility for removing the disk regardless of the guest's answer.
    fn is_forced(&self) -> bool {
        false
    }
}

/// Future with the result of an operation.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, DiskError>> + Send>>;

/// Plugs disks into running VMs. An operation that has begun continues even if the caller stops waiting for its
/// result.
pub trait Disks: Send + Sync + fmt::Debug {
    /// Attaches a disk; succeeds if it is already attached as requested.
    fn attach(&self, vm: &str, disk: NewDisk) -> Answer<AttachedDisk>;
    /// Detaches a disk after its guest has released it; `patience` limits the wait for the guest's kernel.
    fn detach(
        &self,
        vm: &str,
        serial: String,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Answer<Detached>;
    /// Expands a disk to this size in bytes.
    fn resize(&self, vm: &str, serial: String, size: u64) -> Answer<AttachedDisk>;
    /// Returns all disks of a VM, including those that guestlet did not attach.
    fn list(&self, vm: &str) -> Answer<Vec<AttachedDisk>>;
    /// Returns the volumes that were created together with their disks, of one VM or of all, ordered by VM and
    /// serial number.
    fn volumes(&self, vm: Option<&str>) -> Answer<Vec<DiskVolume>>;
    /// Removes the volume that was created together with a disk; returns whether it existed. Fails unless it is
    /// proved to be unused.
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
