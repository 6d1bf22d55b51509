//! Whether what is known of the cluster is as it is now, and what keeps it from being so.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use crate::host::backends::Problems;
use crate::host::half::Half;

/// Says how it goes with one kind of objects.
#[derive(Debug, Clone)]
pub struct Teller {
    what: &'static str,
    problems: watch::Sender<Problems>,
    half: Arc<Half>,
}

impl Teller {
    /// One for `what`, such as "the Node".
    pub fn new(what: &'static str, problems: watch::Sender<Problems>, half: Arc<Half>) -> Self {
        Self { what, problems, half }
    }

    /// It was asked for and not had. Logged once, until it is well again.
    pub fn failed(&self, words: String) {
        self.half.metrics.backend_failures.fetch_add(1, Ordering::Relaxed);
        let what = self.what;
        self.problems.send_if_modified(|problems| match problems.insert(what, words.clone()) {
            None => {
                tracing::warn!("{what} cannot be followed, and what is known stays as it is: {words}");
                true
            }
            Some(before) => {
                tracing::debug!("{what}: {words}");
                before != words
            }
        });
    }

    /// It is followed.
    pub fn well(&self) {
        let what = self.what;
        self.problems.send_if_modified(|problems| {
            let was_not = problems.remove(what).is_some();
            if was_not {
                tracing::info!("{what} can be followed again");
            }
            was_not
        });
    }
}
