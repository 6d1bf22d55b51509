//! The cluster's Services of type LoadBalancer: what each of them asks the host half for, what it has, and what is left of those that
//! are gone.
//!
//! ```text
//!                    ┌──────── something of what it asks for changes ◀───────────┐
//!                    ▼                                                          │
//!  wanted ──▶ finalizer ──▶ EnsureLoadBalancer ──taken over──▶ what it has is written ──▶ rests
//!                    │  ▲          │ refused: an event            ▲                     │
//!                    │  └──waits───┘                              └── the host half ◀───┘
//!                    ▼                                                tells of a change
//!  not wanted any more ──▶ ReleaseLoadBalancer ──nothing is left──▶ status, annotations, finalizer
//! ```
//!
//! One task owns what is known; what is done for a Service is done beside the others. Which request the host half has taken over is
//! remembered as a number: after a start, or with another leader, everything is asked for once. `leaks` compares both sides.

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

/// Services for which something is done at a time. The agent hands on twice as many.
const AT_ONCE: usize = 8;
/// How often both sides are compared, and how soon after a comparison that failed, or a Service that went without its end.
const COMPARE: Duration = Duration::from_secs(300);
const COMPARE_SOON: Duration = Duration::from_secs(5);
/// When it is asked again whether what is being given back is gone, if nothing is heard of it.
const RELEASING: Duration = Duration::from_secs(5);
/// Failures in a row after which people are told of what passes by itself.
const PATIENCE: u32 = 3;

/// What the task begins with.
pub struct Services {
    /// Asks the API server.
    pub client: Client,
    /// Asks the host half.
    pub host: Host,
    /// What the settings say.
    pub defaults: Defaults,
    /// What the host half tells of VMs.
    pub instances: watch::Receiver<Instances>,
    /// What it tells of load balancers.
    pub balancers: watch::Receiver<Balancers>,
    /// The Nodes that are VMs; none before they are known.
    pub members: watch::Receiver<Option<Vec<Member>>>,
    /// Lets changes pass.
    pub fence: Fence,
    /// Tells people.
    pub recorder: Arc<Recorder>,
    /// Says that it goes on.
    pub(super) pulse: Pulse,
    /// Is told whether Services can be followed.
    pub teller: Teller,
}

type Working = Pin<Box<dyn Future<Output = (String, Done)> + Send>>;
type Comparing = Pin<Box<dyn Future<Output = Option<Found>> + Send>>;
/// What our conditions say: whether they are true, with reason and words.
type Conditions = BTreeMap<String, (bool, String, String)>;

/// All that is known, by the UIDs of Services.
struct Desk {
    defaults: Defaults,
    hands: Hands,
    services: BTreeMap<String, Arc<Service>>,
    /// All were heard of at least once.
    is_complete: bool,
    /// What each has, as it was heard of last.
    has: BTreeMap<String, Arc<LoadBalancer>>,
    /// Which requests were taken over.
    taken: BTreeMap<String, u64>,
    told: BTreeMap<String, Conditions>,
    /// How often conditions were written.
    paces: BTreeMap<String, Pace>,
    /// Those that wait for another one.
    waiting: BTreeSet<String>,
    balancers: Balancers,
    instances: Instances,
    members: Option<Vec<Member>>,
    queue: Queue<String>,
    /// When both sides are compared next.
    compare: Instant,
}

impl Services {
    /// Sees to Services, for ever.
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
    /// Whether a Service is, or was, one for this program.
    fn concerns(&self, service: &Service) -> bool {
        if is_wanted(service, &self.defaults) {
            return true;
        }
        let is_ours = match service.spec.load_balancer_class.as_deref() {
            Some(class) => class == self.defaults.class,
            // One that is no load balancer any more has lost its class.
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
            // What others and this program write to it is no news.
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

    /// Nothing of it is left in the cluster, or nothing that concerns this program.
    fn forget(&mut self, key: &str) {
        let was_there = self.services.remove(key).is_some();
        self.queue.forget(&key.to_owned());
        self.told.remove(key);
        self.paces.remove(key);
        self.waiting.remove(key);
        // It went without being given back.
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

    /// Asks for those with health checks anew: another run of the host half may not know which Nodes take their traffic.
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
        // Before the Nodes are known, nothing is asked for that names them.
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

    /// A Service that has a load balancer of its own.
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

    /// What follows from what the host half has in all.
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
    /// What the host half has, if it is to be given back.
    fn orphan(&self, found: &Found, had: &Had) -> Option<Orphan> {
        let of = &had.of;
        if self.services.contains_key(&of.uid) {
            return None;
        }
        let orphan = |successor| Some(Orphan { of: of.clone(), successor });
        if !of.uid.is_empty() {
            return orphan(None);
        }
        // One without a UID is for whoever has the name, as long as that has not got anything else.
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

/// The annotations of a Service that say what it asks for.
fn concerned(service: &Service) -> Vec<(&String, &String)> {
    let all = service.metadata.annotations.iter().flatten();
    all.filter(|(key, _)| plan::is_concerned(key)).collect()
}

/// Tells requests apart.
fn number(request: &EnsureLoadBalancerRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.encode_to_vec().hash(&mut hasher);
    hasher.finish()
}
