//! Nodes of the cluster: their identity, labels and addresses, and their end.
//!
//! ```text
//!  Node ──identify──▶ Found, Known ──plan──▶ initialised; labels, addresses, the taint of a stopped VM
//!   (matching)    ├─▶ Absent, not ready ──life──▶ the host half is asked; GONE twice: deleted
//!                 └─▶ Doubtful, Nobody ──▶ an event, and nothing else
//! ```
//!
//! One task owns the state of all Nodes. The jobs of different Nodes run in parallel, up to a limit. A Node
//! with a running job is not examined again until the job has ended.

pub mod addresses;
mod life;
pub mod matching;
pub mod plan;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;

use self::addresses::Choice;
use self::life::Doubt;
use self::matching::{Identity, Taken, identify};
use self::plan::{Plan, ZoneChange, is_uninitialized};
use self::work::{Done, Hands, Job};
use crate::ccm::events::{News, Recorder};
use crate::ccm::health::Pulse;
use crate::ccm::host::Host;
use crate::ccm::instance::{Instances, uid_of};
use crate::ccm::objects::{Node, name, uid};
use crate::ccm::queue::{Outcome, Queue};
use crate::ccm::watching::Balancers;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::kubernetes::standing::Teller;

/// Nodes with a job at a time.
const AT_ONCE: usize = 8;
/// Label of Nodes that take no traffic of load balancers.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Labels of Nodes of the control plane: the present name and the former one.
const CONTROL_PLANE: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// Settings for Nodes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Selection of addresses.
    pub choice: Choice,
    /// Handling of changed zones and regions.
    pub zone_change: ZoneChange,
    /// Time for which a VM must be reported as GONE before its Node is deleted.
    pub confirm: Duration,
    /// Time for which a Node may stay unrecognised before people are informed.
    pub patience: Duration,
}

/// Node in the form that Services need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// UID of its VM, by its provider identifier.
    pub vm_uid: String,
    /// True if the Node belongs to the control plane.
    pub is_control_plane: bool,
    /// True if the Node accepts traffic of load balancers.
    pub takes_traffic: bool,
}

/// Parts that the task is built from.
pub struct Nodes {
    /// Client of the API server.
    pub client: Client,
    /// Client of the host half.
    pub host: Host,
    /// Settings for Nodes.
    pub settings: Settings,
    /// VMs that the host half reports.
    pub instances: watch::Receiver<Instances>,
    /// Load balancers that the host half reports.
    pub balancers: watch::Receiver<Balancers>,
    /// Receives all Nodes that are VMs, after each change.
    pub members: watch::Sender<Option<Vec<Member>>>,
    /// Fence that every change has to pass.
    pub fence: Fence,
    /// Recorder of events for people.
    pub recorder: Arc<Recorder>,
    /// Sign of life for the liveness probe.
    pub(super) pulse: Pulse,
    /// Receives whether Nodes can be watched.
    pub teller: Teller,
}

type Working = Pin<Box<dyn Future<Output = (String, Done)> + Send>>;

/// State of the task.
struct Desk {
    settings: Settings,
    hands: Hands,
    /// Nodes by their names.
    nodes: BTreeMap<String, Arc<Node>>,
    /// Inquiries about missing VMs, by the UIDs of their Nodes.
    doubts: BTreeMap<String, Doubt>,
    /// Times since which Nodes have waited to be recognised, by their UIDs.
    waiting: BTreeMap<String, Instant>,
    instances: Instances,
    taken: Taken,
    /// Addresses of load balancers.
    not: BTreeSet<IpAddr>,
    queue: Queue<String>,
}

