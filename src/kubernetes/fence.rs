//! Fence that keeps a program from changing anything in the cluster while it does not lead, or no longer leads.
//!
//! Every change goes through [`Fence::change`]. A change in progress is aborted at the end of the time for which
//! this program is known to lead, and [`Fence::close`] waits for it.

use std::sync::Arc;

use tokio::sync::{RwLock, watch};
use tokio::time::Instant;

/// Reason why a change was not made, or may not have been completed.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("this replica of the controller is not the leader")]
pub struct Closed;

/// Deadline until which this program may change things; clones share it.
#[derive(Debug, Clone)]
pub struct Fence {
    until: watch::Sender<Option<Instant>>,
    changing: Arc<RwLock<()>>,
}

impl Default for Fence {
    /// Creates a closed fence, which is opened by the first extension.
    fn default() -> Self {
        Self { until: watch::Sender::new(None), changing: Arc::default() }
    }
}

impl Fence {
    /// Permits changes until this time.
    pub fn extend(&self, until: Instant) {
        self.until.send_replace(Some(until));
    }

    /// Refuses new changes from now on.
    pub fn shut(&self) {
        self.until.send_replace(None);
    }

    /// Refuses new changes from now on, and waits for those in progress.
    pub async fn close(&self) {
        self.shut();
        drop(self.changing.write().await);
    }

    /// Returns whether changes may be made now.
    pub fn is_open(&self) -> bool {
        self.until.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Makes a change if that is permitted, and aborts it when the permission ends.
    ///
    /// # Errors
    /// The error of the change; or an error of its own, if the change is not permitted or was aborted.
    pub async fn change<T, E: From<Closed>>(
        &self,
        change: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let _changing = self.changing.read().await;
        let mut change = Box::pin(change);
        loop {
            let until = self.until.borrow().filter(|until| Instant::now() < *until);
            let until = until.ok_or(Closed)?;
            // On a timeout, look again: the fence may have been extended meanwhile.
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
        // The program stood still until its time was over.
        tokio::time::advance(SECOND).await;
        assert!(!fence.is_open() && fence.change(async { Ok::<_, Closed>(()) }).await.is_err());
        // A change that takes longer than the permission lasts.
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
