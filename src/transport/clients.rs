//! Clients of one socket, each served in a task of its own, a bounded number at a time.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::supervise::Children;
use crate::transport::http2::foreign::Foreign;
use crate::transport::{http2, unix};

/// Clients of one socket at a time. kubelet dials for each call; further clients wait.
const MOST: usize = 64;
/// Pause before accepting again after the system ran out of resources for it.
const PAUSE: Duration = Duration::from_secs(1);

/// Serves `service` to all clients of the listener, until the future is dropped. Connections that are open are
/// served until `shutdown`.
pub async fn serve<S: http2::Service>(
    listener: &unix::Listener,
    service: S,
    children: Children,
    shutdown: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(MOST));
    let refusals = Refusals::new(listener.path());
    loop {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(stream) => {
                let (service, shutdown, refusals) = (service.clone(), shutdown.clone(), refusals.clone());
                let path = listener.path().to_owned();
                let stream = Foreign::new(stream, move |why| refusals.tell(why));
                children.spawn(async move {
                    if let Err(error) = http2::serve(stream, service, shutdown).await {
                        tracing::debug!("{}: {error}", path.display());
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection on {}: {error}", listener.path().display());
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Reasons why clients of a socket were refused before any service received a call. Each reason is logged
/// once, because a refused client connects again and again.
#[derive(Clone)]
struct Refusals {
    path: Arc<Path>,
    told: Arc<Mutex<BTreeSet<&'static str>>>,
}

impl Refusals {
    fn new(path: &Path) -> Self {
        Self { path: path.into(), told: Arc::default() }
    }

    fn tell(&self, why: &'static str) {
        if self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(why) {
            let path = self.path.display();
            tracing::warn!("a client of {path} is refused: {why} (gRPC over plain HTTP/2 is served there)");
        }
    }
}