impl Nodes {
    /// Maintains Nodes, for ever.
    pub async fn run(self) {
        let Self { client, host, settings, mut instances, mut balancers, members, fence, recorder, .. } =
            self;
        let (mut pulse, teller) = (self.pulse, self.teller);
        let api = Api::<Node>::all(client);
        let mut heard = Box::pin(follow(api.clone(), Selector::default(), Some(teller)));
        let mut desk = Desk {
            hands: Hands { api, host, fence, recorder },
            settings,
            nodes: BTreeMap::new(),
            doubts: BTreeMap::new(),
            waiting: BTreeMap::new(),
            instances: instances.borrow_and_update().clone(),
            taken: Taken::new(),
            not: addresses_of(&balancers.borrow_and_update()),
            queue: Queue::default(),
        };
        let mut working = FuturesUnordered::<Working>::new();
        loop {
            desk.begin(&mut working);
            let due = desk.queue.due().filter(|_| working.len() < AT_ONCE);
            tokio::select! {
                Some(news) = heard.next() => {
                    desk.hear(news);
                    desk.tell(&members);
                }
                Some((node, done)) = working.next(), if !working.is_empty() => desk.done(node, done),
                Ok(()) = instances.changed() => {
                    desk.instances = instances.borrow_and_update().clone();
                    desk.look_at_all();
                }
                Ok(()) = balancers.changed() => {
                    let not = addresses_of(&balancers.borrow_and_update());
                    if not != desk.not {
                        desk.not = not;
                        desk.look_at_all();
                    }
                }
                () = pulse.next() => {}
                () = sleep_until(due) => {}
            }
        }
    }
}

/// Sleeps until this time; for ever without one.
pub(super) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn addresses_of(balancers: &Balancers) -> BTreeSet<IpAddr> {
    let all = balancers.all.values().flat_map(|one| &one.addresses);
    all.filter_map(|one| one.address.parse().ok()).collect()
}

impl Desk {
    fn hear(&mut self, heard: Heard<Node>) {
        let now = Instant::now();
        match heard {
            Heard::All(all) => {
                let all: BTreeMap<_, _> =
                    all.into_iter().map(|node| (name(&node.metadata).to_owned(), Arc::new(node))).collect();
                let before = std::mem::replace(&mut self.nodes, all);
                before
                    .keys()
                    .filter(|name| !self.nodes.contains_key(*name))
                    .for_each(|name| self.queue.forget(name));
            }
            Heard::There(node) => {
                let key = name(&node.metadata).to_owned();
                self.nodes.insert(key, Arc::new(node));
            }
            Heard::Gone(node) => {
                let key = name(&node.metadata);
                self.nodes.remove(key);
                self.queue.forget(&key.to_owned());
            }
        }
        self.taken = Taken::new();
        for node in self.nodes.values() {
            if let Some(vm) = uid_of(&node.provider_id) {
                self.taken.entry(vm).or_default().push((name(&node.metadata).to_owned(), node.is_ready));
            }
        }
        let uids: BTreeSet<&str> = self.nodes.values().map(|node| uid(&node.metadata)).collect();
        self.doubts.retain(|node, _| uids.contains(node.as_str()));
        self.waiting.retain(|node, _| uids.contains(node.as_str()));
        // The identity of one Node can decide that of another, so all are examined again.
        let all: Vec<_> = self.nodes.keys().cloned().collect();
        for name in all {
            self.queue.changed(name, now);
        }
    }

    fn look_at_all(&mut self) {
        let now = Instant::now();
        let all: Vec<_> = self.nodes.keys().cloned().collect();
        for name in all {
            self.queue.changed(name, now);
        }
    }

    /// Sends the Nodes that are VMs.
    fn tell(&self, members: &watch::Sender<Option<Vec<Member>>>) {
        let mut all: Vec<_> = self.nodes.values().filter_map(|node| member(node)).collect();
        all.sort_by(|one, other| one.vm_uid.cmp(&other.vm_uid));
        members.send_if_modified(|known| {
            let differs = known.as_ref() != Some(&all);
            *known = Some(all);
            differs
        });
    }

    /// Starts the jobs that are due.
    fn begin(&mut self, working: &mut FuturesUnordered<Working>) {
        while working.len() < AT_ONCE {
            let now = Instant::now();
            let Some(key) = self.queue.next(now) else { return };
            match self.decide(&key, now) {
                Decision::Nothing => self.queue.done(key, Outcome::Done, now, 0.0),
                Decision::Later(wait) => self.queue.done(key, Outcome::Again(wait), now, 0.0),
                Decision::Do(node, job) => {
                    let hands = self.hands.clone();
                    working.push(Box::pin(async move { (key, hands.carry_out(node, job).await) }));
                }
            }
        }
    }

