//! The clients of a listener: so many at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::supervise::Scope;

/// The wait after a connection could not be accepted, for example for want of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Those that are served now; nobody is any more when this is dropped.
#[derive(Debug)]
pub struct Clients {
    what: &'static str,
    most: u32,
    places: Arc<Semaphore>,
    scope: Scope,
}

impl Clients {
    /// At most so many, of what the log calls so.
    pub fn new(what: &'static str, most: u32) -> Self {
        let places = usize::try_from(most).unwrap_or(Semaphore::MAX_PERMITS);
        Self { what, most, places: Arc::new(Semaphore::new(places)), scope: Scope::new() }
    }

    /// Serves one that was accepted, or closes its connection at once if there are too many. Where none could be accepted
    /// it waits for a moment.
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

    /// Waits until those that are served have ended.
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
