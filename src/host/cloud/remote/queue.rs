//! What clusters want of their load balancers, in the order in which it is done: several things of a cluster beside each other, as long
//! as they have nothing in common, and clusters beside each other. Pure.
//!
//! ```text
//!  Ensure, Release, what can be had by now ──push──▶ waiting ──begin──▶ under way, at most so many ──end──▶
//!                                                      ▲    first whose claims nobody before it has
//!                                                      └──put_back── turned away for what is under way
//! ```
//!
//! What a job is about are its [claims](Claim): Services, by UID and by name, and addresses that are asked for. Of two jobs with a
//! claim in common the one that came first is done first, to its end. So a Service joins another after that has what it wants, and a
//! name is given back before it is taken again.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;

use super::super::wanted::{Service, Wanted};
use super::super::{Problem, Reply};
use super::balancers::{Balancers, Begun};
use super::plan::Step;
use crate::host::backends::kubevirt::balancers::{Balancer, Changed};
use crate::host::backends::volumes::VolumeError;
use crate::wire::proto::v1;

/// Things of one cluster that are done at a time.
pub(super) const AT_ONCE: usize = 8;
/// Things of one cluster that are looked through for one that can begin.
const AHEAD: usize = 64;

/// One thing that is to be done.
pub struct Job {
    pub(super) service: Service,
    pub(super) what: What,
    /// How often it was looked at.
    pub(super) tries: u32,
    /// It was listed that nothing is left.
    pub(super) is_proved: bool,
    /// The VMs that are checked, if that is said anew.
    pub(super) backends: Option<Vec<String>>,
    /// Nothing else is to be under way when it begins.
    is_alone: bool,
    /// What it is about, once it is under way.
    claims: BTreeSet<Claim>,
}

/// What is to be done, and who waits for it.
pub(super) enum What {
    Ensure(Box<Wanted>, Option<Reply<Result<v1::LoadBalancer, Problem>>>),
    Release(Reply<Result<bool, Problem>>),
    Remove(Reply<Result<(), Problem>>),
    /// The object of this namespace and name goes, whoever shares its address: its cluster is gone.
    Abandon(String),
    /// It is given back now that Harvester has taken it up. Nobody waits.
    Leave,
}

/// Something that jobs may have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claim {
    Uid(String),
    /// Namespace and name.
    Name(String, String),
    /// Of two that ask for the same address one has it.
    Address(IpAddr),
}

/// What is to be done for a cluster.
#[derive(Default)]
pub struct Queue {
    waiting: VecDeque<Job>,
    under_way: usize,
    /// What is under way is about these.
    held: BTreeSet<Claim>,
}

/// What became of a step.
pub enum Outcome {
    /// Of a change of what was of this version.
    #[allow(missing_docs, reason = "they say it all")]
    Changed { changed: Result<Changed, VolumeError>, step: Step, version: u128 },
    /// What there is of a cluster.
    Listed(Result<Vec<Balancer>, VolumeError>, Begun),
    /// Somebody else has changed the object, of which may have been heard meanwhile.
    Waited,
}

impl Job {
    fn new(service: Service, what: What, is_proved: bool) -> Self {
        let claims = BTreeSet::new();
        Self { service, what, tries: 0, is_proved, backends: None, is_alone: false, claims }
    }

    /// A Service wants this.
    pub fn ensure(
        service: Service,
        wanted: Box<Wanted>,
        reply: Option<Reply<Result<v1::LoadBalancer, Problem>>>,
    ) -> Self {
        Self::new(service, What::Ensure(wanted, reply), false)
    }

    /// Those of the VMs that take its traffic are checked.
    pub fn checking(self, backends: Vec<String>) -> Self {
        Self { backends: Some(backends), ..self }
    }

    /// A Service wants nothing any more.
    pub fn release(service: Service, reply: Reply<Result<bool, Problem>>) -> Self {
        Self::new(service, What::Release(reply), false)
    }

    /// A person gives back what a Service has.
    pub fn remove(uid: String, reply: Reply<Result<(), Problem>>) -> Self {
        let service = Service { namespace: String::new(), name: String::new(), uid };
        // Whose it is nobody has said, so that nothing can be listed of it.
        Self::new(service, What::Remove(reply), true)
    }

    /// The object with this identifier goes, which is this Service's: its cluster is gone.
    pub fn abandon(id: String, service: Service) -> Self {
        Self::new(service, What::Abandon(id), true)
    }

