//! Runs work on a thread that is waited for only for a limited time. Work that has not begun to change anything by
//! then is cancelled, because something else may be mounted there later.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use crate::sys::blocking;

/// Flag that tells the work whether its caller is still waiting.
#[derive(Debug, Clone, Default)]
pub(super) struct Late(Arc<AtomicBool>);

impl Late {
    /// Checks whether the caller is still waiting. To be called immediately before a change.
    ///
    /// # Errors
    /// `ECANCELED` if the caller no longer waits.
    pub fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::SeqCst) { Err(Errno::ECANCELED.into()) } else { Ok(()) }
    }
}

/// Returns the outcome of the work, or `None` if it takes longer than `patience`.
pub(super) async fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce(&Late) -> io::Result<T> + Send + 'static,
) -> Option<io::Result<T>> {
    let late = Late::default();
    let its = late.clone();
    let done = tokio::time::timeout(patience, blocking::run(move || work(&its))).await.ok();
    late.0.store(true, Ordering::SeqCst);
    done
}
