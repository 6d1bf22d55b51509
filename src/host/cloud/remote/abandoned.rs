//! Releases the load balancers of deleted guest clusters, after none of a cluster's VMs has existed for some time.
//!
//! ```text
//!  load balancers, and no VM is known ──the API lists none──▶ waiting ──none for so long, and none is listed now──▶ released
//!                ▲                                              │
//!                └────── a VM is reported or listed ────────────┘
//! ```
//!
//! Neither missing reports about VMs nor missing sessions prove anything. Only a complete list from the API server
//! does, made once when the waiting time begins and again when it is over. Without an answer everything stays. The
//! waiting time starts anew with each leader.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::balancers::Standing;
use super::object::Object;
use super::queue::Job;
use super::{Done, Registry};

/// Longest and shortest time between two looks.
const SELDOM: Duration = Duration::from_secs(600);
const OFTEN: Duration = Duration::from_millis(250);
/// Looks during the waiting time of a cluster.
const LOOKS: u32 = 4;

/// Times since which clusters have had no VMs, as proved by lists of the API server.
#[derive(Debug)]
pub(super) struct Abandoned {
    since: BTreeMap<String, Instant>,
    /// Time of the next look.
    pub(super) next: Instant,
}

impl Default for Abandoned {
    fn default() -> Self {
        Self { since: BTreeMap::new(), next: Instant::now() }
    }
}

impl Abandoned {
    /// Notes that a VM of a cluster exists, which ends the cluster's waiting time.
    pub(super) fn has_vms(&mut self, cluster: &str) {
        self.since.remove(cluster);
    }
}

/// Result of listing the clusters that have VMs in a namespace.
pub(super) struct Listed {
    namespace: String,
    begun: Instant,
    /// Names of the clusters within the namespace, or why they could not be listed.
    clusters: Result<BTreeSet<String>, String>,
}

impl Registry {
    /// Finds clusters that have load balancers and no known VM, and lists their VMs for proof.
    pub(super) fn look_for_abandoned(&mut self) {
        let after = self.settings.borrow().release_after;
        let pace = after.map_or(SELDOM, |after| (after / LOOKS).clamp(OFTEN, SELDOM));
        self.abandoned.next = Instant::now() + pace;
        // Only the leader releases anything, and with incomplete lists nothing can be said to be missing.
        let knows_all = self.members.is_complete() && self.balancers.standing == Standing::There;
        if after.is_none() || !knows_all || !self.api.is_changeable() {
            self.abandoned.since.clear();
            return;
        }
        let without = self.without_vms();
        self.abandoned.since.retain(|cluster, _| without.contains(cluster));
        let namespaces: BTreeSet<_> = without.iter().filter_map(|name| name.split('/').next()).collect();
        for namespace in namespaces.into_iter().map(str::to_owned) {
            let (lasting, done, begun) = (self.lasting.clone(), self.done.clone(), Instant::now());
            self.asking.children().spawn(async move {
                let clusters = lasting.clusters(&namespace).await;
                drop(done.send(Done::Abandoned(Listed { namespace, begun, clusters })).await);
            });
        }
    }

    /// Returns the clusters without any known VM that have load balancers which guestlet has created or taken over.
    fn without_vms(&self) -> BTreeSet<String> {
        let objects = self.balancers.objects().filter(|object| is_ours(object));
        let without = objects.filter(|object| !self.members.has(&object.cluster));
        without.map(|object| object.cluster.clone()).collect()
    }

    /// Takes in a list. Releases the load balancers of clusters that have had no VM for long enough.
    pub(super) fn abandoned(&mut self, listed: Listed) {
        let Listed { namespace, begun, clusters } = listed;
        let there = match clusters {
            Ok(there) => there,
            Err(why) => {
                tracing::warn!(
                    namespace,
                    "it is not known whether clusters still have VMs, so their load balancers stay: {why}"
                );
                return;
            }
        };
        let Some(after) = self.settings.borrow().release_after else { return };
        for cluster in self.without_vms() {
            let Some((of, label)) = cluster.split_once('/') else { continue };
            if of != namespace {
                continue;
            }
            if there.contains(label) {
                self.abandoned.since.remove(&cluster);
                continue;
            }
            let since = *self.abandoned.since.entry(cluster.clone()).or_insert(begun);
            if begun.saturating_duration_since(since) >= after {
                self.give_back_all(&cluster, after);
            }
        }
    }

    fn give_back_all(&mut self, cluster: &str, after: Duration) {
        let left: Vec<_> = self
            .balancers
            .objects()
            .filter(|object| object.cluster == cluster && is_ours(object))
            .map(|object| (object.id(), object.service.clone()))
            .collect();
        tracing::warn!(
            cluster,
            "no VM of the cluster has existed for {} s, so its {} load balancers are released",
            after.as_secs(),
            left.len()
        );
        for (id, service) in left {
            if !self.cluster(cluster).queue.has_abandoned(&id) {
                self.enqueue(cluster, Job::abandon(id, service));
            }
        }
    }
}

/// Reports whether guestlet has created an object or taken it over, and the object is not being deleted.
fn is_ours(object: &Object) -> bool {
    !object.service.uid.is_empty() && !object.is_going()
}
