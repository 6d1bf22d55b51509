//! Load balancers that are released before Harvester has taken them up.
//!
//! ```text
//!  released, no finalizer ───▶ leaving ──Harvester adds its finalizer──────────────▶ deleted, and its address with it
//!                                │  ▲                                          ▲
//!          requested again ──────┘  └──30 s──▶ left: its Service is not kept ──┤
//!                                                                              └── a person removes it
//! ```
//!
//! Harvester first reserves an address for an object, and adds its finalizer last. In between nothing shows that
//! it has begun, and if the object is deleted then, the address stays reserved for ever. Silence of Harvester's
//! controller does not prove that none runs. So the object waits for as long as it takes, which does no harm:
//! without a controller it has no address. Its Service waits for only 30 s; then people are asked to look into it.
//!
//! The list of leaving load balancers is not stored. Another replica finds them without a known Service, and
//! guestlet-ccm releases them again.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::super::wanted::Service;
use super::Registry;
use super::balancers::Key;
use super::object::Object;
use super::queue::Job;

/// Time for which a Service waits for a load balancer that Harvester has not taken up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Load balancer that has been released, and is not deleted yet.
#[derive(Debug, Clone)]
pub struct Leaving {
    /// Service that had the load balancer.
    pub service: Service,
    /// Time of its release.
    since: Instant,
    /// True if its Service no longer waits for it, and it is no longer reported to its cluster.
    pub is_left: bool,
}

impl Registry {
    /// Schedules the load balancer of this key for deletion as soon as Harvester has taken it up. Returns whether its
    /// Service has stopped waiting for it.
    pub(super) fn postpone(&mut self, key: Key, service: &Service) -> bool {
        let leaving = || Leaving { service: service.clone(), since: Instant::now(), is_left: false };
        self.balancers.leaving.entry(key).or_insert_with(leaving).is_left
    }

    /// Deletes those of these load balancers that have been released and that Harvester has taken up meanwhile.
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

    /// Warns about load balancers that Harvester has not taken up for too long, and stops their Services from waiting
    /// for them.
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

/// Returns the message for people about a released object that Harvester does not take up.
pub fn not_taken_up(object: &Object) -> String {
    format!(
        "its Service was deleted, but Harvester's load balancer controller has not processed the \
         LoadBalancer {} yet. It is deleted after that, because an address that is being reserved for it \
         would be lost. Check whether the controller is running (harvester-load-balancer in \
         harvester-system); if there is none, delete the object with guestctl lb rm {} --cluster {}",
        object.id(),
        object.key(),
        object.cluster
    )
}
