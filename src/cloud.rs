//! Socket on which the cloud controller manager of the guest's cluster (`guestlet-ccm`) calls the host half. Calls
//! of `guestlet.v1.Cloud` are [relayed](crate::transport::relay); no state is kept.
//!
//! ```text
//!  waits for the socket's directory ──it appears──▶ listens ──▶ serves
//!       ▲                                             │ ▲         │
//!       │                   in use, not allowed: 30 s └─┘         │
//!       └────────── the directory or the socket is removed ◀──────┘
//! ```
//!
//! The directory belongs to the pod: it comes with the volume that is mounted into it, so a guest whose cluster
//! has no such pod has no such socket. The agent never creates or removes the directory, so that the mount in the
//! pod stays the same across restarts of the agent.

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

/// Pause before looking again: removing and recreating a directory takes many steps, each of which is a change.
const QUIET: Duration = Duration::from_millis(50);
/// Interval between two looks while no change is reported.
const RETRY: Duration = Duration::from_secs(30);

/// Serves the socket at this path until `shutdown`, and relays its calls along `way`.
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
        // Watch the directory before looking at it, so that no change falls in between.
        let watched = folder.clone();
        let mut news = blocking::run(move || FolderNews::begin(&watched)).await;
        if !folder.is_dir() {
            // The parent of the directory may be missing as well, and is not watched.
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
                tracing::info!("the socket {} was removed", socket.display());
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

/// Completes when something changes in the directory, or after `RETRY`.
async fn changed(news: &mut FolderNews) -> io::Result<()> {
    tokio::select! {
        changed = news.changed() => changed,
        () = tokio::time::sleep(RETRY) => Ok(()),
    }
}

/// Completes when the socket is no longer at its path.
async fn lost(listener: &unix::Listener, news: &mut FolderNews) -> io::Result<()> {
    loop {
        news.changed().await?;
        tokio::time::sleep(QUIET).await;
        if !listener.is_there() {
            return Ok(());
        }
    }
}
