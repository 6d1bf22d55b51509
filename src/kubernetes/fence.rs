//! What keeps a program that does not lead, or does not any more, from changing anything in the cluster.
//!
//! Every change goes through [`Fence::change`]. One that is under way ends when the time is over for which this program is
//! known to lead, and [`Fence::close`] waits for it.

use std::sync::Arc;

use tokio::sync::{RwLock, watch};
use tokio::time::Instant;

/// Why a change was not made, or may not have been.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("this replica of the controller is not the leader")]
pub struct Closed;

/// Until when this program may change things; clones share it.
#[derive(Debug, Clone)]
pub struct Fence {
    until: watch::Sender<Option<Instant>>,
    changing: Arc<RwLock<()>>,
}

impl Default for Fence {
    /// One that nothing passes before it is extended.
    fn default() -> Self {
        Self { until: watch::Sender::new(None), changing: Arc::default() }
    }
}

impl Fence {
    /// Changes may be made until then.
    pub fn extend(&self, until: Instant) {
        self.until.send_replace(Some(until));
    }

    /// No change is begun any more.
    pub fn shut(&self) {
        self.until.send_replace(None);
    }

    /// No change is begun any more; returns when none is under way.
    pub async fn close(&self) {
        self.shut();
        drop(self.changing.write().await);
    }

    /// Whether changes may be made now.
    pub fn is_open(&self) -> bool {
        self.until.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Makes a change, which takes no longer than it may.
    ///
    /// # Errors
    /// As the change, and if it may not be made, or takes too long.
    pub async fn change<T, E: From<Closed>>(
        &self,
        change: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let _changing = self.changing.read().await;
        let mut change = Box::pin(change);
        loop {
            let until = self.until.borrow().filter(|until| Instant::now() < *until);
            let until = until.ok_or(Closed)?;
            // It may lead for longer by then.
            if let Ok(changed) = tokio::time::timeout_at(until, &mut change).await {
                return changed;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn nothing_is_changed_by_a_program_that_does_not_lead() {
        let fence = Fence::default();
        assert!(!fence.is_open() && fence.change(async { Ok::<_, Closed>(()) }).await.is_err());
        fence.extend(Instant::now() + SECOND);
        assert!(fence.is_open() && fence.change(async { Ok::<_, Closed>(()) }).await.is_ok());
        // It stood still meanwhile.
        tokio::time::advance(SECOND).await;
        assert!(!fence.is_open() && fence.change(async { Ok::<_, Closed>(()) }).await.is_err());
        // A change that takes longer than it leads.
        fence.extend(Instant::now() + SECOND);
        let begun = Instant::now();
        let slow = fence.change(async {
            tokio::time::sleep(10 * SECOND).await;
            Ok::<_, Closed>(())
        });
        assert!(slow.await.is_err());
        assert_eq!(begun.elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn who_closes_it_waits_for_what_is_under_way() {
        let fence = Fence::default();
        fence.extend(Instant::now() + 10 * SECOND);
        let slow = fence.change(async {
            tokio::time::sleep(SECOND).await;
            Ok::<_, Closed>(Instant::now())
        });
        let closing = async {
            tokio::task::yield_now().await;
            fence.close().await;
            Instant::now()
        };
        let (changed, closed) = tokio::join!(slow, closing);
        assert!(closed >= changed.unwrap());
        assert!(fence.change(async { Ok::<_, Closed>(()) }).await.is_err());
    }
}
