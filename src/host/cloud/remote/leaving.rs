//! Load balancers that are given back before Harvester has taken them up.
//!
//! ```text
//!  given back, no finalizer ──▶ leaving ──Harvester adds its finalizer──────────────▶ deleted, and its address with it
//!                                │  ▲                                          ▲
//!              asked for again ──┘  └──30 s──▶ left: its Service is not kept ──┤
//!                                                                              └── a person says so
//! ```
//!
//! Harvester reserves an address for an object first, and adds its finalizer last. In between nothing says that it has begun, and of an
//! object that goes then the address stays reserved for ever. That nothing is heard of Harvester's controller does not prove that none
//! runs. So the object waits, however long that takes, which costs nobody anything: without a controller it has no address. Its Service
//! waits for 30 s only. Who is to do something about it is told then.
//!
//! It is not written down which ones leave. Of those that another replica finds no Service is known, and guestlet-ccm gives them back
//! again.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::super::wanted::Service;
use super::Registry;
use super::balancers::Key;
use super::object::Object;
use super::queue::Job;

/// For how long a Service is kept for a load balancer that Harvester has not taken up.
const PATIENCE: Duration = Duration::from_secs(30);

/// One that is given back, and not deleted yet.
#[derive(Debug, Clone)]
pub struct Leaving {
    /// Whose it is.
    pub service: Service,
    /// When it was given back.
    since: Instant,
    /// Its Service is not kept any more, and its cluster is not told of it.
    pub is_left: bool,
}

impl Registry {
    /// What this key means is deleted as soon as Harvester has taken it up. Whether its Service is kept for it no more.
    pub(super) fn postpone(&mut self, key: Key, service: &Service) -> bool {
        let leaving = || Leaving { service: service.clone(), since: Instant::now(), is_left: false };
        self.balancers.leaving.entry(key).or_insert_with(leaving).is_left
    }

    /// Deletes what is to go, of these load balancers, and was taken up meanwhile.
    pub(super) fn leave(&mut self, about: &BTreeSet<Key>) {
        for key in about {
            let Some(service) = self.balancers.leaving.get(key).map(|one| one.service.clone()) else {
                continue;
            };
            if self.balancers.keyed(key).is_none_or(Object::is_taken_up) {
                self.balancers.leaving.remove(key);
                self.enqueue(&key.0, Job::leave(service));
            }
        }
    }

    /// Tells people of those that Harvester has not taken up for too long, and lets their Services go.
    pub(super) fn look_at_leaving(&mut self) {
        let now = Instant::now();
        let mut left = BTreeSet::new();
        for (key, leaving) in &mut self.balancers.leaving {
            if !leaving.is_left && now.saturating_duration_since(leaving.since) >= PATIENCE {
                leaving.is_left = true;
                left.insert(key.clone());
            }
        }
        for key in &left {
            if let Some(own) = self.balancers.keyed(key) {
                tracing::warn!(cluster = key.0, object = own.id(), "{}", not_taken_up(own));
            }
        }
        self.show(left);
    }
}

/// What people are told of an object that nobody takes up.
pub fn not_taken_up(object: &Object) -> String {
    format!(
        "its Service is gone, and Harvester's load balancer controller has not taken up the LoadBalancer {}: it is deleted when that has, \
         since an address that is reserved for it now would be lost. Look whether the controller runs (harvester-load-balancer in \
         harvester-system); where there is none, delete it by guestctl lb rm {} --cluster {}",
        object.id(),
        object.key(),
        object.cluster
    )
}
