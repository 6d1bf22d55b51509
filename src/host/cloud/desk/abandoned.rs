//! What clusters have left that have no VM in the settings any more: given back after some time, if the administrator says so.
//!
//! That a VM's table is gone proves nothing by itself: the VM may run on another machine. `load-balancers.release-after-seconds`
//! on a machine is its administrator's word that clusters have all their VMs here. Each start, and each table that comes back,
//! begins the time anew.

use std::time::Duration;

use tokio::time::Instant;

use super::Desk;

impl Desk {
    /// Gives back what clusters have whose VMs the settings have not named for long enough.
    pub(super) async fn give_back_abandoned(&mut self) {
        let Some(after) = self.settings.release_after else {
            self.abandoned.clear();
            return;
        };
        let settings = std::sync::Arc::clone(&self.settings);
        let is_left = |cluster: &String| !settings.of_clusters.contains_key(cluster);
        self.abandoned.retain(|cluster, _| is_left(cluster));
        let left: Vec<_> = self.book.clusters().filter(|cluster| is_left(cluster)).cloned().collect();
        for cluster in left {
            let since = *self.abandoned.entry(cluster.clone()).or_insert_with(Instant::now);
            if since.elapsed() >= after {
                self.give_back_all(&cluster, after).await;
            }
        }
    }

    async fn give_back_all(&mut self, cluster: &str, after: Duration) {
        // Whoever shares an address goes before the one that has it.
        let mut all: Vec<_> = self.book.of_cluster(cluster).filter(|record| record.is_kept()).collect();
        all.sort_by_key(|record| self.book.shared_by(record).is_none());
        let uids: Vec<_> = all.iter().map(|record| record.service.uid.clone()).collect();
        if uids.is_empty() {
            return;
        }
        tracing::warn!(
            cluster,
            "the settings have had no VM of the cluster for {} s, so its {} load balancers are released",
            after.as_secs(),
            uids.len()
        );
        for uid in uids {
            // It is tried again with the next tick.
            if let Err(problem) = self.release(cluster, &uid).await {
                tracing::warn!(cluster, "cannot release a load balancer: {problem}");
            }
        }
    }
}
