//! Disks plugged into running VMs through QMP.
//!
//! ```text
//!            provide            blockdev-add         device_add
//!  nothing ──────────▶ volume ──────────────▶ node ────────────▶ device      (attach)
//!                                               │                  │
//!  volume ◀─────────────────────────────────────┘◀─────────────────┘
//!                        blockdev-del              device_del, and the
//!                                                  guest releases it        (detach)
//! ```
//!
//! No state is stored here. The present state is read from QEMU for each operation (`seen`), and disks are
//! found by names made from the serial number ([`naming`]). An operation that was interrupted at any point can
//! therefore be repeated, and continues from there. A node without a device is a leftover of an interrupted
//! operation, or of a guest that released the device late: [`Vm::sweep`] closes it when the connection to QEMU
//! begins, and whenever one of guestlet's devices has been removed.
//!
//! There is one file per operation: `attach` and `detach`; a resize is a single command. `files` runs
//! operations that may hang, `authority` finds out which VM has an image open, `kept` removes volumes, and
//! `io_errors` records failed disk requests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Mutex, watch};

use super::super::disks::{
    Answer, AttachedDisk, Bus, Detached, DiskError, DiskVolume, Disks, GuestSide, NewDisk,
};
use super::link::{Link, Notice, Owner};
use crate::supervise::Children;
use crate::turns::{self, Turns};

mod attach;
mod authority;
mod detach;
mod files;
mod io_errors;
mod kept;
pub mod naming;
pub(super) mod place;
pub mod qcow2;
pub(super) mod seen;
pub(super) mod volume;

use files::Files;
use seen::Seen;

/// VMs of the list by name; `None` for one without a QMP socket.
pub type Vms = BTreeMap<String, Option<Arc<Vm>>>;

/// Plugs disks into the VMs of the list.
#[derive(Debug, Clone)]
pub struct Hotplug {
    vms: watch::Receiver<Vms>,
    files: Files,
}

/// VM into which disks can be plugged.
#[derive(Debug)]
pub struct Vm {
    name: String,
    uuid: String,
    pub(super) link: Link,
    children: Children,
    /// Held while nodes are created or closed, so that a node whose device is being created is never taken for a
    /// leftover.
    changing: Mutex<()>,
    /// Serial numbers with an operation in progress.
    busy: Turns<String>,
}

/// Present and possible disks of one kind in a VM.
#[derive(Debug)]
pub struct Places {
    /// Serial numbers of the plugged disks of guestlet's.
    pub ours: BTreeSet<String>,
    /// Number of further disks that can be plugged.
    pub free: usize,
}

/// Exclusive right to work on one disk, until it is dropped.
struct Turn {
    vm: Arc<Vm>,
    _turn: turns::Turn<String>,
}

impl Vm {
    /// Creates a VM with this UUID that is queried through `link`; operations run as `children`.
    pub fn new(name: String, uuid: String, link: Link, children: Children) -> Self {
        Self { name, uuid, link, children, changing: Mutex::default(), busy: Turns::default() }
    }

    fn turn(self: &Arc<Self>, serial: &str) -> Result<Turn, DiskError> {
        let turn = self.busy.take(serial.to_owned(), ()).map_err(|()| DiskError::Busy(serial.to_owned()))?;
        Ok(Turn { vm: Arc::clone(self), _turn: turn })
    }

    /// Closes the nodes of guestlet's that have no device, whenever there may be some, until the monitor ends.
    pub async fn sweep(self: Arc<Self>) {
        let mut notices = self.link.notices();
        loop {
            match notices.recv().await {
                Ok(Notice::Connected) | Err(RecvError::Lagged(_)) => {}
                Ok(Notice::DeviceDeleted(device)) if naming::is_ours(&device) => {}
                Ok(_) => continue,
                Err(RecvError::Closed) => return,
            }
            let _changing = self.changing.lock().await;
            let left = match self.leftovers().await {
                Ok(left) => left,
                Err(error) => {
                    tracing::debug!(vm = self.name, %error, "cannot look for leftover block nodes");
                    continue;
                }
            };
            for node in left {
                match detach::close_node(&self.link, &node).await {
                    Ok(()) => tracing::debug!(vm = self.name, node, "closed a leftover block node"),
                    Err(error) => tracing::warn!(vm = self.name, node, %error, "a block node stays open"),
                }
            }
        }
    }

    async fn leftovers(&self) -> Result<Vec<String>, DiskError> {
        let mut nodes = seen::nodes(&self.link).await?;
        nodes.retain(|name, _| naming::is_ours(name));
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        let devices = seen::devices(&self.link).await?;
        Ok(nodes.into_keys().filter(|name| !devices.contains_key(name)).collect())
    }

    async fn resize(&self, serial: &str, size: u64) -> Result<AttachedDisk, DiskError> {
        volume::check_size(size)?;
        let seen = Seen::read(&self.link).await?;
        let disk = seen.ours(serial)?;
        let found = disk.node.image.size;
        if size < found {
            return Err(DiskError::Shrinks { serial: serial.to_owned(), found });
        }
        // QEMU also expands the file and notifies the guest. This is done even if the size is unchanged: a host device
        // may have grown before, and an earlier attempt may have ended before the guest was notified.
        let arguments = json!({ "node-name": disk.node.name, "size": size });
        self.link.call("block_resize", arguments).await?;
        tracing::info!(vm = self.name, serial, size, "resized a disk");
        let seen = Seen::read(&self.link).await?;
        Ok(seen.describe(seen.ours(serial)?))
    }

