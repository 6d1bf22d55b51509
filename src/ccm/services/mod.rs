//! Services of type LoadBalancer of the cluster: what each requests of the host half, what it has, and what
//! is left of deleted ones.
//!
//! ```text
//!                    ┌──────── a field of its request changes ◀─────────────────┐
//!                    ▼                                                          │
//!  wanted ──▶ finalizer ──▶ EnsureLoadBalancer ───accepted───▶ its state is written ────▶ rests
//!                    │  ▲          │ refused: an event            ▲                     │
//!                    │  └──waits───┘                              └── the host half ◀───┘
//!                    ▼                                                reports a change
//!      no longer wanted ──▶ ReleaseLoadBalancer ──released──▶ status, annotations, finalizer
//! ```
//!
//! One task owns the state; the jobs of different Services run in parallel. The request that the host half
//! has accepted is remembered as a number only: after a start, or under a new leader, every request is sent
//! once. `leaks` compares both sides.

mod leaks;
mod pace;
mod plan;
pub mod wanted;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kube::{Api, Client};
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::Instant;

use self::leaks::{Found, Had, Orphan};
use self::pace::Pace;
use self::wanted::{Defaults, NETWORK, Problem, is_wanted, reference};
use self::work::{Done, Hands, Job};
use crate::ccm::events::{News, Recorder};
use crate::ccm::health::Pulse;
use crate::ccm::host::Host;
use crate::ccm::instance::Instances;
use crate::ccm::nodes::{Member, sleep_until};
use crate::ccm::objects::{Service, annotation, name, uid};
use crate::ccm::queue::{Outcome, Queue};
use crate::ccm::watching::Balancers;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::kubernetes::standing::Teller;
use crate::wire::proto::v1::load_balancer::State;
use crate::wire::proto::v1::{
    EnsureLoadBalancerRequest, LoadBalancer, LoadBalancerAddress, ServiceReference,
};

/// Services with a job at a time. The agent relays twice as many calls.
const AT_ONCE: usize = 8;
/// Interval between two comparisons of both sides, and the delay after a failed comparison or after a Service
/// that vanished without being released.
const COMPARE: Duration = Duration::from_secs(300);
const COMPARE_SOON: Duration = Duration::from_secs(5);
/// Interval at which the release of a load balancer is checked if no change is reported.
const RELEASING: Duration = Duration::from_secs(5);
/// Failures in a row after which people are informed of a temporary problem.
const PATIENCE: u32 = 3;

/// Parts that the task is built from.
pub struct Services {
    /// Client of the API server.
    pub client: Client,
    /// Client of the host half.
    pub host: Host,
    /// Settings for Services.
    pub defaults: Defaults,
    /// VMs that the host half reports.
    pub instances: watch::Receiver<Instances>,
    /// Load balancers that the host half reports.
    pub balancers: watch::Receiver<Balancers>,
    /// Nodes that are VMs; `None` before they are known.
    pub members: watch::Receiver<Option<Vec<Member>>>,
    /// Fence that every change has to pass.
    pub fence: Fence,
    /// Recorder of events for people.
    pub recorder: Arc<Recorder>,
    /// Sign of life for the liveness probe.
    pub(super) pulse: Pulse,
    /// Receives whether Services can be watched.
    pub teller: Teller,
}

type Working = Pin<Box<dyn Future<Output = (String, Done)> + Send>>;
type Comparing = Pin<Box<dyn Future<Output = Option<Found>> + Send>>;
/// Conditions that this program sets, by type: whether each is true, with reason and message.
type Conditions = BTreeMap<String, (bool, String, String)>;

/// State of the task, by the UIDs of Services.
struct Desk {
    defaults: Defaults,
    hands: Hands,
    services: BTreeMap<String, Arc<Service>>,
    /// True once all Services were listed.
    is_complete: bool,
    /// Load balancer of each Service, as last reported.
    has: BTreeMap<String, Arc<LoadBalancer>>,
    /// Numbers of the requests that the host half has accepted.
    taken: BTreeMap<String, u64>,
    told: BTreeMap<String, Conditions>,
    /// Limits on how often conditions are written.
    paces: BTreeMap<String, Pace>,
    /// Services that wait for another Service.
    waiting: BTreeSet<String>,
    balancers: Balancers,
    instances: Instances,
    members: Option<Vec<Member>>,
    queue: Queue<String>,
    /// Time of the next comparison of both sides.
    compare: Instant,
}

