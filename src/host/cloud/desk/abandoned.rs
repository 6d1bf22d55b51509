//! Releases the load balancers of clusters that no longer have any VM in the settings, after some time, if the
//! administrator configures this.
//!
//! A missing VM table proves nothing by itself: the VM may run on another machine. By setting
//! `load-balancers.release-after-seconds` on a machine, its administrator declares that all VMs of its clusters
//! are here. The time starts anew with each start of the program, and whenever a VM table of the cluster is back.

use std::time::Duration;

use tokio::time::Instant;

use super::Desk;

impl Desk {
    /// Releases the load balancers of clusters that have had no VM in the settings for long enough.
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
        // Load balancers that share an address are released before the one that has it.
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
            // A failure is retried with the next tick.
            if let Err(problem) = self.release(cluster, &uid).await {
                tracing::warn!(cluster, "cannot release a load balancer: {problem}");
            }
        }
    }
}
