//! Detaches a disk: asks the guest to release it, waits until it has, and closes the storage behind it.
//!
//! ```text
//!  device ──released──▶ ? ──device_del──▶ asked ──DEVICE_DELETED──▶ node ──blockdev-del──▶ nothing
//!            │             │              │  ▲
//!            │             │              │  └─ asked again: a guest that boots may have missed it
//!            │             │              └─ timeout: an error; the node is closed when the guest releases the device later
//!            │             └─ QEMU refuses, or has ended: an error; the guest is notified that the disk stays
//!            └─ the guest's agent refuses: an error
//! ```

use std::time::Duration;

use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep, timeout_at};

use super::super::super::disks::{Detached, DiskError, GuestSide, Known};
use super::super::link::{CallError, Link, Notice};
use super::seen::{self, Seen};
use super::{Vm, naming};

/// Interval at which the request is repeated: a guest may miss one while it boots.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Timeout for QEMU to release a node, which happens only some moments after its device has been removed.
const NODE_PATIENCE: Duration = Duration::from_secs(10);
const NODE_AGAIN: Duration = Duration::from_millis(50);

pub(super) async fn detach(
    vm: &Vm,
    serial: &str,
    patience: Duration,
    guest: &dyn GuestSide,
) -> Result<Detached, DiskError> {
    let name = naming::name(serial);
    // Subscribe before the device is queried, so that the event of its removal cannot be missed.
    let mut waiting = Waiting { link: &vm.link, notices: vm.link.notices(), name: &name, serial };
    let seen = Seen::read(&vm.link).await?;
    match seen.ours(serial) {
        Ok(_) => {}
        // There is no such disk, or a leftover of an earlier attempt.
        Err(DiskError::NotAttached(_)) if !seen.devices.contains_key(&name) => {
            let _changing = vm.changing.lock().await;
            close_node(&vm.link, &name).await?;
            return Ok(Detached::Before);
        }
        Err(error) => return Err(error),
    }
    guest.release(&Known::serial(serial)).await?;
    if let Err(error) = waiting.until_deleted(patience).await {
        // A device whose removal is pending disappears as soon as the guest's kernel is ready, so it must not be used
        // again until then.
        if !matches!(error, DiskError::Kept { .. }) {
            guest.stays(&Known::serial(serial)).await;
        }
        return Err(error);
    }
    let _changing = vm.changing.lock().await;
    close_node(&vm.link, &name).await?;
    tracing::info!(vm = vm.name, serial, "detached a disk");
    Ok(Detached::Now)
}

/// Closes the node of a disk whose device no longer exists; returns whether there was a node without a device.
pub(super) async fn close_left(vm: &Vm, serial: &str) -> Result<bool, DiskError> {
    let name = naming::name(serial);
    let _changing = vm.changing.lock().await;
    let seen = Seen::read(&vm.link).await?;
    if seen.devices.contains_key(&name) || !seen.nodes.contains_key(&name) {
        return Ok(false);
    }
    close_node(&vm.link, &name).await?;
    Ok(true)
}

struct Waiting<'a> {
    link: &'a Link,
    notices: tokio::sync::broadcast::Receiver<Notice>,
    name: &'a str,
    serial: &'a str,
}

impl Waiting<'_> {
    /// Requests the removal of the device, and waits for it.
    async fn until_deleted(&mut self, patience: Duration) -> Result<(), DiskError> {
        let end = Instant::now() + patience;
        loop {
            if self.ask().await? || self.hear(end.min(Instant::now() + ASK_AGAIN)).await? {
                return Ok(());
            }
            // The event may have been sent before the connection was established.
            if !seen::devices(self.link).await?.contains_key(self.name) {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(DiskError::Kept { serial: self.serial.to_owned(), waited: patience });
            }
        }
    }

    /// Asks QEMU to remove the device; returns whether there is no such device.
    async fn ask(&self) -> Result<bool, DiskError> {
        match self.link.call("device_del", json!({ "id": self.name })).await {
            Ok(_) => Ok(false),
            Err(CallError::Refused { class, .. }) if class == "DeviceNotFound" => Ok(true),
            // QEMU has already asked the guest, or the guest is already removing it; neither has an error class of its
            // own.
            Err(CallError::Refused { description, .. })
                if description.contains("in the process of unplug") || description.contains("busy") =>
            {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until then for the event of the device's removal; returns whether it came.
    async fn hear(&mut self, until: Instant) -> Result<bool, DiskError> {
        loop {
            match timeout_at(until, self.notices.recv()).await {
                Ok(Ok(Notice::DeviceDeleted(device))) if device == self.name => return Ok(true),
                Ok(Ok(Notice::UnplugRefused(device))) if device == self.name => {
                    return Err(DiskError::GuestRefuses(self.serial.to_owned()));
                }
                Ok(Ok(
                    Notice::DeviceDeleted(_)
                    | Notice::UnplugRefused(_)
                    | Notice::Failed(_)
                    | Notice::BeginsAnew,
                )) => {}
                Ok(Ok(Notice::Connected) | Err(RecvError::Lagged(_))) | Err(_) => return Ok(false),
                Ok(Ok(Notice::Disconnected) | Err(RecvError::Closed)) => return Err(CallError::Lost.into()),
            }
        }
    }
}

/// Closes a node, if it exists. Waits while the removed device still holds it.
pub(super) async fn close_node(link: &Link, name: &str) -> Result<(), DiskError> {
    let end = Instant::now() + NODE_PATIENCE;
    loop {
        if !seen::nodes(link).await?.contains_key(name) {
            return Ok(());
        }
        match link.call("blockdev-del", json!({ "node-name": name })).await {
            Ok(_) => return Ok(()),
            Err(CallError::Refused { .. }) if Instant::now() < end => sleep(NODE_AGAIN).await,
            Err(error) => return Err(error.into()),
        }
    }
}