impl Services {
    /// Maintains Services, for ever.
    pub async fn run(self) {
        let Self { client, host, defaults, mut instances, mut balancers, mut members, mut pulse, .. } = self;
        let api = Api::<Service>::all(client.clone());
        let mut heard = Box::pin(follow(api, Selector::default(), Some(self.teller)));
        let mut desk = Desk {
            hands: Hands { client, host, fence: self.fence, recorder: self.recorder },
            defaults,
            services: BTreeMap::new(),
            is_complete: false,
            has: BTreeMap::new(),
            taken: BTreeMap::new(),
            told: BTreeMap::new(),
            paces: BTreeMap::new(),
            waiting: BTreeSet::new(),
            balancers: Balancers::default(),
            instances: instances.borrow_and_update().clone(),
            members: members.borrow_and_update().clone(),
            queue: Queue::default(),
            compare: Instant::now() + COMPARE_SOON,
        };
        desk.hear_balancers(&balancers.borrow_and_update());
        let mut working = FuturesUnordered::<Working>::new();
        let mut comparing: Option<Comparing> = None;
        loop {
            desk.begin(&mut working);
            if comparing.is_none() && desk.is_complete && Instant::now() >= desk.compare {
                comparing = Some(Box::pin(leaks::list(desk.hands.clone())));
            }
            let due = desk.queue.due().filter(|_| working.len() < AT_ONCE);
            let compare = Some(desk.compare).filter(|_| comparing.is_none() && desk.is_complete);
            tokio::select! {
                Some(news) = heard.next() => desk.hear(news),
                Some((service, done)) = working.next(), if !working.is_empty() => desk.done(service, done),
                found = async { comparing.as_mut()?.await }, if comparing.is_some() => {
                    comparing = None;
                    desk.compared(found, &mut working);
                }
                Ok(()) = balancers.changed() => desk.hear_balancers(&balancers.borrow_and_update()),
                Ok(()) = instances.changed() => {
                    desk.instances = instances.borrow_and_update().clone();
                    desk.look_at(|service| annotation(&service.metadata, NETWORK).is_some());
                }
                Ok(()) = members.changed() => {
                    desk.members.clone_from(&members.borrow_and_update());
                    desk.look_at(|_| true);
                }
                () = pulse.next() => {}
                () = sleep_until(due) => {}
                () = sleep_until(compare) => {}
            }
        }
    }
}

impl Desk {
    /// Returns whether this program is, or was, responsible for a Service.
    fn concerns(&self, service: &Service) -> bool {
        if is_wanted(service, &self.defaults) {
            return true;
        }
        let is_ours = match service.spec.load_balancer_class.as_deref() {
            Some(class) => class == self.defaults.class,
            // A Service that is no longer a load balancer has lost its class.
            None => self.defaults.without_class || self.has.contains_key(uid(&service.metadata)),
        };
        is_ours && plan::has_finalizer(service)
    }

    fn hear(&mut self, heard: Heard<Service>) {
        match heard {
            Heard::All(all) => {
                let before: Vec<_> = self.services.keys().cloned().collect();
                let uids: BTreeSet<String> =
                    all.iter().map(|service| uid(&service.metadata).to_owned()).collect();
                before.iter().filter(|uid| !uids.contains(*uid)).for_each(|uid| self.forget(uid));
                for service in all {
                    self.hear_one(service);
                }
                self.is_complete = true;
            }
            Heard::There(service) => self.hear_one(service),
            Heard::Gone(service) => self.forget(uid(&service.metadata)),
        }
    }

    fn hear_one(&mut self, service: Service) {
        let now = Instant::now();
        let key = uid(&service.metadata).to_owned();
        if !self.concerns(&service) {
            if self.services.contains_key(&key) {
                self.forget(&key);
            }
            return;
        }
        let is_other = self.services.get(&key).is_none_or(|before| {
            // Changes to other fields, by others and by this program, do not matter here.
            before.spec != service.spec
                || concerned(before) != concerned(&service)
                || before.metadata.deletion_timestamp != service.metadata.deletion_timestamp
        });
        self.services.insert(key.clone(), Arc::new(service));
        for waiting in std::mem::take(&mut self.waiting) {
            self.queue.afresh(waiting, now);
        }
        if is_other { self.queue.afresh(key, now) } else { self.queue.changed(key, now) }
    }