    /// What a Service has goes, now that Harvester has taken it up.
    pub fn leave(service: Service) -> Self {
        Self::new(service, What::Leave, true)
    }

    fn is_again(&self, key: &str) -> bool {
        self.service.uid == key && matches!(self.what, What::Ensure(_, None))
    }

    /// Whoever waited for it has gone.
    pub(super) fn is_given_up(&self) -> bool {
        match &self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => false,
            What::Ensure(_, Some(reply)) => reply.is_closed(),
            What::Release(reply) => reply.is_closed(),
            What::Remove(reply) => reply.is_closed(),
        }
    }

    /// The end of it, with a problem.
    pub(super) fn fail(self, problem: Problem) {
        // Who asked may have gone.
        match self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => {}
            What::Ensure(_, Some(reply)) => drop(reply.send(Err(problem))),
            What::Release(reply) => drop(reply.send(Err(problem))),
            What::Remove(reply) => drop(reply.send(Err(problem))),
        }
    }

    /// What it is about, as things are now: its Service, and those whose addresses this one shares or is to share.
    pub(super) fn claims(&self, balancers: &Balancers, cluster: &str) -> BTreeSet<Claim> {
        let uid = &self.service.uid;
        let mut claims = BTreeSet::new();
        add(&mut claims, &self.service);
        match &self.what {
            What::Ensure(wanted, _) => {
                wanted.share.iter().for_each(|primary| add(&mut claims, primary));
                claims.extend(wanted.addresses.iter().copied().map(Claim::Address));
            }
            // Of it nothing but the key is known.
            What::Remove(_) => {
                let key = (cluster.to_owned(), uid.clone());
                let own = balancers.keyed(&key).map(|own| &own.service);
                let asked = balancers.asked.get(&key).map(|asked| &asked.service);
                own.into_iter().chain(asked).for_each(|service| add(&mut claims, service));
            }
            What::Release(_) | What::Abandon(_) | What::Leave => {}
        }
        for (primary, _) in balancers.all_shared(cluster, uid) {
            add(&mut claims, &primary.service);
        }
        claims
    }
}

fn add(claims: &mut BTreeSet<Claim>, service: &Service) {
    let Service { namespace, name, uid } = service;
    // One that Harvester's cloud provider has made says no UID.
    if !uid.is_empty() {
        claims.insert(Claim::Uid(uid.clone()));
    }
    if !name.is_empty() {
        claims.insert(Claim::Name(namespace.clone(), name.clone()));
    }
}

impl Queue {
    /// It is to be done that this object goes, whose cluster is gone.
    pub(super) fn has_abandoned(&self, id: &str) -> bool {
        self.waiting.iter().any(|job| matches!(&job.what, What::Abandon(other) if other == id))
    }

    /// It waits already to be done again for a Service, for nobody who waits.
    pub(super) fn has_again(&self, uid: &str) -> bool {
        self.waiting.iter().any(|job| job.is_again(uid))
    }

    /// How many others are under way beside one.
    pub(super) fn beside(&self) -> usize {
        self.under_way.saturating_sub(1)
    }

    pub(super) fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// The first one that has nothing in common with those before it, and is under way from now on.
    pub(super) fn begin(&mut self, claims: impl Fn(&Job) -> BTreeSet<Claim>) -> Option<Job> {
        if self.under_way >= AT_ONCE {
            return None;
        }
        let mut before = self.held.clone();
        for place in 0..self.waiting.len().min(AHEAD) {
            let job = &self.waiting[place];
            // Nothing behind it begins before it.
            if job.is_alone && (place > 0 || self.under_way > 0) {
                return None;
            }
            let of = claims(job);
            if of.is_disjoint(&before) {
                let mut job = self.waiting.remove(place)?;
                self.held.extend(of.iter().cloned());
                self.under_way += 1;
                job.claims = of;
                return Some(job);
            }
            before.extend(of);
        }
        None
    }

    /// A job is under way no more; whether it is done is its own business.
    pub(super) fn end(&mut self, job: &mut Job) {
        for claim in std::mem::take(&mut job.claims) {
            self.held.remove(&claim);
        }
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// It is looked at again when nothing else is under way, before all that waits.
    pub(super) fn put_back(&mut self, mut job: Job) {
        self.end(&mut job);
        job.is_alone = true;
        self.waiting.push_front(job);
    }
}

#[cfg(test)]
mod tests;
