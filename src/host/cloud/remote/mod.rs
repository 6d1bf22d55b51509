//! The same services for guest clusters whose VMs run in a whole host cluster. The controller provides them; it
//! has no session with any of the VMs. Nothing is stored here, since everything is in the API of the host cluster.
//!
//! ```text
//!  VirtualMachines, their runs, Guests, Nodes ──follow──▶ members ────┐
//!  LoadBalancers, IPPools ──────────────────────follow──▶ balancers ──┴▶ registry ──▶ journals of each cluster ──▶ polls
//!  callback of a node (a guest asks), api (people ask) ──Request──▶ answer ──▶ queue ──plan──▶ steps ──▶ API server
//!
//!  pure: members, object, balancers, queue, plan, pools, check, told
//! ```
//!
//! One task, the [`Registry`], owns the state, and waits only for messages. Calls to the API server run in tasks
//! of their own.
//!
//! Load balancers are Harvester's objects, to which Harvester assigns addresses. Each object contains its Service
//! and the requested configuration ([`object`]), so that Harvester's own cloud provider and people recognise it.
//! Requests that cannot be satisfied are remembered only in memory: the clusters repeat them when another replica
//! becomes the leader.
//!
//! To add a setting of a load balancer, see [`super`]. An object stores all of [`Wanted`](super::wanted::Wanted)
//! except what only a forwarding host uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use kube::Api;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::journal::Journal;
use super::settings::Settings;
use super::{Found, Handle, INBOX, Problem, Reply, Request};
use crate::host::backends::kubevirt::api::Cluster;
use crate::host::backends::kubevirt::balancers::{Balancer, follow_balancers};
use crate::host::backends::kubevirt::controller::lasting::Lasting;
use crate::host::backends::kubevirt::controller::{Fact, Options};
use crate::host::backends::kubevirt::node::place::Labelled;
use crate::host::backends::kubevirt::seen::Facts;
use crate::host::backends::volumes::VolumeError;
use crate::host::fleet;
use crate::host::for_guests::Checks;
use crate::host::half::Half;
use crate::host::metrics::balancers::Counts;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::supervise::Scope;
use crate::wire::guest_object::Guest;
use crate::wire::proto::v1;
use crate::wire::proto::v1::virtual_machine_event::Kind;

mod abandoned;
mod answer;
pub mod balancers;
pub mod check;
mod checks;
mod heard;
mod leaving;
pub mod members;
pub mod object;
pub mod plan;
mod pools;
mod queue;
mod steps;
mod told;

use abandoned::Abandoned;
use balancers::{Balancers, Begun, Key};
use checks::Probes;
use members::{Host, Members, News, Report};
use queue::{Job, Outcome, Queue};

/// Events that wait to be sent. Further ones are dropped.
const EVENTS: usize = 1024;

/// Channels and settings that the registry works with.
pub struct Parts {
    /// Identity and metrics of this run of the host half.
    pub half: Arc<Half>,
    /// Client of the host cluster's API server.
    pub cluster: Cluster,
    /// Policies of clusters, replaced on a reload.
    pub settings: watch::Receiver<Arc<Settings>>,
    /// Settings of the backend that concern VMs, such as the labels of Nodes to pass on.
    pub options: watch::Receiver<Options>,
    /// Facts about VMs, as the backend reads them.
    pub facts: mpsc::Receiver<Fact>,
    /// Fleet that passes events on load balancers to people.
    pub fleet: fleet::Handle,
}

/// Task that owns the load balancers of all guest clusters.
pub struct Registry {
    half: Arc<Half>,
    api: Cluster,
    settings: watch::Receiver<Arc<Settings>>,
    options: watch::Receiver<Options>,
    facts: mpsc::Receiver<Fact>,
    inbox: mpsc::Receiver<Request>,
    members: Members,
    lasting: Lasting,
    balancers: Balancers,
    clusters: BTreeMap<String, Guests>,
    /// True once the networks of the VMs of all clusters are known.
    knows_networks: bool,
    /// True once changes are reported to people: what exists at the start is not news.
    has_begun: bool,
    events: mpsc::Sender<v1::LoadBalancerChanged>,
    abandoned: Abandoned,
    counts: Counts,
    /// Tasks that call the API server, and the channel for their results.
    asking: Scope,
    done: mpsc::Sender<Done>,
    dones: mpsc::Receiver<Done>,
}

