//! A vsock port in a guest whose kernel has no vsock yet: its module is loaded later, or with the device that is plugged
//! later.
//!
//! ```text
//! /dev/vsock is missing ──it appears──▶ listening
//!                           └─ the port cannot be had ──RETRY──▶ once more
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::{OnceCell, watch};

use crate::sys::error_chain;
use crate::transport::appearance::Watch;
use crate::transport::vsock::{self, Guard};

/// The device that the kernel shows when it has vsock.
pub const DEVICE: &str = "/dev/vsock";
/// Time between two attempts to listen on a port while that fails although the kernel has vsock.
const RETRY: Duration = Duration::from_secs(5);

/// Listener on a port that is bound as soon as the kernel has vsock.
#[derive(Debug)]
pub struct Listener {
    port: u32,
    guard: Guard,
    /// Description of where clients are awaited.
    words: watch::Sender<String>,
    bound: OnceCell<vsock::Listener>,
}

impl Listener {
    /// One that does not listen yet, and the words that say whether it does.
    pub fn new(port: u32, guard: Guard) -> (Self, watch::Receiver<String>) {
        let (words, told) = watch::channel("none (no vsock)".to_owned());
        (Self { port, guard, words, bound: OnceCell::new() }, told)
    }

    /// The listener, once there is one.
    ///
    /// # Errors
    /// If nothing can be waited for, as inotify(7) says it.
    pub async fn listening(&self) -> io::Result<&vsock::Listener> {
        let bind = || vsock::Listener::bind(self.port, self.guard);
        self.bound
            .get_or_try_init(|| async {
                let listener = when_there(Path::new(DEVICE), bind).await?;
                tracing::info!("the kernel has vsock now: listening on vsock port {}", self.port);
                self.words.send_replace(format!("vsock port {}", self.port));
                Ok(listener)
            })
            .await
    }
}

/// Returns the result of `bind` once `device` exists. It is not called earlier, because each request for a
/// vsock socket makes the kernel look for the module.
async fn when_there<T>(device: &Path, bind: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let mut complained = false;
    loop {
        appearance(device.to_owned()).await?;
        match bind() {
            Ok(listener) => return Ok(listener),
            Err(error) if !complained => {
                complained = true;
                let seconds = RETRY.as_secs();
                tracing::warn!(
                    "cannot listen on vsock, trying again every {seconds} s: {}",
                    error_chain::words(&error)
                );
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn appearance(device: PathBuf) -> io::Result<()> {
    loop {
        let watch = Watch::new(&device);
        if device.exists() {
            return Ok(());
        }
        watch.changed().await?;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Regression test: the agent did not listen until it was restarted.
    #[tokio::test(start_paused = true)]
    async fn the_port_is_taken_when_the_kernel_has_vsock_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("vsock");
        let tries = Cell::new(0);
        let bind = || {
            tries.set(tries.get() + 1);
            if tries.get() < 3 { Err(io::Error::from(io::ErrorKind::AddrInUse)) } else { Ok(tries.get()) }
        };
        let appearing = async {
            // An unrelated entry appears first.
            std::fs::create_dir(folder.path().join("other")).unwrap();
            tokio::task::yield_now().await;
            assert_eq!(tries.get(), 0);
            std::fs::create_dir(&device).unwrap();
        };
        let listening = tokio::time::timeout(Duration::from_secs(60), when_there(&device, bind));
        let (listener, ()) = tokio::join!(listening, appearing);
        assert_eq!(listener.unwrap().unwrap(), 3);
    }

    #[test]
    fn until_then_it_says_that_there_is_none() {
        let (_listener, words) = Listener::new(970, Guard { peer_cid: 2, any_port: false });
        assert_eq!(*words.borrow(), "none (no vsock)");
    }
}
