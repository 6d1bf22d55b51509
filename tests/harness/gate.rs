//! Stands between a host half and `vhost-device-vsock`, whose version 0.3 stops serving for good when the
//! host's side says anything, be it a new connection or the end of one, while the guest's driver is not up:
//! that is, whenever a guest reboots. A kernel's vsock device does not mind.
//!
//! So nothing gets through while QEMU says that the driver is not up. A connection made then is closed at
//! once, as the device itself does before a guest's first boot. The device also panics when the host's side of a new
//! connection has gone before the guest has accepted it: its end is kept from it until then.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::json;

use super::qmp::Qmp;

/// How often a closed gate is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// The socket that a host half dials. Dropping it stops it.
#[derive(Debug)]
pub struct Gate {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Gate {
    /// Listens at `socket` for the device at `device`, of a VM with a monitor of the gate's own at `monitor`.
    pub fn start(socket: PathBuf, device: PathBuf, monitor: &Path) -> anyhow::Result<Self> {
        let watch = Arc::new(Watch(Qmp::connect(monitor)?));
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("cannot use {}", socket.display()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let (Ok(client), watch, device) = (client, Arc::clone(&watch), device.clone()) else {
                    continue;
                };
                std::thread::spawn(move || serve(client, &device, &watch));
            }
        });
        Ok(Self { socket, stop })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the listener.
        drop(UnixStream::connect(&self.socket));
    }
}

struct Watch(Qmp);

impl Watch {
    /// Whether the guest's driver is up; `None` if QEMU is gone.
    fn is_open(&self) -> Option<bool> {
        let device = json!({ "path": "/machine/peripheral/vsock0/virtio-backend" });
        let answer = self.0.execute("x-query-virtio-status", device).ok()?;
        Some(answer["status"]["statuses"].to_string().contains("DRIVER_OK"))
    }

    fn wait_open(&self) {
        while self.is_open() == Some(false) {
            std::thread::sleep(LOOK);
        }
    }
}

/// One connection. Both ends close together: vsock through this device knows no half-closed connections.
fn serve(client: UnixStream, device: &Path, watch: &Watch) {
    let (mut client, mut chunk) = (client, vec![0; 65536]);
    let Ok(length @ 1..) = client.read(&mut chunk) else { return };
    if watch.is_open() != Some(true) {
        return;
    }
    let Ok(mut guest) = UnixStream::connect(device) else { return };
    let (Ok(mut from_guest), Ok(mut to_client)) = (guest.try_clone(), client.try_clone()) else { return };
    if guest.write_all(&chunk[..length]).is_err() {
        return;
    }
    // `OK` with a port, or nothing.
    let mut answer = [0; 64];
    let Ok(accepted @ 1..) = guest.read(&mut answer) else { return };
    drop(client.write_all(&answer[..accepted]));
    let back = std::thread::spawn(move || {
        drop(std::io::copy(&mut from_guest, &mut to_client));
        drop(to_client.shutdown(Shutdown::Both));
    });
    loop {
        let length = client.read(&mut chunk).unwrap_or(0);
        watch.wait_open();
        if length == 0 || guest.write_all(&chunk[..length]).is_err() {
            break;
        }
    }
    drop(guest.shutdown(Shutdown::Both));
    drop(back.join());
}