/// State of one guest cluster.
struct Guests {
    instances: Journal<v1::Instance>,
    balancers: Journal<v1::LoadBalancer>,
    queue: Queue,
    /// Networks that its VMs are attached to, as of its last published VMs.
    networks: BTreeSet<String>,
    probes: Probes,
    /// Health checks for its agents.
    checks: watch::Sender<Arc<Checks>>,
}

/// Result of a call to the API server.
enum Done {
    Found(Box<Looked>),
    /// Outcome of a step of a job for a cluster.
    Step(String, Box<Job>, Outcome),
    /// Clusters of a namespace that have VMs.
    Abandoned(abandoned::Listed),
    /// All load balancers of a cluster, for a client.
    Listed(String, Result<Vec<Balancer>, VolumeError>, Begun, Reply<Result<Vec<v1::LoadBalancer>, Problem>>),
}

/// Result of looking up a VM.
struct Looked {
    cluster: String,
    uid: String,
    facts: Result<Option<Arc<Facts>>, String>,
    reply: Reply<Result<Found, Problem>>,
}

/// Report of a watch of Guest objects or Nodes.
enum Beside {
    Report(Heard<Report>),
    Host(Heard<Host>),
}

impl Registry {
    /// Creates the registry, and the handle that sends requests to it once it runs.
    pub fn new(parts: Parts) -> (Self, Handle) {
        let (requests, inbox) = mpsc::channel(INBOX);
        let Parts { half, cluster, settings, options, facts, fleet } = parts;
        let (done, dones) = mpsc::channel(INBOX);
        let (events, mut told) = mpsc::channel(EVENTS);
        let asking = Scope::new();
        // In a task of its own, to avoid a deadlock: the fleet answers nobody before it knows all VMs, and the sender of
        // these VMs waits for the registry.
        asking.children().spawn(async move {
            while let Some(event) = told.recv().await {
                // Fails only if the fleet has ended: then nobody watches.
                fleet.note(String::new(), Kind::LoadBalancerChanged(event)).await.ok();
            }
        });
        let lasting = Lasting::new(cluster.clone());
        let registry = Self {
            half,
            api: cluster,
            settings,
            options,
            facts,
            inbox,
            members: Members::default(),
            lasting,
            balancers: Balancers::default(),
            clusters: BTreeMap::new(),
            knows_networks: false,
            has_begun: false,
            events,
            abandoned: Abandoned::default(),
            counts: Counts::default(),
            asking,
            done,
            dones,
        };
        (registry, Handle::new(requests))
    }

