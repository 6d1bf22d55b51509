//! Which health checks the agents of guest clusters make, as the controller says it: one long poll for each cluster that has VMs on this
//! node, whichever of its VMs it is made for.
//!
//! ```text
//!  session of a VM ──checks──▶ its cluster's poll ──WatchChecks──▶ controller
//!       ▲                          │ ends when no session is left
//!       └────── what has changed ──┘
//! ```
//!
//! What was told stays while the controller cannot be asked: agents go on.

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

/// For how long a poll waits.
const WAIT_SECONDS: u32 = 60;
/// Beyond that, how long its answer may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// Between two polls where the one before has failed, at first and at most; the latter also where the controller is too old to be asked.
const AGAIN: Duration = Duration::from_secs(1);
const SELDOM: Duration = Duration::from_secs(60);

/// The polls of a node; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Polls {
    clusters: Arc<Mutex<BTreeMap<String, Cluster>>>,
    tasks: Children,
}

#[derive(Debug)]
struct Cluster {
    told: watch::Sender<Arc<Checks>>,
    /// Names of VMs of it that had sessions here.
    vms: BTreeSet<String>,
}

impl Polls {
    /// None yet; tasks of these children make them.
    pub(super) fn new(tasks: Children) -> Self {
        Self { clusters: Arc::default(), tasks }
    }

    fn clusters(&self) -> MutexGuard<'_, BTreeMap<String, Cluster>> {
        // Nothing that is done under the lock leaves it half changed.
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the agent of a VM is to check.
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

    /// Follows the checks of a cluster, until no session wants them any more.
    async fn follow(&self, relay: &Relay, cluster: &str) {
        let Some(told) = self.clusters().get(cluster).map(|of| of.told.clone()) else { return };
        let mut again = AGAIN;
        loop {
            tokio::select! {
                () = told.closed() => {
                    let mut clusters = self.clusters();
                    // Somebody may have come meanwhile.
                    if told.is_closed() {
                        clusters.remove(cluster);
                        return;
                    }
                }
                polled = self.poll(relay, cluster, &told) => match polled {
                    Ok(()) => again = AGAIN,
                    Err(status) => {
                        tracing::debug!(cluster, "its health checks cannot be asked for: {}", status.message());
                        let is_too_old = status.code() == Code::Unimplemented;
                        again = if is_too_old { SELDOM } else { (again * 2).min(SELDOM) };
                        tokio::time::sleep(again.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
                    }
                },
            }
        }
    }

    /// Asks once.
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

    /// A VM of the cluster that runs on this node.
    fn running(&self, relay: &Relay, cluster: &str) -> Option<RunningVirtualMachine> {
        let mut clusters = self.clusters();
        let vms = &mut clusters.get_mut(cluster)?.vms;
        vms.retain(|name| relay.roster.get(name).is_some());
        let found = vms.iter().find_map(|name| relay.roster.get(name))?;
        Some(RunningVirtualMachine { namespace: found.namespace, name: found.name, uid: found.uid })
    }
}
