//! Decides the next step towards a load balancer that a cluster requests or releases. Pure: others carry out the
//! step and ask again, until nothing is left to do. So the work can be resumed from wherever an earlier attempt
//! has ended.
//!
//! ```text
//!  wanted of its own   made ──▶ its configuration is as wanted ──▶ it no longer shares another's address ──▶ done
//!  wanted shared       it is among the sharers of the other ──▶ ... of no other ──▶ its own is deleted ──▶ done
//! ```

use serde_json::Value;

use tokio::time::Instant;

use super::super::Problem;
use super::super::health::MOST_CHECKS;
use super::super::meet::{Failure, Ground, check_change};
use super::super::record::Record;
use super::super::settings::Settings;
use super::super::wanted::{Announcing, Family, Ipam, Service, Wanted};
use super::balancers::Balancers;
use super::object::{self, Address, Object, Sharer};
use super::{check, pools};

/// Services that may share one address at most.
const MOST_SHARERS: usize = 64;

/// Next step towards a requested load balancer.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Nothing is left to do.
    Done,
    /// Create an object.
    Make(Value),
    /// Change this object by a merge patch.
    Change(String, Value),
    /// Delete this object.
    Remove(String),
}

/// Next step for a load balancer that is to be released.
#[derive(Debug, Clone, PartialEq)]
pub enum Giving {
    /// Make this step. If it is a change, nothing is left afterwards.
    Step(Step),
    /// The object of this key, and of this namespace and name, is to be deleted later: Harvester has not taken it up
    /// yet.
    Early(String, String),
    /// The object is already being deleted.
    UnderWay,
    /// The Service has no known load balancer.
    Nothing,
}

/// Reason why a request is not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The call fails.
    Problem(Problem),
    /// The request cannot be satisfied now, and is retried.
    Failure(Failure),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// Input of the decisions.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'p> {
    /// Index of all load balancers.
    pub balancers: &'p Balancers,
    /// Policies of clusters, with the networks of this one.
    pub settings: &'p Settings,
    /// Namespace and name of the cluster.
    pub cluster: &'p str,
    /// Number of other jobs under way for the cluster, each of which may create a load balancer that is not known yet.
    pub beside: usize,
}

