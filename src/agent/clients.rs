//! Accepts clients of one channel and serves each in a task of its own, a bounded number at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::supervise::Scope;
use crate::transport::BoxStream;
use crate::transport::listen::Listener;

/// Clients that may be connected to one channel; one more is closed.
const MAX_CLIENTS: u32 = 64;
/// How long accepting rests after the system had no means for it.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until `shutdown`, and then until every client's `serve` has ended, which it has to do soon.
pub async fn run<S, F>(listener: Listener, shutdown: CancellationToken, serve: S) -> anyhow::Result<()>
where
    S: Fn(String, BoxStream) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let scope = Scope::new();
    let places = Arc::new(Semaphore::new(MAX_CLIENTS as usize));
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
                    let served = serve(peer, stream);
                    scope.children().spawn(async move {
                        served.await;
                        drop(place);
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
    drop(places.acquire_many(MAX_CLIENTS).await);
    Ok(())
}
