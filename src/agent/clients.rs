//! Accepts clients of one channel and serves each in a task of its own, a bounded number at a time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::supervise::Scope;
use crate::transport::BoxStream;
use crate::transport::listen::Listener;

/// Clients that may be connected to one channel; one more is closed.
const MAX_CLIENTS: usize = 64;
/// How long accepting rests after the system had no means for it.
const PAUSE: Duration = Duration::from_secs(1);

/// The place of a client; free for another one when this is dropped.
pub struct Place(#[allow(dead_code, reason = "held, not looked at")] OwnedSemaphorePermit);

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
    let scope = Scope::new();
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    // Held by each `serve` to its end.
    let (serving, mut served) = mpsc::channel::<Infallible>(1);
    let mut complained: Option<Instant> = None;
    let mut complain = |words: &dyn std::fmt::Display| {
        if complained.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            tracing::warn!("{words}");
            complained = Some(Instant::now());
        }
    };
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted {
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
                    complain(&format_args!(
                        "{peer}: {MAX_CLIENTS} clients are connected; one more is closed"
                    ));
                }
            },
            Ok((peer, Err(refusal))) => complain(&format_args!("{peer} is refused: {refusal}")),
            Err(error) => {
                // A lack of descriptors or memory passes.
                complain(&format_args!("cannot accept a connection: {error}"));
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
