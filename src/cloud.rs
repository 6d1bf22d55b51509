//! The socket on which the cloud controller manager of the guest's cluster (`guestlet-ccm`) asks the host half: calls of
//! `guestlet.v1.Cloud` are [relayed](crate::transport::relay), and nothing is remembered.
//!
//! ```text
//!  waits for the socket's directory ──it appears──▶ listens ──▶ serves
//!       ▲                                             │ ▲         │
//!       │                   in use, not allowed: 30 s └─┘         │
//!       └──────────── the directory or the socket is gone ◀───────┘
//! ```
//!
//! The directory is that of the pod: it comes with the volume that is mounted into it, so that a guest whose cluster has no such
//! pod has no such socket. It is never made here, nor removed: what a pod has mounted stays the same while agents come and go.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::supervise::Scope;
use crate::sys::folder_news::FolderNews;
use crate::sys::{blocking, error_chain};
use crate::transport::relay::{Relay, Way};
use crate::transport::{clients, unix};
use crate::wire::proto::v1::cloud_server::SERVICE_NAME;

/// Who removes a directory and makes it again does it in many steps.
const QUIET: Duration = Duration::from_millis(50);
/// When it is looked again, if nothing changes before.
const RETRY: Duration = Duration::from_secs(30);

/// Serves the socket at this path until `shutdown`; its calls go that `way`.
///
/// # Errors
/// If directories cannot be watched.
pub async fn run(socket: PathBuf, way: Way, shutdown: CancellationToken) -> io::Result<()> {
    let (clients, relay) = (Scope::new(), Relay::new(SERVICE_NAME, way));
    let served = keep(&socket, &relay, &clients, &shutdown);
    shutdown.run_until_cancelled(served).await.unwrap_or(Ok(()))
}

async fn keep(
    socket: &Path,
    relay: &Relay,
    children: &Scope,
    shutdown: &CancellationToken,
) -> io::Result<()> {
    let folder = socket.parent().unwrap_or(Path::new("/")).to_owned();
    let mut complaint = String::new();
    loop {
        // Watched before it is looked at, so that no change falls between.
        let watched = folder.clone();
        let mut news = blocking::run(move || FolderNews::begin(&watched)).await;
        if !folder.is_dir() {
            // What is above the directory may not be there either, and is not watched.
            changed(&mut news).await?;
            continue;
        }
        match unix::Listener::bind(socket) {
            Ok(listener) => {
                complaint.clear();
                tracing::info!("waiting for guestlet-ccm on {}", socket.display());
                tokio::select! {
                    () = clients::serve(&listener, relay.clone(), children.children(), shutdown.clone()) => {}
                    lost = lost(&listener, &mut news) => lost?,
                }
                tracing::info!("{} is gone", socket.display());
            }
            Err(error) => {
                let words = error_chain::words(&error);
                if words != complaint {
                    tracing::warn!("cannot serve guestlet-ccm, retrying: {words}");
                    complaint = words;
                }
                changed(&mut news).await?;
            }
        }
        tokio::time::sleep(QUIET).await;
    }
}

/// Completes when something changes there, or after a while.
async fn changed(news: &mut FolderNews) -> io::Result<()> {
    tokio::select! {
        changed = news.changed() => changed,
        () = tokio::time::sleep(RETRY) => Ok(()),
    }
}

/// Completes when the socket cannot be found at its place any more.
async fn lost(listener: &unix::Listener, news: &mut FolderNews) -> io::Result<()> {
    loop {
        news.changed().await?;
        tokio::time::sleep(QUIET).await;
        if !listener.is_there() {
            return Ok(());
        }
    }
}
