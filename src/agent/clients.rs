//! Accepts clients of one channel and serves each in a task of its own, a bounded number at a time.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::pace::Complaints;
use crate::supervise::Scope;
use crate::transport::BoxStream;
use crate::transport::listen::{Incoming, Listener};

/// Maximum number of clients connected to one channel; one more is disconnected.
const MAX_CLIENTS: usize = 64;
/// Maximum number of clients that are being authenticated.
const MAX_GREETED: usize = 32;
/// Pause after a failure to accept a connection because descriptors or memory are exhausted.
const PAUSE: Duration = Duration::from_secs(1);

/// Slot of a client; free for another one when this is dropped.
pub struct Place(#[allow(dead_code, reason = "held, not looked at")] OwnedSemaphorePermit);

/// Serves clients until `shutdown`, and then waits until every client's `serve` has ended, which must be soon.
pub async fn run<S, F>(listener: Listener, shutdown: CancellationToken, serve: S) -> anyhow::Result<()>
where
    S: Fn(String, BoxStream) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    run_with_places(listener, shutdown, |peer, stream, place| {
        let served = serve(peer, stream);
        async move {
            served.await;
            drop(place);
        }
    })
    .await
}

/// Works as [`run`], for a `serve` that continues after its client has disconnected: it gives back the client's
/// slot itself.
pub async fn run_with_places<S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    serve: S,
) -> anyhow::Result<()>
where
    S: Fn(String, BoxStream, Place) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let (complaints, places) = (Complaints::default(), Places::new());
    accept(listener, shutdown, &complaints, Incoming::plain, |peer, stream| {
        Some(serve(peer.to_owned(), stream, places.take(peer, &complaints)?))
    })
    .await
}

/// Works as [`run`], for clients that have to be authenticated. A client has no slot while `greet` authenticates
/// it; if too many are being authenticated, the one that has waited longest is disconnected. Failures are reported
/// to `complaints`.
pub async fn run_doubting<G, H, T, S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    complaints: &Arc<Complaints>,
    greet: G,
    serve: S,
) -> anyhow::Result<()>
where
    G: Fn(String, Incoming) -> H,
    H: Future<Output = Option<T>> + Send + 'static,
    T: Send,
    S: Fn(String, T) -> F + Clone + Send + 'static,
    F: Future<Output = ()> + Send,
{
    let places = Places::new();
    let mut waiting: VecDeque<oneshot::Sender<Infallible>> = VecDeque::new();
    accept(listener, shutdown, complaints, Ok, |peer, incoming| {
        let peer = peer.to_owned();
        waiting.retain(|one| !one.is_closed());
        if waiting.len() >= MAX_GREETED {
            waiting.pop_front();
        }
        let (stays, displaced) = oneshot::channel();
        waiting.push_back(stays);
        let (greeting, places, serve) = (greet(peer.clone(), incoming), places.clone(), serve.clone());
        let complaints = Arc::clone(complaints);
        Some(async move {
            let greeted = tokio::select! {
                greeted = greeting => greeted,
                // Nothing is ever sent: this completes when the sender is dropped, to make way for a newer client.
                _ = displaced => None,
            };
            let Some(greeted) = greeted else { return };
            if let Some(place) = places.take(&peer, &complaints) {
                serve(peer, greeted).await;
                drop(place);
            }
        })
    })
    .await
}

/// Slots for the clients of one channel.
#[derive(Clone)]
struct Places(Arc<Semaphore>);

impl Places {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(MAX_CLIENTS)))
    }

    /// Takes a slot for `peer`. Without a free slot, returns `None` and the caller closes the connection: that is
    /// better for the client than to wait for a slot that may never be free.
    fn take(&self, peer: &str, complaints: &Complaints) -> Option<Place> {
        let place = Arc::clone(&self.0).try_acquire_owned().ok();
        if place.is_none() {
            complaints
                .tell(&format_args!("{peer}: {MAX_CLIENTS} clients are connected; closing another one"));
        }
        place.map(Place)
    }
}

/// Accepts connections, and serves those that `admit` admits and for which `serve` returns a future; others are
/// closed.
async fn accept<T, S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    complaints: &Complaints,
    admit: fn(Incoming) -> Result<T, String>,
    mut serve: S,
) -> anyhow::Result<()>
where
    S: FnMut(&str, T) -> Option<F>,
    F: Future<Output = ()> + Send + 'static,
{
    let scope = Scope::new();
    // Each `serve` holds a sender until it ends.
    let (serving, mut served) = mpsc::channel::<Infallible>(1);
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted.map(|(peer, incoming)| (peer, incoming.and_then(admit))) {
            Ok((peer, Ok(incoming))) => {
                if let Some(client) = serve(&peer, incoming) {
                    let serving = serving.clone();
                    scope.children().spawn(async move {
                        client.await;
                        drop(serving);
                    });
                }
            }
            Ok((peer, Err(refusal))) => complaints.tell(&format_args!("{peer} is refused: {refusal}")),
            Err(error) => {
                // A lack of descriptors or memory is temporary.
                complaints.tell(&format_args!("cannot accept a connection: {error}"));
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    drop(serving);
    // Nothing is ever sent: this completes when the last client has dropped its sender.
    let _ = served.recv().await;
    Ok(())
}
