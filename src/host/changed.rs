//! Which VMs have changed since it was last asked: a set, so that nothing is lost however slow who asks is.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// The names of VMs, new, gone, or other than before.
#[derive(Debug, Default)]
pub struct Changed {
    names: Mutex<BTreeSet<String>>,
    news: Notify,
}

impl Changed {
    /// This one has changed.
    pub fn add(&self, name: &str) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.contains(name) {
            names.insert(name.to_owned());
        }
        drop(names);
        // One permit is kept for who asks later.
        self.news.notify_one();
    }

    /// Waits until some have changed, and takes their names. For one who asks.
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
