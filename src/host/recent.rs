//! How guests were in the last minutes, by the names of their VMs: kept of what somebody asked for, and nothing is asked for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::metrics::recent::Recent;
use crate::wire::proto::v1::{CollectMetricsResponse, RecentMetrics};

/// Of all guests: some 4 KiB of each of which metrics were asked for lately.
#[derive(Debug, Default)]
pub struct Recents(Mutex<BTreeMap<String, Recent>>);

impl Recents {
    /// What the guest of a VM that there is has answered now.
    pub fn take(&self, name: &str, answer: &CollectMetricsResponse) {
        let now = Instant::now().into_std();
        let mut all = self.all();
        if let Some(known) = all.get_mut(name) {
            return known.take(now, answer);
        }
        all.retain(|_, known| !known.is_over(now));
        all.entry(name.to_owned()).or_default().take(now, answer);
    }

    /// What there is of this VM's guest.
    pub fn of(&self, name: &str) -> Option<RecentMetrics> {
        self.all().get(name)?.message(Instant::now().into_std())
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Recent>> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
