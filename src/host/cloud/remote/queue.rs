//! Queue of the work for one cluster's load balancers. Jobs with nothing in common run concurrently, and so do
//! those of different clusters. Pure.
//!
//! ```text
//!  Ensure, Release, retries of what is possible now ──push──▶ waiting ──begin──▶ under way, at most so many ──end──▶
//!                                                      ▲    first one without a claim of an earlier job
//!                                                      └──put_back── turned away because of what is under way
//! ```
//!
//! The things that a job is about are its [claims](Claim): Services, by UID and by name, and requested addresses.
//! Of two jobs with a common claim, the earlier one is completed first. So a Service joins another one only once
//! that has what it requested, and a name is released before it is used again.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;

use super::super::wanted::{Service, Wanted};
use super::super::{Problem, Reply};
use super::balancers::{Balancers, Begun};
use super::plan::Step;
use crate::host::backends::kubevirt::balancers::{Balancer, Changed};
use crate::host::backends::volumes::VolumeError;
use crate::wire::proto::v1;

/// Jobs of one cluster that run at a time.
pub(super) const AT_ONCE: usize = 8;
/// Waiting jobs of one cluster among which one that can begin is looked for.
const AHEAD: usize = 64;

/// Piece of work on a load balancer.
pub struct Job {
    pub(super) service: Service,
    pub(super) what: What,
    /// Number of steps planned so far; the job is given up at a limit.
    pub(super) tries: u32,
    /// True if a list has proved, or nothing needs to prove, that no object of the Service is left.
    pub(super) is_proved: bool,
    /// VMs whose health checks count, if the request names them anew.
    pub(super) backends: Option<Vec<String>>,
    /// True if the job begins only when no other job is under way.
    is_alone: bool,
    /// Claims that the job holds, once it is under way.
    claims: BTreeSet<Claim>,
}

/// Work to be done, with the channel for the reply if somebody waits for it.
pub(super) enum What {
    Ensure(Box<Wanted>, Option<Reply<Result<v1::LoadBalancer, Problem>>>),
    Release(Reply<Result<bool, Problem>>),
    Remove(Reply<Result<(), Problem>>),
    /// Deletes the object of this namespace and name, even if others share its address, since its cluster no longer
    /// exists.
    Abandon(String),
    /// Releases the load balancer of a Service, now that Harvester has taken it up. Nobody waits.
    Leave,
}

/// Thing that at most one job may work on at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claim {
    Uid(String),
    /// Namespace and name of a Service.
    Name(String, String),
    /// Requested address, which only one Service can get.
    Address(IpAddr),
}

/// Jobs of one cluster.
#[derive(Default)]
pub struct Queue {
    waiting: VecDeque<Job>,
    under_way: usize,
    /// Claims of the jobs that are under way.
    held: BTreeSet<Claim>,
}

/// Result of a step.
pub enum Outcome {
    /// Result of creating, changing or deleting an object. `version` is the version that the step was planned for.
    #[allow(missing_docs, reason = "they say it all")]
    Changed { changed: Result<Changed, VolumeError>, step: Step, version: u128 },
    /// List of all load balancers of a cluster.
    Listed(Result<Vec<Balancer>, VolumeError>, Begun),
    /// A pause is over. It followed a conflict with another writer, whose change may have been reported meanwhile.
    Waited,
}

impl Job {
    fn new(service: Service, what: What, is_proved: bool) -> Self {
        let claims = BTreeSet::new();
        Self { service, what, tries: 0, is_proved, backends: None, is_alone: false, claims }
    }

    /// Creates a job that gives a Service a load balancer with this configuration.
    pub fn ensure(
        service: Service,
        wanted: Box<Wanted>,
        reply: Option<Reply<Result<v1::LoadBalancer, Problem>>>,
    ) -> Self {
        Self::new(service, What::Ensure(wanted, reply), false)
    }

    /// Sets the VMs that take the traffic, whose health checks count.
    pub fn checking(self, backends: Vec<String>) -> Self {
        Self { backends: Some(backends), ..self }
    }

    /// Creates a job that releases the load balancer of a Service.
    pub fn release(service: Service, reply: Reply<Result<bool, Problem>>) -> Self {
        Self::new(service, What::Release(reply), false)
    }

