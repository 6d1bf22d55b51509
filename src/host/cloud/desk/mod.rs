//! Task that owns all load balancers, and the state of the clusters' VMs.
//!
//! ```text
//!  Request ───────────┐                        ┌──▶ answers (a record is on the disk by then)
//!  a VM has changed ──┤   take in, at once     │
//!  settings ──────────┼──▶ clusters that are ──┴──▶ settle: views for polls, checks for agents, plan for the kernel
//!  rules in force ────┤    not settled
//!  time ──────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::book::Book;
use super::endpoints::Target;
use super::forward::plan::{Forwarded, Given};
use super::forward::{InForce, Numbered};
use super::health::Heard;
use super::instance::Member;
use super::journal::Journal;
use super::meet::Failure;
use super::reach::Neighbours;
use super::settings::Settings;
use super::store::Store;
use super::{Handle, INBOX, Request};
use crate::host::changed::Changed;
use crate::host::fleet;
use crate::host::for_guests::Checks;
use crate::host::half::Half;
use crate::host::metrics::balancers::Counts;
use crate::wire::proto::v1;

mod abandoned;
mod answer;
mod ask;
mod disk;
mod settle;

/// Time within which successive changes of a cluster are settled together.
const TOGETHER: Duration = Duration::from_millis(20);
/// Interval at which stale reports are found, and failed requests retried.
const TICK: Duration = Duration::from_secs(5);

/// Time after a start for which rules of an earlier run stay until all agents have connected and all checks have
/// passed.
const GRACE: Duration = Duration::from_secs(10);

/// Channels and settings that the desk works with.
#[derive(Debug)]
pub struct Parts {
    /// Identity and metrics of this run of the host half.
    pub half: Arc<Half>,
    /// Source of the VMs and their guests.
    pub fleet: fleet::Handle,
    /// Names of VMs that have changed.
    pub changed: Arc<Changed>,
    /// Settings of load balancers, replaced on a reload.
    pub settings: watch::Receiver<Arc<Settings>>,
    /// Directory of the records.
    pub state_dir: PathBuf,
    /// Plans for the forwarder.
    pub plans: watch::Sender<Numbered>,
    /// Plan that the forwarder has put in force.
    pub in_force: watch::Receiver<InForce>,
    /// Nodes to be asked whether they have endpoints.
    pub targets: watch::Sender<Vec<Target>>,
    /// Addresses to look up in the neighbour table.
    pub candidates: watch::Sender<BTreeSet<IpAddr>>,
    /// Latest result of looking up the candidates.
    pub neighbours: watch::Receiver<Arc<Neighbours>>,
}

/// Task that owns the load balancers of this host.
#[derive(Debug)]
pub struct Desk {
    parts: Parts,
    settings: Arc<Settings>,
    neighbours: Arc<Neighbours>,
    inbox: mpsc::Receiver<Request>,
    /// Directory of the records, or why it cannot be used; `None` until it is needed.
    store: Option<Result<Arc<Store>, String>>,
    book: Book,
    clusters: BTreeMap<String, Cluster>,
    /// Cluster and lasting identifier of each VM, by name.
    vms: BTreeMap<String, (String, String)>,
    /// Reasons why load balancers do not have what was requested, by their identifiers.
    failures: BTreeMap<String, Failure>,
    /// Load balancers whose rules are not in force yet, with the number of their plan; `None`: the next plan.
    awaited: BTreeMap<String, Option<u64>>,
    /// The same for load balancers that have just got their first nodes. They are reported as waiting only if the host
    /// cannot forward.
    first_nodes: BTreeMap<String, Option<u64>>,
    unsettled: BTreeSet<String>,
    /// Time at which these clusters are settled.
    settle_at: Option<Instant>,
    plan: Numbered,
    begun: Instant,
    /// Events for people, sent with the next settling.
    events: Vec<v1::LoadBalancerChanged>,
    /// Load balancers of an earlier run that have not been reported yet: their first report is not an event.
    of_before: BTreeSet<String>,
    /// Time since which the settings have had no VM of each cluster with load balancers.
    abandoned: BTreeMap<String, Instant>,
    /// Note on the disk: the addresses that interfaces may have from this program. `None` if the kernel has no rules
    /// of it.
    marked: Option<Given>,
}

/// State of one cluster.
#[derive(Debug)]
struct Cluster {
    members: BTreeMap<String, Member>,
    heard: Heard,
    instances: Journal<v1::Instance>,
    balancers: Journal<v1::LoadBalancer>,
    checks: watch::Sender<Arc<Checks>>,
    forwarded: Vec<Forwarded>,
    /// True if a node that takes no traffic yet may do so after the next result of a check.
    may_pass: bool,
    counts: Counts,
    targets: Vec<Target>,
}

impl Cluster {
    fn new(run: &str) -> Self {
        Self {
            members: BTreeMap::new(),
            heard: Heard::default(),
            instances: Journal::new(run),
            balancers: Journal::new(run),
            checks: watch::Sender::default(),
            forwarded: Vec::new(),
            may_pass: false,
            counts: Counts::default(),
            targets: Vec::new(),
        }
    }
}

impl Desk {
    /// Creates the task, and the handle that sends requests to it once it runs.
    pub fn new(mut parts: Parts) -> (Self, Handle) {
        let (requests, inbox) = mpsc::channel(INBOX);
        let settings = Arc::clone(&parts.settings.borrow_and_update());
        let desk = Self {
            parts,
            settings,
            neighbours: Arc::default(),
            inbox,
            store: None,
            book: Book::default(),
            clusters: BTreeMap::new(),
            vms: BTreeMap::new(),
            failures: BTreeMap::new(),
            awaited: BTreeMap::new(),
            first_nodes: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            settle_at: None,
            plan: Numbered::default(),
            begun: Instant::now(),
            events: Vec::new(),
            of_before: BTreeSet::new(),
            abandoned: BTreeMap::new(),
            marked: None,
        };
        (desk, Handle::new(requests))
    }

