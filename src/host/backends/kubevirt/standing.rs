//! Whether what is known of the cluster is as it is now and the cluster knows what it is to know; and what is in the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use crate::host::backends::Problems;
use crate::host::half::Half;

/// Says how it goes with objects of one kind.
#[derive(Debug, Clone)]
pub struct Teller {
    what: &'static str,
    problems: watch::Sender<Problems>,
    half: Arc<Half>,
}

impl Teller {
    /// One that says `what` when it fails, such as "the Node cannot be read".
    pub fn new(what: &'static str, problems: watch::Sender<Problems>, half: Arc<Half>) -> Self {
        Self { what, problems, half }
    }

    /// It did not work. Logged once, until it is well again.
    pub fn failed(&self, words: &str) {
        self.half.metrics.backend_failures.fetch_add(1, Ordering::Relaxed);
        let what = self.what;
        self.problems.send_if_modified(|problems| match problems.insert(what, words.to_owned()) {
            None => {
                tracing::warn!("{what}; it is tried again: {words}");
                true
            }
            Some(before) => {
                tracing::debug!("{what}: {words}");
                before != words
            }
        });
    }

    /// It works.
    pub fn well(&self) {
        let what = self.what;
        self.problems.send_if_modified(|problems| {
            let was_not = problems.remove(what).is_some();
            if was_not {
                tracing::info!("over: {what}");
            }
            was_not
        });
    }
}