    /// Creates a job by which a person releases the load balancer of a Service.
    pub fn remove(uid: String, reply: Reply<Result<(), Problem>>) -> Self {
        let service = Service { namespace: String::new(), name: String::new(), uid };
        // The name of the Service is unknown, so a list could prove nothing about it.
        Self::new(service, What::Remove(reply), true)
    }

    /// Creates a job that deletes the object `id` of a Service whose cluster no longer exists.
    pub fn abandon(id: String, service: Service) -> Self {
        Self::new(service, What::Abandon(id), true)
    }

    /// Creates a job that releases a load balancer now that Harvester has taken it up.
    pub fn leave(service: Service) -> Self {
        Self::new(service, What::Leave, true)
    }

    fn is_again(&self, key: &str) -> bool {
        self.service.uid == key && matches!(self.what, What::Ensure(_, None))
    }

    /// Reports whether the caller that waited for the job has disappeared.
    pub(super) fn is_given_up(&self) -> bool {
        match &self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => false,
            What::Ensure(_, Some(reply)) => reply.is_closed(),
            What::Release(reply) => reply.is_closed(),
            What::Remove(reply) => reply.is_closed(),
        }
    }

    /// Ends the job with a problem.
    pub(super) fn fail(self, problem: Problem) {
        // The caller may have disappeared, so errors of sending are ignored.
        match self.what {
            What::Ensure(_, None) | What::Abandon(_) | What::Leave => {}
            What::Ensure(_, Some(reply)) => drop(reply.send(Err(problem))),
            What::Release(reply) => drop(reply.send(Err(problem))),
            What::Remove(reply) => drop(reply.send(Err(problem))),
        }
    }

    /// Returns the claims of the job as things are now: its Service, and the Services whose addresses it shares or is
    /// to share.
    pub(super) fn claims(&self, balancers: &Balancers, cluster: &str) -> BTreeSet<Claim> {
        let uid = &self.service.uid;
        let mut claims = BTreeSet::new();
        add(&mut claims, &self.service);
        match &self.what {
            What::Ensure(wanted, _) => {
                wanted.share.iter().for_each(|primary| add(&mut claims, primary));
                claims.extend(wanted.addresses.iter().copied().map(Claim::Address));
            }
            // Only the key is known here; the name comes from the object or the request.
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
    // An object that Harvester's cloud provider has created names no UID.
    if !uid.is_empty() {
        claims.insert(Claim::Uid(uid.clone()));
    }
    if !name.is_empty() {
        claims.insert(Claim::Name(namespace.clone(), name.clone()));
    }
}

impl Queue {
    /// Reports whether a job to delete this object of a vanished cluster is already waiting.
    pub(super) fn has_abandoned(&self, id: &str) -> bool {
        self.waiting.iter().any(|job| matches!(&job.what, What::Abandon(other) if other == id))
    }

    /// Reports whether a retry for a Service, with no caller that waits, is already in the queue.
    pub(super) fn has_again(&self, uid: &str) -> bool {
        self.waiting.iter().any(|job| job.is_again(uid))
    }

    /// Counts the other jobs under way, as seen by one that is under way itself.
    pub(super) fn beside(&self) -> usize {
        self.under_way.saturating_sub(1)
    }

    pub(super) fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Takes the first job that has no claim in common with earlier ones. It is under way from now on.
    pub(super) fn begin(&mut self, claims: impl Fn(&Job) -> BTreeSet<Claim>) -> Option<Job> {
        if self.under_way >= AT_ONCE {
            return None;
        }
        let mut before = self.held.clone();
        for place in 0..self.waiting.len().min(AHEAD) {
            let job = &self.waiting[place];
            // Jobs behind it have to wait too, or it might never begin.
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

    /// Releases the claims of a job that is no longer under way, whether or not it has succeeded.
    pub(super) fn end(&mut self, job: &mut Job) {
        for claim in std::mem::take(&mut job.claims) {
            self.held.remove(&claim);
        }
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// Puts a job back to the front of the queue. It begins again when no other job is under way.
    pub(super) fn put_back(&mut self, mut job: Job) {
        self.end(&mut job);
        job.is_alone = true;
        self.waiting.push_front(job);
    }
}

#[cfg(test)]
mod tests;
