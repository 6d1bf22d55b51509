//! Where the disks of VMs are plugged: nowhere but in the journal, unless a test brings VMs.

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// `namespace/name` of the instance.
    pub vm: String,
    /// The UID of the instance.
    pub instance: String,
    /// Where it runs.
    pub node: String,
    /// The name of the volume and the disk in its spec.
    pub volume: String,
    /// The claim, in the instance's namespace.
    pub claim: String,
    /// The name of the `PersistentVolume`.
    pub persistent_volume: String,
    /// Empty if the disk has none.
    pub serial: String,
    /// `scsi` or `virtio`.
    pub bus: String,
    /// The disk is a LUN, which has no serial.
    pub is_lun: bool,
    pub is_read_only: bool,
    pub bytes: u64,
}

impl Disk {
    /// What it shows as the text of page 83h, which libvirt makes of its name if it has no serial number.
    pub fn device_id(&self) -> String {
        if self.serial.is_empty() { format!("drive-ua-{}", self.volume) } else { self.serial.clone() }
    }
}

/// Plugs disks into running VMs. What takes long holds up only the disk that it is of.
#[tonic::async_trait]
pub trait Domain: Send + Sync + 'static {
    /// Returns when the VM has the disk, which is not yet when its guest has seen it.
    async fn plug(&self, disk: &Disk) -> Result<(), String>;

    /// Returns when the VM has let the disk go.
    async fn unplug(&self, disk: &Disk) -> Result<(), String>;

    /// The disk has this size now, which is in `bytes`.
    async fn resize(&self, disk: &Disk) {
        let _ = disk;
    }
}

/// A domain that has nothing to do.
pub struct Nothing;

#[tonic::async_trait]
impl Domain for Nothing {
    async fn plug(&self, _: &Disk) -> Result<(), String> {
        Ok(())
    }

    async fn unplug(&self, _: &Disk) -> Result<(), String> {
        Ok(())
    }
}