    /// Serves requests and reports until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let work = async {
            let mut told = Box::pin(self.told());
            let mut of_balancers = Box::pin(follow_balancers(&self.api));
            self.follow_options();
            let mut ticks = tokio::time::interval(checks::LOOK);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                let look = self.abandoned.next;
                tokio::select! {
                    Some(request) = self.inbox.recv() => self.take(request),
                    Some((kind, heard)) = self.facts.recv() => {
                        let news = self.members.hear_vms(kind, heard);
                        self.tell(news);
                    }
                    Some(told) = told.next() => {
                        let news = match told {
                            Beside::Report(heard) => self.members.hear_reports(heard),
                            Beside::Host(heard) => self.members.hear_hosts(heard),
                        };
                        self.tell(news);
                    }
                    Some(done) = self.dones.recv() => self.take_in(done),
                    Some(told) = of_balancers.next() => self.hear(told),
                    _ = ticks.tick() => {
                        self.look_at_reports();
                        self.look_at_leaving();
                    }
                    () = tokio::time::sleep_until(look) => self.look_for_abandoned(),
                    Ok(()) = self.settings.changed() => self.follow_settings(),
                    Ok(()) = self.options.changed() => self.follow_options(),
                    else => std::future::pending().await,
                }
            }
        };
        // Boxed because it is large; it is allocated only once.
        shutdown.run_until_cancelled_owned(Box::pin(work)).await;
    }

    /// Takes in the result of a call to the API server.
    fn take_in(&mut self, done: Done) {
        match done {
            Done::Found(looked) => self.looked(*looked),
            Done::Step(cluster, job, outcome) => self.stepped(&cluster, *job, outcome),
            Done::Abandoned(listed) => self.abandoned(listed),
            Done::Listed(cluster, listed, begun, reply) => self.listed(&cluster, listed, &begun, reply),
        }
    }

    /// Follows the Guest objects and Nodes of the host cluster.
    fn told(&self) -> impl Stream<Item = Beside> + Send + use<> {
        let client = self.api.client();
        let guests = follow(
            Api::<Guest>::all(client.clone()),
            Selector::default(),
            Some(
                self.api
                    .teller("the guests' objects cannot be read, and the names of their Nodes may be stale"),
            ),
        );
        let hosts =
            follow(
                Api::<Labelled>::all(client),
                Selector::default(),
                Some(self.api.teller(
                    "the Nodes of the cluster cannot be read, and the locations of guests may be stale",
                )),
            );
        let host = |heard: Heard<Labelled>| std::future::ready(heard.map(Host::of).map(Beside::Host));
        let report = |heard: Heard<Guest>| std::future::ready(heard.map(Report::of).map(Beside::Report));
        stream::select(guests.filter_map(report), hosts.filter_map(host))
    }

    fn follow_options(&mut self) {
        let labels = self.options.borrow_and_update().node_labels.clone();
        let news = self.members.set_labels(&labels);
        self.tell(news);
    }

    /// Returns the guest cluster of this name, and adds it if it is new.
    fn cluster(&mut self, name: &str) -> &mut Guests {
        let run = &self.half.host.instance_id;
        self.clusters.entry(name.to_owned()).or_insert_with(|| Guests {
            instances: Journal::new(run),
            balancers: Journal::new(run),
            queue: Queue::default(),
            networks: BTreeSet::new(),
            probes: Probes::default(),
            checks: watch::Sender::default(),
        })
    }

    /// Publishes changes of VMs to their clusters.
    fn tell(&mut self, news: Vec<News>) {
        let mut changed = BTreeSet::new();
        for one in news {
            match one {
                News::There(cluster, instance) => {
                    self.abandoned.has_vms(&cluster);
                    let of = self.cluster(&cluster);
                    if instance.power() == v1::instance::Power::Stopped {
                        of.probes.forget(&instance.vm_uid);
                    }
                    of.instances.set(&instance.vm_uid.clone(), *instance);
                    changed.insert(cluster);
                }
                News::Gone(cluster, uid) => {
                    let of = self.cluster(&cluster);
                    of.probes.forget(&uid);
                    of.instances.remove(&uid);
                    changed.insert(cluster);
                }
            }
        }
        for cluster in changed {
            self.cluster(&cluster).instances.tell();
            // The VMs may be attached to other networks now.
            let networks = self.members.networks(&cluster);
            let of = self.cluster(&cluster);
            let has_moved = of.networks != networks;
            of.networks = networks;
            if has_moved {
                self.show(self.balancers.keys(Some(&cluster)));
            } else {
                self.show_checked(&cluster);
            }
            self.look_again(&cluster, false);
        }
        if !self.knows_networks && self.members.is_complete() {
            self.knows_networks = true;
            self.show(self.balancers.keys(None));
            self.begin();
        }
    }

    /// Describes the load balancer with this key for its cluster, including its nodes.
    fn message(&self, key: &Key) -> Option<v1::LoadBalancer> {
        let empty = BTreeSet::new();
        let networks = self.clusters.get(&key.0).map_or(&empty, |cluster| &cluster.networks);
        let mut told = told::message(&self.balancers, Some(networks).filter(|_| self.knows_networks), key)?;
        if let Some(cluster) = self.clusters.get(&key.0) {
            cluster.add_nodes(&key.1, &mut told);
        }
        Some(told)
    }
}

#[cfg(test)]
mod tests;