    /// Removes what is known of a Service that was deleted, or that no longer concerns this program.
    fn forget(&mut self, key: &str) {
        let was_there = self.services.remove(key).is_some();
        self.queue.forget(&key.to_owned());
        self.told.remove(key);
        self.paces.remove(key);
        self.waiting.remove(key);
        // It vanished without its load balancer being released.
        if was_there && self.taken.remove(key).is_some() {
            self.compare = self.compare.min(Instant::now() + COMPARE_SOON);
        }
    }

    fn hear_balancers(&mut self, told: &Balancers) {
        let now = Instant::now();
        let before = std::mem::replace(&mut self.balancers, told.clone());
        for (key, balancer) in &told.all {
            if before.all.get(key).is_some_and(|known| Arc::ptr_eq(known, balancer)) {
                continue;
            }
            self.has.insert(key.clone(), Arc::clone(balancer));
            if self.services.contains_key(key) {
                self.queue.changed(key.clone(), now);
            }
        }
        if before.begun != told.begun {
            self.say_backends();
        }
        for key in before.all.keys().filter(|key| !told.all.contains_key(*key)) {
            self.has.remove(key);
            self.taken.remove(key);
            if self.services.contains_key(key) {
                self.queue.afresh(key.clone(), now);
            }
        }
    }

    /// Repeats the requests with health checks: a restarted host half may not know which Nodes accept their
    /// traffic.
    fn say_backends(&mut self) {
        let now = Instant::now();
        let is_checked =
            |service: &&Arc<Service>| annotation(&service.metadata, wanted::HEALTH_PORT).is_some();
        for service in self.services.values().filter(is_checked) {
            let key = uid(&service.metadata);
            if self.taken.remove(key).is_some() {
                self.queue.afresh(key.to_owned(), now);
            }
        }
    }

    fn look_at(&mut self, which: impl Fn(&Service) -> bool) {
        let now = Instant::now();
        let meant = self.services.iter().filter(|(_, service)| which(service)).map(|(key, _)| key.clone());
        for key in meant.collect::<Vec<_>>() {
            self.queue.changed(key, now);
        }
    }

    fn begin(&mut self, working: &mut FuturesUnordered<Working>) {
        while working.len() < AT_ONCE {
            let now = Instant::now();
            let Some(key) = self.queue.next(now) else { return };
            let Some((service, job)) = self.decide(&key) else {
                self.queue.done(key, Outcome::Done, now, 0.0);
                continue;
            };
            let hands = self.hands.clone();
            working.push(Box::pin(async move { (key, hands.carry_out(service, job).await) }));
        }
    }

    fn decide(&mut self, key: &str) -> Option<(Arc<Service>, Job)> {
        let service = Arc::clone(self.services.get(key)?);
        // Requests that name the Nodes have to wait until these are known.
        let members = self.members.as_deref()?;
        if !is_wanted(&service, &self.defaults) {
            return plan::has_finalizer(&service)
                .then(|| (Arc::clone(&service), Job::Release(reference(&service))));
        }
        let primary = |namespace: &str, other: &str| self.reference_of(namespace, other);
        let request = match wanted::request(&service, &self.defaults, members, primary) {
            Ok(request) => request,
            Err(Problem::Invalid(why)) => {
                return Some((service, Job::Tell(News::warning("InvalidAnnotation", why))));
            }
            Err(Problem::NoPrimary(why)) => {
                self.waiting.insert(key.to_owned());
                return Some((service, Job::Tell(News::warning("NoPrimaryService", why))));
            }
        };
        let number = number(&request);
        let balancer = self.has.get(key).filter(|_| self.taken.get(key) == Some(&number));
        let unknown = wanted::unknown(&service);
        let remark = (!unknown.is_empty()).then(|| {
            let words = format!("unknown annotations, which are ignored: {}", unknown.join(", "));
            News::warning("UnknownAnnotation", words)
        });
        let Some(balancer) = balancer else {
            let failures = self.queue.failures(&key.to_owned());
            let job =
                Job::Ensure { request: Box::new(request), number, remark, is_patient: failures < PATIENCE };
            return Some((service, job));
        };
        let told = self.told.get(key);
        let (mut plan, mut conditions) = plan::plan(&service, balancer, &self.instances, members, told);
        plan.news.extend(remark);
        let (now, pace) = (Instant::now(), self.paces.get(key));
        if let (Some(told), Some(pace)) = (told, pace)
            && let Some(wait) = pace.wait(told, &conditions, now).filter(|_| plan.has_conditions())
        {
            plan.without_conditions();
            conditions = told.clone();
            self.queue.later(key.to_owned(), now + wait);
        }
        let is_nothing = plan.service.is_none() && plan.status.is_none() && plan.news.is_empty();
        (!is_nothing).then_some((service, Job::Write { plan, conditions }))
    }

