//! Health checks for the agents of guest clusters, from the controller: one long poll for each cluster that has
//! VMs on this node, made on behalf of any one of these VMs.
//!
//! ```text
//!  session of a VM ──checks──▶ its cluster's poll ──WatchChecks──▶ controller
//!       ▲                          │ ends when no session is left
//!       └────── what has changed ──┘
//! ```
//!
//! While the controller cannot be reached, the last known checks stay in force and agents continue with them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Code, Status};

use super::{MEETING_OF_CLUSTERS, Relay};
use crate::host::backends::Vm;
use crate::host::for_guests::Checks;
use crate::supervise::Children;
use crate::wire::proto::v1::{RunningVirtualMachine, WatchChecksRequest, WatchChecksResponse};

/// Time in seconds that a poll waits at the controller.
const WAIT_SECONDS: u32 = 60;
/// Time for the answer of a poll, in addition to its wait.
const PATIENCE: Duration = Duration::from_secs(15);
/// First and longest delay after a failed poll. The longest one also applies if the controller is too old for the
/// call.
const AGAIN: Duration = Duration::from_secs(1);
const SELDOM: Duration = Duration::from_secs(60);

/// Long polls of a node; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Polls {
    clusters: Arc<Mutex<BTreeMap<String, Cluster>>>,
    tasks: Children,
}

#[derive(Debug)]
struct Cluster {
    told: watch::Sender<Arc<Checks>>,
    /// Names of the cluster's VMs that have had sessions here.
    vms: BTreeSet<String>,
}

impl Polls {
    /// Creates an empty set of polls, which will run as tasks of these children.
    pub(super) fn new(tasks: Children) -> Self {
        Self { clusters: Arc::default(), tasks }
    }

    fn clusters(&self) -> MutexGuard<'_, BTreeMap<String, Cluster>> {
        // A panic under the lock cannot leave the map half changed.
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the health checks for the agent of a VM, and starts the poll of its cluster if need be. `None` if the
    /// VM has no cluster.
    pub(super) fn of(&self, relay: &Relay, vm: &Vm) -> Option<watch::Receiver<Arc<Checks>>> {
        if vm.cluster.is_empty() {
            return None;
        }
        let mut clusters = self.clusters();
        let is_new = !clusters.contains_key(&vm.cluster);
        let cluster = clusters
            .entry(vm.cluster.clone())
            .or_insert_with(|| Cluster { told: watch::Sender::default(), vms: BTreeSet::new() });
        cluster.vms.insert(vm.name.clone());
        let told = cluster.told.subscribe();
        drop(clusters);
        if is_new {
            let (polls, relay, name) = (self.clone(), relay.clone(), vm.cluster.clone());
            self.tasks.spawn(async move { polls.follow(&relay, &name).await });
        }
        Some(told)
    }

    /// Follows the checks of a cluster until no session needs them.
    async fn follow(&self, relay: &Relay, cluster: &str) {
        let Some(told) = self.clusters().get(cluster).map(|of| of.told.clone()) else { return };
        let mut again = AGAIN;
        loop {
            tokio::select! {
                () = told.closed() => {
                    let mut clusters = self.clusters();
                    // A session may have subscribed in the meantime.
                    if told.is_closed() {
                        clusters.remove(cluster);
                        return;
                    }
                }
                polled = self.poll(relay, cluster, &told) => match polled {
                    Ok(()) => again = AGAIN,
                    Err(status) => {
                        tracing::debug!(cluster, "cannot request its health checks: {}", status.message());
                        let is_too_old = status.code() == Code::Unimplemented;
                        again = if is_too_old { SELDOM } else { (again * 2).min(SELDOM) };
                        tokio::time::sleep(again.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
                    }
                },
            }
        }
    }

    /// Makes one long poll, and publishes its answer if the generation has changed.
    async fn poll(
        &self,
        relay: &Relay,
        cluster: &str,
        told: &watch::Sender<Arc<Checks>>,
    ) -> Result<(), Status> {
        let gone = || Status::unavailable("none of its VMs runs on this node now");
        let vm = self.running(relay, cluster).ok_or_else(gone)?;
        let generation = told.borrow().generation;
        let request = WatchChecksRequest { vm: Some(vm), generation, wait_seconds: WAIT_SECONDS };
        let asked = async {
            let mut controller = relay.meet(MEETING_OF_CLUSTERS).await?;
            controller.watch_checks(request).await.map(tonic::Response::into_inner)
        };
        let most = Duration::from_secs(WAIT_SECONDS.into()) + PATIENCE;
        let late = |_| Status::unavailable("the controller does not answer");
        let answer = tokio::time::timeout(most, asked).await.map_err(late)??;
        let WatchChecksResponse { generation, report_seconds, checks: targets } = answer;
        told.send_if_modified(|before| {
            let is_new = before.generation != generation;
            if is_new {
                *before = Arc::new(Checks { generation, report_seconds, targets });
            }
            is_new
        });
        Ok(())
    }

    /// Returns a VM of the cluster that runs on this node.
    fn running(&self, relay: &Relay, cluster: &str) -> Option<RunningVirtualMachine> {
        let mut clusters = self.clusters();
        let vms = &mut clusters.get_mut(cluster)?.vms;
        vms.retain(|name| relay.roster.get(name).is_some());
        let found = vms.iter().find_map(|name| relay.roster.get(name))?;
        Some(RunningVirtualMachine { namespace: found.namespace, name: found.name, uid: found.uid })
    }
}