    /// Serves requests until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            self.open_if_needed(false).await;
            self.look_at_all().await;
            self.settle().await;
            let mut ticks = tokio::time::interval(TICK);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                let settle_at = self.settle_at;
                tokio::select! {
                    request = self.inbox.recv() => match request {
                        Some(request) => self.take(request).await,
                        None => std::future::pending().await,
                    },
                    names = self.parts.changed.take() => {
                        for name in names {
                            self.look_at(&name).await;
                        }
                    }
                    Ok(()) = self.parts.settings.changed() => self.follow().await,
                    Ok(()) = self.parts.in_force.changed() => self.in_force(),
                    Ok(()) = self.parts.neighbours.changed() => {
                        self.neighbours = Arc::clone(&self.parts.neighbours.borrow_and_update());
                        self.unsettle_all();
                    }
                    _ = ticks.tick() => self.tick().await,
                    () = tokio::time::sleep_until(settle_at.unwrap_or_else(Instant::now)), if settle_at.is_some() => {
                        self.settle().await;
                    }
                }
            }
        };
        // Boxed because it is large; it is allocated only once.
        shutdown.run_until_cancelled_owned(Box::pin(work)).await;
    }

    /// Returns the cluster of this name, and adds it if it is new.
    fn cluster(&mut self, name: &str) -> &mut Cluster {
        let run = &self.parts.half.host.instance_id;
        self.clusters.entry(name.to_owned()).or_insert_with(|| Cluster::new(run))
    }

    /// Schedules the settling of a cluster.
    fn unsettle(&mut self, cluster: &str) {
        self.unsettled.insert(cluster.to_owned());
        self.settle_at.get_or_insert_with(|| Instant::now() + TOGETHER);
    }

    /// Reads the state of all VMs.
    async fn look_at_all(&mut self) {
        let Ok(all) = self.parts.fleet.list().await else { return };
        for known in all {
            self.take_in(&known.view.name.clone(), Some(&known));
        }
    }

    /// Reads the state of one VM.
    async fn look_at(&mut self, name: &str) {
        let Ok(known) = self.parts.fleet.get(name.to_owned()).await else { return };
        self.take_in(name, known.as_ref());
    }

    fn take_in(&mut self, name: &str, known: Option<&fleet::Known>) {
        let member = known.and_then(|known| {
            let networks = self.settings.networks.get(&known.vm.ids.lasting);
            Member::of(known, networks)
        });
        let now = member.as_ref().map(|member| (member.cluster.clone(), member.instance.vm_uid.clone()));
        let before = match &now {
            Some(now) => self.vms.insert(name.to_owned(), now.clone()),
            None => self.vms.remove(name),
        };
        if let Some((cluster, uid)) = before.filter(|before| Some(before) != now.as_ref()) {
            let of = self.cluster(&cluster);
            // Another VM may have this identifier by now.
            if of.members.get(&uid).is_some_and(|member| member.instance.name == name) {
                of.members.remove(&uid);
                of.heard.reports.remove(&uid);
                of.instances.remove(&uid);
                of.instances.tell();
            }
            self.unsettle(&cluster);
        }
        if let (Some(member), Some((cluster, uid))) = (member, now) {
            let of = self.cluster(&cluster);
            if of.members.get(&uid) == Some(&member) {
                return;
            }
            if !member.connected {
                // Reports from before the session was lost say nothing about the present.
                of.heard.reports.remove(&uid);
            }
            of.instances.set(&uid, member.instance.clone());
            of.instances.tell();
            of.members.insert(uid, member);
            self.unsettle(&cluster);
        }
    }

    /// Follows a change of the settings, which may make other requests possible and attach VMs to other networks.
    async fn follow(&mut self) {
        self.settings = Arc::clone(&self.parts.settings.borrow_and_update());
        self.open_if_needed(false).await;
        self.look_at_all().await;
        self.try_again().await;
        self.unsettle_all();
    }

    fn unsettle_all(&mut self) {
        let all: Vec<_> = self.book.clusters().chain(self.clusters.keys()).cloned().collect();
        for cluster in all {
            self.unsettle(&cluster);
        }
        self.settle_at.get_or_insert_with(Instant::now);
    }

    /// Takes in the forwarder's report on which plan is in force, and settles all clusters.
    fn in_force(&mut self) {
        let now = self.parts.in_force.borrow_and_update().clone();
        let metrics = &self.parts.half.metrics.balancers;
        metrics.repairs.store(now.repaired, Ordering::Relaxed);
        metrics.is_failing.store(now.problem.is_some(), Ordering::Relaxed);
        let there = |awaited: &Option<u64>| awaited.is_some_and(|number| number <= now.number);
        self.awaited.retain(|_, awaited| !there(awaited));
        self.first_nodes.retain(|_, awaited| !there(awaited));
        let host: Vec<_> = self.book.clusters().cloned().collect();
        for cluster in host {
            self.unsettle(&cluster);
        }
    }

    async fn tick(&mut self) {
        self.open_if_needed(false).await;
        self.try_again().await;
        let checked: Vec<_> = self
            .clusters
            .iter()
            .filter(|(_, cluster)| !cluster.checks.borrow().targets.is_empty())
            .map(|(name, _)| name.clone())
            .collect();
        for cluster in checked {
            self.unsettle(&cluster);
        }
        if self.plan.number == 0 {
            self.plan().await;
        }
        self.give_back_abandoned().await;
        self.unmark().await;
    }
}
