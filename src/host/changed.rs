//! Set of the VMs that have changed since they were last taken. A set loses nothing, however slow its reader is.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// Names of VMs that are new, removed, or changed.
#[derive(Debug, Default)]
pub struct Changed {
    names: Mutex<BTreeSet<String>>,
    news: Notify,
}

impl Changed {
    /// Adds a VM that has changed.
    pub fn add(&self, name: &str) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.contains(name) {
            names.insert(name.to_owned());
        }
        drop(names);
        // Notify keeps one permit, so a reader that arrives later does not miss this change.
        self.news.notify_one();
    }

    /// Waits until VMs have changed, and takes their names. For a single reader.
    pub async fn take(&self) -> BTreeSet<String> {
        loop {
            let names = std::mem::take(&mut *self.names.lock().unwrap_or_else(PoisonError::into_inner));
            if !names.is_empty() {
                return names;
            }
            self.news.notified().await;
        }
    }
}
