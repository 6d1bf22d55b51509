//! Standing of a program with a cluster: whether what it knows of the cluster is up to date, whether its own
//! reports reach the cluster, and if not, why.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// Functions that currently fail, each with the reason; both as text for users.
pub type Problems = BTreeMap<&'static str, String>;

/// Reporter of the standing of one function, such as watching objects of one kind.
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
    /// Creates a reporter. `what` is the text for a failure, such as "the Node cannot be read"; `count` is called for
    /// each.
    pub fn new(
        what: &'static str,
        problems: watch::Sender<Problems>,
        count: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self { what, problems, count }
    }

    /// Reports a failure. Only the first one is logged as a warning until the next success.
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

    /// Reports a success.
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
