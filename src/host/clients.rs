//! Clients of a listener, with a limit on their number.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::supervise::Scope;

/// Delay after a connection could not be accepted, for example for lack of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Clients that are being served; dropping it ends them all.
#[derive(Debug)]
pub struct Clients {
    what: &'static str,
    most: u32,
    places: Arc<Semaphore>,
    scope: Scope,
}

impl Clients {
    /// Creates a listener's clients, at most `most` at a time; `what` names them in the log.
    pub fn new(what: &'static str, most: u32) -> Self {
        let places = usize::try_from(most).unwrap_or(Semaphore::MAX_PERMITS);
        Self { what, most, places: Arc::new(Semaphore::new(places)), scope: Scope::new() }
    }

    /// Serves an accepted connection, or closes it at once if there are too many. After a failed accept it waits for a
    /// moment.
    pub async fn take<S, F>(&self, accepted: io::Result<S>, serve: impl FnOnce(S) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(what = self.what, %error, "cannot accept a client");
                return tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        };
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            return tracing::debug!(what = self.what, "rejected a client: {} are connected", self.most);
        };
        let served = serve(stream);
        self.scope.children().spawn(async move {
            served.await;
            drop(place);
        });
    }

    /// Waits until all clients have disconnected.
    pub async fn ended(&self) {
        drop(self.places.acquire_many(self.most).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn there_are_so_many_and_no_more() {
        let clients = Clients::new("test", 1);
        let (ends, end) = oneshot::channel::<()>();
        clients.take(Ok(end), |end| async move { drop(end.await) }).await;
        let (refused, other) = oneshot::channel::<()>();
        clients.take(Ok(other), |other| async move { drop(other.await) }).await;
        assert!(refused.is_closed(), "its connection is closed");
        assert!(!ends.is_closed());
        drop(ends);
        clients.ended().await;
        let (more, next) = oneshot::channel::<()>();
        clients
            .take(Err(io::Error::other("no descriptors")), |next: oneshot::Receiver<()>| async { drop(next) })
            .await;
        clients.take(Ok(next), |next| async move { drop(next.await) }).await;
        drop(clients);
        tokio::task::yield_now().await;
        assert!(more.is_closed(), "who serves it is gone");
    }
}
