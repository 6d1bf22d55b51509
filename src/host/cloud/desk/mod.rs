//! The task that owns all load balancers, and what is known of clusters' VMs.
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

/// Changes of a cluster that come one after the other are settled together.
const TOGETHER: Duration = Duration::from_millis(20);
/// How often it is looked what has become stale, and what can be had by now.
const TICK: Duration = Duration::from_secs(5);

/// After a start, rules of an earlier run stay for so long, as long as not all agents have answered and all checks passed.
const GRACE: Duration = Duration::from_secs(10);

/// What the desk works with.
#[derive(Debug)]
pub struct Parts {
    /// This run.
    pub half: Arc<Half>,
    /// Knows the VMs.
    pub fleet: fleet::Handle,
    /// Says which have changed.
    pub changed: Arc<Changed>,
    /// The settings.
    pub settings: watch::Receiver<Arc<Settings>>,
    /// The directory of the records.
    pub state_dir: PathBuf,
    /// Where it says what is to be forwarded.
    pub plans: watch::Sender<Numbered>,
    /// What is.
    pub in_force: watch::Receiver<InForce>,
    /// Where it says which nodes are to be asked whether they have endpoints.
    pub targets: watch::Sender<Vec<Target>>,
    /// Where it says at which addresses it is to be looked who is there.
    pub candidates: watch::Sender<BTreeSet<IpAddr>>,
    /// Who is.
    pub neighbours: watch::Receiver<Arc<Neighbours>>,
}

/// The task.
#[derive(Debug)]
pub struct Desk {
    parts: Parts,
    settings: Arc<Settings>,
    neighbours: Arc<Neighbours>,
    inbox: mpsc::Receiver<Request>,
    /// The records' directory, or why it cannot be used; nothing before it is needed.
    store: Option<Result<Arc<Store>, String>>,
    book: Book,
    clusters: BTreeMap<String, Cluster>,
    /// The cluster and the lasting identifier of each VM, by name.
    vms: BTreeMap<String, (String, String)>,
    /// Why load balancers do not have what was asked for, by their identifiers.
    failures: BTreeMap<String, Failure>,
    /// Load balancers whose rules are not in force yet, and with which plan they come; none: the next one.
    awaited: BTreeMap<String, Option<u64>>,
    /// The same of those that have got their first nodes, which say so only if the host cannot forward.
    first_nodes: BTreeMap<String, Option<u64>>,
    unsettled: BTreeSet<String>,
    /// When these are settled.
    settle_at: Option<Instant>,
    plan: Numbered,
    begun: Instant,
    /// What is to be told to people with the next settling.
    events: Vec<v1::LoadBalancerChanged>,
    /// Identifiers of load balancers of an earlier run that nobody was told of yet.
    of_before: BTreeSet<String>,
    /// Since when the settings have had no VM of clusters that have load balancers.
    abandoned: BTreeMap<String, Instant>,
    /// What interfaces may have from this program, if the kernel may have rules of it: as it is noted on the disk.
    marked: Option<Given>,
}

/// What is known of a cluster.
#[derive(Debug)]
struct Cluster {
    members: BTreeMap<String, Member>,
    heard: Heard,
    instances: Journal<v1::Instance>,
    balancers: Journal<v1::LoadBalancer>,
    checks: watch::Sender<Arc<Checks>>,
    forwarded: Vec<Forwarded>,
    /// Of nodes that could take some of it, the next result of a check decides.
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
    /// One, and what asks it once it runs.
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

    /// Runs until `shutdown`.
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
        // Boxed: it is large, and there is one.
        shutdown.run_until_cancelled_owned(Box::pin(work)).await;
    }

    /// The cluster of this name, which is known from now on.
    fn cluster(&mut self, name: &str) -> &mut Cluster {
        let run = &self.parts.half.host.instance_id;
        self.clusters.entry(name.to_owned()).or_insert_with(|| Cluster::new(run))
    }

    /// Has a cluster settled soon.
    fn unsettle(&mut self, cluster: &str) {
        self.unsettled.insert(cluster.to_owned());
        self.settle_at.get_or_insert_with(|| Instant::now() + TOGETHER);
    }

    /// Learns of all VMs.
    async fn look_at_all(&mut self) {
        let Ok(all) = self.parts.fleet.list().await else { return };
        for known in all {
            self.take_in(&known.view.name.clone(), Some(&known));
        }
    }

    /// Learns what has become of a VM.
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
            // Another VM may have its identifier by now.
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
                // What it said before its session was lost says nothing of what it would say now.
                of.heard.reports.remove(&uid);
            }
            of.instances.set(&uid, member.instance.clone());
            of.instances.tell();
            of.members.insert(uid, member);
            self.unsettle(&cluster);
        }
    }

    /// The settings have changed: what can be had, and who is attached to what, may be another.
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

    /// Something is in force, or is not.
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