    /// Returns the plugged disks and the free places at one moment: a disk that is plugged or unplugged between two
    /// separate readings would be counted twice or not at all.
    async fn room(&self, bus: Bus) -> Result<Places, DiskError> {
        let _changing = self.changing.lock().await;
        let mut ours = self.ours_on(bus).await?;
        loop {
            let free = place::free(&self.link, bus).await?;
            // The lock keeps disks from being plugged meanwhile, but a guest may release one at any time.
            let after = self.ours_on(bus).await?;
            if after == ours {
                return Ok(Places { ours, free });
            }
            ours = after;
        }
    }

    async fn ours_on(&self, bus: Bus) -> Result<BTreeSet<String>, DiskError> {
        let disks = self.list().await?.into_iter().filter(|disk| disk.ours && disk.bus == Some(bus));
        Ok(disks.map(|disk| disk.serial).collect())
    }

    async fn list(&self) -> Result<Vec<AttachedDisk>, DiskError> {
        let seen = Seen::read(&self.link).await?;
        Ok(seen.disks.iter().map(|disk| seen.describe(disk)).collect())
    }
}

impl Hotplug {
    /// Creates the hot-plugging of these VMs, with volumes in that directory.
    pub fn new(vms: watch::Receiver<Vms>, volumes: PathBuf) -> Self {
        Self { vms, files: Files::new(volumes) }
    }

    fn vm(&self, name: &str) -> Result<Arc<Vm>, DiskError> {
        let no_socket = || {
            let words = "the VM has no QMP socket in the settings of guestlet-host; set qmp";
            DiskError::NoHypervisor(words.to_owned())
        };
        self.vms.borrow().get(name).ok_or(DiskError::UnknownVm)?.clone().ok_or_else(no_socket)
    }

    /// Returns the disks of this kind that guestlet has plugged into a VM, and the number that can be added.
    pub fn room(&self, vm: &str, bus: Bus) -> Answer<Places> {
        self.begin(vm, move |vm| async move { vm.room(bus).await })
    }

    /// Closes the leftover block node of a disk with this serial number; returns whether there was one without a
    /// device.
    pub fn close_left(&self, vm: &str, serial: String) -> Answer<bool> {
        self.begin(vm, move |vm| async move {
            let turn = vm.turn(&serial)?;
            detach::close_left(&turn.vm, &serial).await
        })
    }

    /// Returns the user and group of the VM's QEMU, if known.
    pub fn owner(&self, vm: &str) -> Option<Owner> {
        self.vm(vm).ok()?.link.owner()
    }

    /// Runs an operation that continues even if its caller stops waiting for it.
    fn begin<T: Send + 'static, F>(&self, vm: &str, operation: impl FnOnce(Arc<Vm>) -> F) -> Answer<T>
    where
        F: Future<Output = Result<T, DiskError>> + Send + 'static,
    {
        let vm = match self.vm(vm) {
            Ok(vm) => vm,
            Err(error) => return Box::pin(async { Err(error) }),
        };
        let children = vm.children.clone();
        let outcome = children.run_to_end(operation(vm));
        let ended =
            || DiskError::Unreachable("the settings of the VM changed meanwhile; repeat the command".into());
        Box::pin(async move { outcome.await.unwrap_or_else(|| Err(ended())) })
    }
}

impl Disks for Hotplug {
    fn attach(&self, vm: &str, disk: NewDisk) -> Answer<AttachedDisk> {
        let files = self.files.clone();
        self.begin(vm, move |vm| async move {
            let turn = vm.turn(&disk.serial)?;
            attach::attach(&turn.vm, &disk, &files).await
        })
    }

    fn detach(
        &self,
        vm: &str,
        serial: String,
        patience: Duration,
        guest: Box<dyn GuestSide>,
    ) -> Answer<Detached> {
        self.begin(vm, move |vm| async move {
            let turn = vm.turn(&serial)?;
            detach::detach(&turn.vm, &serial, patience, &*guest).await
        })
    }

    fn resize(&self, vm: &str, serial: String, size: u64) -> Answer<AttachedDisk> {
        self.begin(vm, move |vm| async move {
            let turn = vm.turn(&serial)?;
            turn.vm.resize(&serial, size).await
        })
    }

    fn list(&self, vm: &str) -> Answer<Vec<AttachedDisk>> {
        self.begin(vm, move |vm| async move { vm.list().await })
    }

    fn volumes(&self, vm: Option<&str>) -> Answer<Vec<DiskVolume>> {
        Box::pin(self.clone().kept(vm.map(str::to_owned)))
    }

    fn remove_volume(&self, vm: &str, serial: &str) -> Answer<bool> {
        Box::pin(self.clone().remove_kept(vm.to_owned(), serial.to_owned()))
    }
}
