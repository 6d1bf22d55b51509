//! Whether what is known of the cluster is as it is now and the cluster knows what it is to know; and what is in the way.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// What does not work now, with the reason; both in words for people.
pub type Problems = BTreeMap<&'static str, String>;

/// Says how it goes with objects of one kind.
#[derive(Clone)]
pub struct Teller {
    what: &'static str,
    problems: watch::Sender<Problems>,
    count: Arc<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Teller {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Teller").field("what", &self.what).finish_non_exhaustive()
    }
}

impl Teller {
    /// One that says `what` when it fails, such as "the Node cannot be read", and has each failure counted.
    pub fn new(
        what: &'static str,
        problems: watch::Sender<Problems>,
        count: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self { what, problems, count }
    }

    /// It did not work. Logged once, until it is well again.
    pub fn failed(&self, words: &str) {
        (self.count)();
        let what = self.what;
        self.problems.send_if_modified(|problems| match problems.insert(what, words.to_owned()) {
            None => {
                tracing::warn!("{what}; retrying: {words}");
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
