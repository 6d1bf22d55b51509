//! What guest clusters have left that are gone: it is given back when none of a cluster's VMs has existed for some time.
//!
//! ```text
//!  load balancers, and no VM is known ──the API lists none──▶ waiting ──none for so long, and none is listed now──▶ given back
//!                ▲                                              │
//!                └────────────── a VM is heard of or listed ────┘
//! ```
//!
//! That nothing is heard of VMs proves nothing, nor that none has a session: only a whole list of the API server does, made when
//! the time begins and again when it is over. Without an answer everything stays. The time begins anew with each leader.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::balancers::Standing;
use super::object::Object;
use super::queue::Job;
use super::{Done, Registry};

/// Between two looks, at most and at least.
const SELDOM: Duration = Duration::from_secs(600);
const OFTEN: Duration = Duration::from_millis(250);
/// Looks while the time of a cluster runs.
const LOOKS: u32 = 4;

/// Since when clusters have had no VMs, as far as that is proved.
#[derive(Debug)]
pub(super) struct Abandoned {
    since: BTreeMap<String, Instant>,
    /// When it is looked next.
    pub(super) next: Instant,
}

impl Default for Abandoned {
    fn default() -> Self {
        Self { since: BTreeMap::new(), next: Instant::now() }
    }
}

impl Abandoned {
    /// There is a VM of a cluster.
    pub(super) fn has_vms(&mut self, cluster: &str) {
        self.since.remove(cluster);
    }
}

/// A list of the clusters that have VMs in a namespace.
pub(super) struct Listed {
    namespace: String,
    begun: Instant,
    /// Their names in that namespace, or why it is not known.
    clusters: Result<BTreeSet<String>, String>,
}

impl Registry {
    /// Looks which clusters have load balancers and no VMs, and has that proved.
    pub(super) fn look_for_abandoned(&mut self) {
        let after = self.settings.borrow().release_after;
        let pace = after.map_or(SELDOM, |after| (after / LOOKS).clamp(OFTEN, SELDOM));
        self.abandoned.next = Instant::now() + pace;
        // Only who leads gives anything back, and whoever does not know all knows of nothing that it is missing.
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

    /// The clusters with load balancers that guestlet has made or taken over, of which no VM is known.
    fn without_vms(&self) -> BTreeSet<String> {
        let objects = self.balancers.objects().filter(|object| is_ours(object));
        let without = objects.filter(|object| !self.members.has(&object.cluster));
        without.map(|object| object.cluster.clone()).collect()
    }

    /// Gives back what clusters have left, of which no VM has existed for long enough.
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

/// Whether guestlet has made an object or taken it over, and nobody has deleted it yet.
fn is_ours(object: &Object) -> bool {
    !object.service.uid.is_empty() && !object.is_going()
}