    /// Returns the reference to a Service that has a load balancer of its own.
    fn reference_of(&self, namespace: &str, other: &str) -> Option<ServiceReference> {
        let is_meant = |service: &&Arc<Service>| {
            let metadata = &service.metadata;
            metadata.namespace.as_deref() == Some(namespace) && name(metadata) == other
        };
        let found = self.services.values().find(is_meant)?;
        let is_own = annotation(&found.metadata, wanted::PRIMARY).is_none();
        (is_own && is_wanted(found, &self.defaults)).then(|| reference(found))
    }

    fn done(&mut self, key: String, done: Done) {
        let (now, chance) = (Instant::now(), fastrand::f64());
        let outcome = match done {
            Done::Taken { number, balancer } => {
                self.taken.insert(key.clone(), number);
                self.has.insert(key.clone(), balancer);
                Outcome::Again(Duration::ZERO)
            }
            Done::Written(conditions) => {
                let before = self.told.insert(key.clone(), conditions.clone()).unwrap_or_default();
                if before != conditions {
                    let pace = self.paces.entry(key.clone()).or_insert_with(|| Pace::new(now));
                    pace.written(&before, &conditions, now);
                }
                Outcome::Done
            }
            Done::Released => {
                self.told.remove(&key);
                self.taken.remove(&key);
                self.has.remove(&key);
                Outcome::Done
            }
            Done::Releasing => Outcome::Again(RELEASING),
            Done::Nothing => Outcome::Done,
            Done::Failed => Outcome::Failed,
        };
        self.queue.done(key, outcome, now, chance);
    }

    /// Acts on the list of all that the host half has.
    fn compared(&mut self, found: Option<Found>, working: &mut FuturesUnordered<Working>) {
        let now = Instant::now();
        let Some(found) = found else {
            self.compare = now + COMPARE_SOON;
            return;
        };
        self.compare = now + COMPARE;
        for lost in self.taken.keys().filter(|key| !found.has(key)).cloned().collect::<Vec<_>>() {
            self.taken.remove(&lost);
            self.queue.changed(lost, now);
        }
        let orphans: Vec<_> = found.all.iter().filter_map(|had| self.orphan(&found, had)).collect();
        if !orphans.is_empty() {
            let (hands, defaults) = (self.hands.clone(), self.defaults.clone());
            working.push(Box::pin(async move {
                leaks::release(&hands, &defaults, orphans).await;
                (String::new(), Done::Nothing)
            }));
        }
    }
}

impl Desk {
    /// Returns the load balancer as an orphan if it is to be released.
    fn orphan(&self, found: &Found, had: &Had) -> Option<Orphan> {
        let of = &had.of;
        if self.services.contains_key(&of.uid) {
            return None;
        }
        let orphan = |successor| Some(Orphan { of: of.clone(), successor });
        if !of.uid.is_empty() {
            return orphan(None);
        }
        // A load balancer without a UID belongs to the Service that has the name, unless that one has got another.
        let has_name = |(_, service): &(&String, &Arc<Service>)| {
            let own = reference(service);
            (&own.namespace, &own.name) == (&of.namespace, &of.name)
        };
        let Some((uid, _)) = self.services.iter().find(has_name) else { return orphan(None) };
        let nameless = found.nameless(&of.namespace, &of.name);
        let has =
            self.has.get(uid).filter(|has| has.state() == State::Ready && self.taken.contains_key(uid))?;
        let is_its_own = |one: &LoadBalancerAddress| !nameless.contains(&one.address);
        let is_served = !has.addresses.is_empty() && has.addresses.iter().all(is_its_own);
        is_served.then(|| orphan(Some((uid.clone(), nameless))))?
    }
}

/// Returns the annotations of a Service that belong to its request.
fn concerned(service: &Service) -> Vec<(&String, &String)> {
    let all = service.metadata.annotations.iter().flatten();
    all.filter(|(key, _)| plan::is_concerned(key)).collect()
}

/// Returns a number by which requests are compared.
fn number(request: &EnsureLoadBalancerRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.encode_to_vec().hash(&mut hasher);
    hasher.finish()
}