    fn done(&mut self, key: String, done: Done) {
        let now = Instant::now();
        let outcome = match done {
            Done::Changed => Outcome::Done,
            Done::Failed => {
                // By the time that a retry succeeds, earlier answers may be outdated.
                if let Some(node) = self.nodes.get(&key) {
                    self.doubts.remove(uid(&node.metadata));
                }
                Outcome::Failed
            }
            Done::Answered { node, existence } => {
                let doubt = self.doubts.entry(node).or_default();
                match doubt.answered(existence, now, self.settings.confirm) {
                    life::Verdict::Wait(wait) => Outcome::Again(wait),
                    // It is decided again, from what is known by then.
                    life::Verdict::Delete => Outcome::Again(Duration::ZERO),
                }
            }
        };
        self.queue.done(key, outcome, now, fastrand::f64());
    }

    fn decide(&mut self, key: &str, now: Instant) -> Decision {
        let Some(node) = self.nodes.get(key).cloned() else { return Decision::Nothing };
        // The Node is being deleted, or the list of VMs is not complete yet.
        if node.metadata.deletion_timestamp.is_some() || !self.instances.is_complete {
            return Decision::Nothing;
        }
        let id = uid(&node.metadata).to_owned();
        let identity = identify(&node, &self.instances, &self.taken);
        if !matches!(identity, Identity::Absent(_)) || node.is_ready {
            self.doubts.remove(&id);
        }
        let (instance, is_new) = match identity {
            Identity::Foreign => return Decision::Nothing,
            Identity::Absent(_) if node.is_ready => return Decision::Nothing,
            Identity::Absent(vm) => return self.doubt(node, id, vm, now),
            Identity::Nobody if !is_uninitialized(&node) => return Decision::Nothing,
            Identity::Nobody => {
                let words = "no VM of this cluster matches this Node, by its agent or its system UUID; if \
                             it is one, check that its agent is running, and that the VM has the label of this cluster";
                return self.wait(node, id, News::warning("VmNotFound", words), now);
            }
            Identity::Doubtful(why) => {
                return self.wait(node, id, News::warning("VmUnclear", why), now);
            }
            Identity::Known(instance) => (instance, false),
            Identity::Found(instance) => (instance, true),
        };
        // Whoever has initialised the Node without this program may have had reasons for that.
        if is_new && !is_uninitialized(&node) {
            return Decision::Nothing;
        }
        let Settings { choice, zone_change, .. } = &self.settings;
        let plan = plan::plan(&node, &instance, choice, *zone_change, &self.not);
        if let Some(why) = plan.waits {
            return self.wait(node, id, News::warning("AddressesUnknown", why), now);
        }
        self.waiting.remove(&id);
        if plan == Plan::default() { Decision::Nothing } else { Decision::Do(node, Job::Change(plan)) }
    }

    /// Decides about a Node whose VM is not reported.
    fn doubt(&mut self, node: Arc<Node>, id: String, vm: String, now: Instant) -> Decision {
        let doubt = self.doubts.entry(id).or_default();
        match doubt.due(now) {
            Duration::ZERO if doubt.is_certain() => Decision::Do(node, Job::Delete(vm)),
            Duration::ZERO => Decision::Do(node, Job::Ask(vm)),
            wait => Decision::Later(wait),
        }
    }

    /// Lets a Node wait; people are informed if that takes long.
    fn wait(&mut self, node: Arc<Node>, id: String, news: News, now: Instant) -> Decision {
        let since = *self.waiting.entry(id).or_insert(now);
        match (since + self.settings.patience).checked_duration_since(now) {
            Some(rest) if !rest.is_zero() => Decision::Later(rest),
            _ => Decision::Do(node, Job::Tell(news)),
        }
    }
}

/// Decision about a Node.
enum Decision {
    Nothing,
    Later(Duration),
    Do(Arc<Node>, Job),
}

fn member(node: &Node) -> Option<Member> {
    let labels = node.metadata.labels.as_ref();
    let has = |key: &str| labels.is_some_and(|labels| labels.contains_key(key));
    Some(Member {
        vm_uid: uid_of(&node.provider_id)?,
        is_control_plane: CONTROL_PLANE.iter().any(|key| has(key)),
        takes_traffic: !has(EXCLUDED)
            && node.metadata.deletion_timestamp.is_none()
            && !is_uninitialized(node),
    })
}
