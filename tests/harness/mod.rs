//! Virtual machines for the tests, the demo and the measurements: real guests under QEMU, with KVM where it
//! works and QEMU's own emulation where it does not.
//!
//! ```text
//!     cache, archive
//!           │
//!        images ──▶ snapshot
//!           └────┬─────┘
//!             launch ──▶ vm ──┬─ qmp, console, qga   what a VM can be asked
//!                             ├─ gate                how its vsock is reached
//!                             ├─ grpc ◀── csi        kubelet and the sidecars of its cluster
//!     host, libvirt ──────────┴─ process             what runs, and that nothing of it is left
//!                                turns               what may run beside it
//! ```
//!
//! * [`images`] builds a kernel, the *fast* guest (kernel and initramfs: seconds) and the *real* one (Debian
//!   with systemd, udev, dbus and cloud-init); [`snapshot`] saves it booted, without and with the package
//!   installed, so that a test has it back in seconds. [`cache`] keeps them, keyed by what they are made of.
//! * [`launch`] starts one of them as a [`vm`], [`libvirt`] as a domain that virsh drives, and [`host`] starts a
//!   host half. Dropping them ends their processes and removes their files, also when a test panics; if the test
//!   process itself is killed, the kernel ends the processes.
//!
//! Nothing here opens a vsock socket: the tests' side of vsock is the unix socket of `vhost-device-vsock`.

pub mod archive;
pub mod cache;
pub mod console;
pub mod csi;
pub mod forward;
pub mod gate;
pub mod grpc;
pub mod host;
pub mod images;
pub mod launch;
pub mod libvirt;
pub mod lines;
pub mod process;
pub mod qemu;
pub mod qga;
pub mod qmp;
pub mod repository;
pub mod snapshot;
pub mod tools;
pub mod turns;
pub mod vm;

use std::time::{Duration, Instant};

use anyhow::bail;

/// Asks `probe` every 50 ms until it gives something.
///
/// # Errors
/// After `limit`, with `what` in words: "no … within …".
pub fn wait_for<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = probe() {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("no {what} within {} s", limit.as_secs_f32());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