impl Plan<'_> {
    /// Returns the next step for a Service that requests this configuration, as it is [kept](object::kept).
    ///
    /// # Errors
    /// If the request cannot be satisfied.
    pub fn ensure(&self, service: &Service, wanted: &Wanted) -> Result<Step, Refusal> {
        let own = self.balancers.own(self.cluster, service);
        if own.is_some_and(|own| own.is_going() && wanted.share.is_none()) {
            let words = "its load balancer on the host is being deleted, and is created again after that";
            return Err(Failure::new("BeingReleased", words).into());
        }
        // Checked even if the Service is to share another's address from now on: later it may want its own again.
        if let Some(own) = own {
            let network = own.asked_network(&wanted.network);
            check_change(own.ipam(), network, wanted)
                .map_err(|words| Refusal::Problem(Problem::Contradiction(words)))?;
        }
        if wanted.announcing == Announcing::Host {
            let words = "the hosts of this cluster do not forward to nodes; announce it by kube-vip or none";
            return Err(Failure::new("NotForwarded", words).into());
        }
        let shared = self.balancers.shared(self.cluster, &service.uid);
        let id = match (shared, own) {
            (Some((other, _)), _) => other.sharer_id(&service.uid),
            (None, Some(own)) => own.id(),
            (None, None) => String::new(),
        };
        let record = Record::new(id, self.cluster.to_owned(), service.clone());
        let ground = Ground { book: &self.balancers.book, settings: self.settings, now: Instant::now() };
        if let Some(primary) = &wanted.share
            && let Some(other) = self.balancers.own(self.cluster, primary)
        {
            let Service { namespace, name, .. } = primary;
            let key = (self.cluster.to_owned(), other.key());
            if matches!(other.address(), Address::None(_)) || self.balancers.leaving.contains_key(&key) {
                let words = format!("the Service {namespace}/{name} has no address yet that could be shared");
                return Err(Failure::new("NoPrimary", words).into());
            }
            let of_cluster = self.settings.of_clusters.get(self.cluster);
            let ground = check::Ground { networks: of_cluster, pools: self.balancers.pools.as_ref() };
            if ground.check(other).is_err() {
                let words =
                    format!("the Service {namespace}/{name} has no address that this cluster can use");
                return Err(Failure::new("NoPrimary", words).into());
            }
        }
        ground.check(&record, wanted)?;
        self.check_checks(&record, wanted)?;
        match &wanted.share {
            Some(primary) => self.share(own, service, wanted, primary),
            None => self.own(own, service, wanted),
        }
    }

    fn own(&self, own: Option<&Object>, service: &Service, wanted: &Wanted) -> Result<Step, Refusal> {
        if wanted.all_families && wanted.families.len() > 1 {
            let words = "a load balancer of this host has one address, not one of each family";
            return Err(Failure::new("FamilyMissing", words).into());
        }
        if wanted.ipam == Ipam::Dhcp && !wanted.families.contains(&Family::Ipv4) {
            let words = "an address from DHCP is an IPv4 address";
            return Err(Failure::new("FamilyMissing", words).into());
        }
        let shared = self.balancers.shared(self.cluster, &service.uid);
        let Some(own) = own else {
            let pool = match wanted.addresses.first() {
                None => None,
                Some(asked) => Some(pools::of(self, service, wanted, *asked)?),
            };
            if shared.is_none() {
                self.check_count()?;
            }
            // Harvester knows only networks with a name of the form `namespace/name`.
            let networks = self.settings.of_clusters.get(self.cluster).into_iter().flatten();
            let network = networks.into_iter().find(|network| network.contains('/')).map(String::as_str);
            let made = object::new(self.cluster, service, wanted, pool.as_deref(), network);
            return Ok(Step::Make(made));
        };
        if let (Address::Has(address, _), Some(asked)) = (own.address(), wanted.addresses.first())
            && address != *asked
        {
            let words = format!("it has {address}, which stays; delete the Service and create it again");
            return Err(Failure::new("AddressDiffers", words).into());
        }
        if let Some(patch) = own.want(service, wanted) {
            return Ok(Step::Change(own.id(), patch));
        }
        Ok(shared.map_or(Step::Done, |(other, _)| without(other, &service.uid)))
    }

    fn share(
        &self,
        own: Option<&Object>,
        service: &Service,
        wanted: &Wanted,
        primary: &Service,
    ) -> Result<Step, Refusal> {
        let missing = || Failure::new("NoPrimary", "the Service whose address is to be shared has none");
        let other = self.balancers.own(self.cluster, primary).ok_or_else(missing)?;
        let mut sharers = readable(other)?.to_vec();
        let sharer = Sharer { service: service.clone(), wanted: wanted.clone() };
        let known = self.balancers.shared(self.cluster, &service.uid);
        let has = sharers.len();
        match sharers.iter_mut().find(|known| known.service.uid == service.uid) {
            Some(known) if *known == sharer => {}
            Some(known) => {
                *known = sharer;
                return Ok(Step::Change(other.id(), object::share(&sharers)));
            }
            None if has >= MOST_SHARERS => {
                let words = format!("{MOST_SHARERS} Services share that address, which is the limit");
                return Err(Failure::new("TooManySharers", words).into());
            }
            None => {
                if own.is_none() && known.is_none() {
                    self.check_count()?;
                }
                sharers.push(sharer);
                return Ok(Step::Change(other.id(), object::share(&sharers)));
            }
        }
        let before = self.balancers.all_shared(self.cluster, &service.uid);
        if let Some((before, _)) = before.into_iter().find(|(before, _)| before.id() != other.id()) {
            return Ok(without(before, &service.uid));
        }
        match own.filter(|own| !own.is_going()) {
            Some(own) if !own.is_taken_up() => {
                let words = "the host has not processed its own load balancer yet, which is deleted before \
                             it shares another's address";
                Err(Failure::new("BeingReleased", words).into())
            }
            own => Ok(own.map_or(Step::Done, |own| Step::Remove(own.id()))),
        }
    }

    /// Checks that agents would not have to make more than `MOST_CHECKS` checks.
    fn check_checks(&self, record: &Record, wanted: &Wanted) -> Result<(), Refusal> {
        let has_check = |other: &&Record| {
            other.service.uid != record.service.uid
                && other.met.as_ref().is_some_and(|met| met.check.is_some())
        };
        let of_cluster = self.balancers.book.of_cluster(self.cluster);
        if wanted.check.is_none() || of_cluster.filter(has_check).count() + self.beside < MOST_CHECKS {
            return Ok(());
        }
        let words =
            format!("the cluster has {MOST_CHECKS} load balancers with health checks, which is the limit");
        Err(Refusal::Problem(Problem::Exhausted(words)))
    }

    fn check_count(&self) -> Result<(), Refusal> {
        let has = self.balancers.book.count(self.cluster) + self.beside;
        self.settings
            .check_count(self.cluster, has)
            .map_err(|words| Refusal::Problem(Problem::Exhausted(words)))
    }

    /// Returns the next step to release the load balancer of a Service. For a Service without a UID: every object of
    /// its name that has not been taken over.
    ///
    /// # Errors
    /// If others share its address.
    pub fn release(&self, service: &Service) -> Result<Giving, Problem> {
        let own = if service.uid.is_empty() {
            self.balancers
                .of_before(self.cluster, service)
                .find(|one| !one.is_going())
                .or_else(|| self.balancers.of_before(self.cluster, service).next())
        } else {
            self.balancers.own(self.cluster, service)
        };
        let shared = self.balancers.shared(self.cluster, &service.uid);
        if let Some((other, _)) = shared {
            return Ok(Giving::Step(without(other, &service.uid)));
        }
        if let Some(own) = own {
            if own.is_going() {
                return Ok(Giving::UnderWay);
            }
            let sharers = readable(own).map_err(|failure| Problem::Contradiction(failure.message))?;
            if !sharers.is_empty() {
                let names: Vec<_> = sharers
                    .iter()
                    .map(|one| format!("{}/{}", one.service.namespace, one.service.name))
                    .collect();
                let words = format!("its address is shared by other Services: {}", names.join(", "));
                return Err(Problem::Contradiction(words));
            }
            return Ok(if own.is_taken_up() {
                Giving::Step(Step::Remove(own.id()))
            } else {
                Giving::Early(own.key(), own.id())
            });
        }
        Ok(Giving::Nothing)
    }
}

/// Returns the step that removes a Service from the sharers of an object's address.
fn without(object: &Object, uid: &str) -> Step {
    let sharers = object.sharers.iter().flatten().filter(|sharer| sharer.service.uid != uid);
    let left: Vec<_> = sharers.cloned().collect();
    Step::Change(object.id(), object::share(&left))
}

/// Returns the Services that share an object's address; fails if they cannot be parsed.
fn readable(object: &Object) -> Result<&[Sharer], Failure> {
    object.sharers.as_deref().ok_or_else(|| {
        let words = format!(
            "cannot read who shares the address from the LoadBalancer {} of the host (guestlet.io/sharers)",
            object.name()
        );
        Failure::new("SharersUnreadable", words)
    })
}

#[cfg(test)]
mod tests;
