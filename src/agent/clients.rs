//! Accepts clients of one channel and serves each in a task of its own, a bounded number at a time.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::supervise::Scope;
use crate::transport::BoxStream;
use crate::transport::listen::{Incoming, Listener};

/// Clients that may be connected to one channel; one more is closed.
const MAX_CLIENTS: usize = 64;
/// How long accepting rests after the system had no means for it.
const PAUSE: Duration = Duration::from_secs(1);

/// The place of a client; free for another one when this is dropped.
pub struct Place(#[allow(dead_code, reason = "held, not looked at")] OwnedSemaphorePermit);

/// Says what went wrong with clients, once a second at most; clones share that.
#[derive(Debug, Clone, Default)]
pub struct Complaints(Arc<Mutex<Option<Instant>>>);

impl Complaints {
    /// Says it, unless something was said just before.
    pub fn tell(&self, words: &dyn std::fmt::Display) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            tracing::warn!("{words}");
            *last = Some(Instant::now());
        }
    }
}

/// Runs until `shutdown`, and then until every client's `serve` has ended, which it has to do soon.
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

/// As [`run`], for a `serve` that goes on after its client has gone, and gives the client's place back then.
pub async fn run_with_places<S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    serve: S,
) -> anyhow::Result<()>
where
    S: Fn(String, BoxStream, Place) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    accept(listener, shutdown, &Complaints::default(), Incoming::plain, serve).await
}

/// As [`run`], for a `serve` that finds out who its clients are, and complains of them as `complaints` do.
pub async fn run_doubting<S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    complaints: &Complaints,
    serve: S,
) -> anyhow::Result<()>
where
    S: Fn(String, Incoming) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    accept(listener, shutdown, complaints, Ok, |peer, incoming, place| {
        let served = serve(peer, incoming);
        async move {
            served.await;
            drop(place);
        }
    })
    .await
}

async fn accept<T, S, F>(
    listener: Listener,
    shutdown: CancellationToken,
    complaints: &Complaints,
    admit: fn(Incoming) -> Result<T, String>,
    serve: S,
) -> anyhow::Result<()>
where
    S: Fn(String, T, Place) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let scope = Scope::new();
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    // Held by each `serve` to its end.
    let (serving, mut served) = mpsc::channel::<Infallible>(1);
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted.map(|(peer, incoming)| (peer, incoming.and_then(admit))) {
            Ok((peer, Ok(stream))) => match Arc::clone(&places).try_acquire_owned() {
                Ok(place) => {
                    let (client, serving) = (serve(peer, stream, Place(place)), serving.clone());
                    scope.children().spawn(async move {
                        client.await;
                        drop(serving);
                    });
                }
                // Better an end at once than to wait for what may never come.
                Err(_) => {
                    complaints.tell(&format_args!(
                        "{peer}: {MAX_CLIENTS} clients are connected; one more is closed"
                    ));
                }
            },
            Ok((peer, Err(refusal))) => complaints.tell(&format_args!("{peer} is refused: {refusal}")),
            Err(error) => {
                // A lack of descriptors or memory passes.
                complaints.tell(&format_args!("cannot accept a connection: {error}"));
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    drop(serving);
    // Nothing is ever sent: it ends when the last one has.
    let _ = served.recv().await;
    Ok(())
}
