//! Metrics of guests in the last minutes, by the names of their VMs. They are taken from answers to other
//! requests; no guest is asked for this purpose.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::metrics::recent::Recent;
use crate::wire::proto::v1::{CollectMetricsResponse, RecentMetrics};

/// Recent metrics of all guests: some 4 KiB for each guest whose metrics were requested recently.
#[derive(Debug, Default)]
pub struct Recents(Mutex<BTreeMap<String, Recent>>);

impl Recents {
    /// Takes the metrics that the guest of this VM has just reported. The caller ensures that the VM exists.
    pub fn take(&self, name: &str, answer: &CollectMetricsResponse) {
        let now = Instant::now().into_std();
        let mut all = self.all();
        if let Some(known) = all.get_mut(name) {
            return known.take(now, answer);
        }
        all.retain(|_, known| !known.is_over(now));
        all.entry(name.to_owned()).or_default().take(now, answer);
    }

    /// Returns the recent metrics of this VM's guest, if there are any.
    pub fn of(&self, name: &str) -> Option<RecentMetrics> {
        self.all().get(name)?.message(Instant::now().into_std())
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Recent>> {
        // A panic under the lock cannot leave the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
