//! Work in a thread that is waited for only so long. What has not begun to change anything by then does not do it any more: what is
//! there later may be something else.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use crate::sys::blocking;

/// Whether somebody still waits.
#[derive(Debug, Clone, Default)]
pub(super) struct Late(Arc<AtomicBool>);

impl Late {
    /// To be asked right before something is changed.
    ///
    /// # Errors
    /// `ECANCELED` if nobody waits any more.
    pub fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::SeqCst) { Err(Errno::ECANCELED.into()) } else { Ok(()) }
    }
}

/// The outcome of the work; `None` if it takes longer than `patience`.
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
