//! Leader election among replicas: the one that holds the Lease leads.
//!
//! ```text
//!             it was released, or unchanged or missing for as long as it is valid
//!  candidate ────────────────────────────────────────────────────────────────▶ leads ──renews──┐
//!                                                                                │  ▲──────────┘
//!      it cannot be renewed in time, or another has it: lost ◀───────────────────┤
//!      orderly stop: released, and the next one takes it at once ◀───────────────┘
//! ```
//!
//! Every write names the version that was read, so that only one of two concurrent writes succeeds. Clocks of
//! different machines are never compared. A leader gives up [`Timing::deadline`] after it *began* its last
//! successful renewal. Others wait [`Timing::lease`], which is longer, from when they *saw* that renewal: by then
//! the leader has given up.
//!
//! A leader that was stopped meanwhile changes nothing when it resumes, because each change checks the clock first
//! ([`Fence`](super::fence::Fence)). That clock stands still while a machine is suspended or a VM is paused, so a
//! change that the leader had begun before may still be completed afterwards. The resource versions that it names
//! in its writes keep it from undoing the work of its successor.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use self::leading::Held;
pub use self::leading::Leading;
use self::record::{Seen, Turn, held, holder};
use super::standing::Teller;
use super::{code, words};

mod leading;
mod record;

/// Durations of the election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Time for which candidates respect a Lease that its holder does not renew. Whole seconds.
    pub lease: Duration,
    /// Time without a renewal after which a leader gives up; shorter than `lease`.
    pub deadline: Duration,
    /// Interval between two renewals, and between two attempts of a candidate.
    pub every: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let [lease, deadline, every] = [15, 10, 2].map(Duration::from_secs);
        Self { lease, deadline, every }
    }
}

/// Annotations of the Lease by which the leader publishes information.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notice {
    /// Annotations that are removed when the Lease is released.
    pub while_held: BTreeMap<&'static str, String>,
    /// Annotations that remain after the release.
    pub lasting: BTreeMap<&'static str, String>,
}

/// Name of the Lease that the candidates compete for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease in its namespace.
    pub name: &'static str,
}

/// Replica that competes for the Lease.
#[derive(Debug, Clone)]
pub struct Candidate {
    leases: Api<Lease>,
    name: &'static str,
    /// Namespace and name of the Lease, for messages.
    place: String,
    identity: String,
    timing: Timing,
    teller: Teller,
}

/// Reason why a request failed.
enum Failure {
    /// The Lease was changed, created or deleted by others since it was read.
    Conflict,
    /// The Lease has this holder now; empty if none.
    Taken(String),
    /// Another reason, described for users.
    Other(String),
}

impl Candidate {
    /// Creates a candidate for a Lease. Each run of the program has its own identity: a program that is started again
    /// under the same name does not take over a Lease that its predecessor may still hold.
    pub fn new(client: Client, place: &Place, name: &str, timing: Timing, teller: Teller) -> Self {
        Self {
            leases: Api::namespaced(client, &place.namespace),
            name: place.name,
            place: format!("{}/{}", place.namespace, place.name),
            identity: format!("{name}_{:016x}", fastrand::u64(..)),
            timing,
            teller,
        }
    }

    /// Returns the holder identity that the Lease has while this candidate leads.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Waits until this candidate leads. The future may be dropped at any time; a Lease that was being taken then
    /// expires after [`Timing::lease`].
    pub async fn lead(&self, notice: impl Into<Notice>) -> Leading {
        let (notice, mut seen) = (notice.into(), Seen::default());
        loop {
            let begun = Instant::now();
            match self.attempt(&mut seen, &notice).await {
                Ok(Some((lease, renewed))) => {
                    self.teller.well();
                    tracing::info!("{} is the leader: it holds the Lease {}", self.identity, self.place);
                    return Leading::new(Held { candidate: self.clone(), notice, lease }, renewed);
                }
                Ok(None) => self.teller.well(),
                // Another candidate was faster.
                Err(Failure::Conflict | Failure::Taken(_)) => {}
                Err(Failure::Other(words)) => self.teller.failed(&words),
            }
            tokio::time::sleep_until(begun + self.timing.every).await;
        }
    }

    /// Reads the Lease once, and takes it if permitted. Returns it with a time before the write began.
    async fn attempt(&self, seen: &mut Seen, notice: &Notice) -> Result<Option<(Lease, Instant)>, Failure> {
        let found = self.read().await?;
        let turn = seen.look(found.as_ref(), &self.identity, Instant::now(), self.timing.lease);
        if turn == Turn::Wait {
            return Ok(None);
        }
        let begun = Instant::now();
        let lease = self.write(held(found, self.name, &self.identity, notice, self.timing.lease)).await?;
        Ok(Some((lease, begun)))
    }

    async fn read(&self) -> Result<Option<Lease>, Failure> {
        let answer = self.answer(self.leases.get_opt(self.name)).await?;
        answer.map_err(|error| self.failure("read", &error))
    }

    /// Reads the current Lease; fails if it has another holder.
    async fn own(&self) -> Result<Option<Lease>, Failure> {
        match self.read().await? {
            Some(lease) if holder(&lease) != self.identity => Err(Failure::Taken(holder(&lease).to_owned())),
            lease => Ok(lease),
        }
    }

    /// Replaces the version of the Lease that `lease` was made from, or creates it if it did not exist.
    async fn write(&self, lease: Lease) -> Result<Lease, Failure> {
        let parameters = PostParams::default();
        if lease.metadata.resource_version.is_none() {
            let made = self.answer(self.leases.create(&parameters, &lease)).await?;
            return made.map_err(|error| match code(&error) {
                Some(409) => Failure::Conflict,
                _ => self.failure("make", &error),
            });
        }
        let replaced = self.answer(self.leases.replace(self.name, &parameters, &lease)).await?;
        replaced.map_err(|error| match code(&error) {
            Some(404 | 409) => Failure::Conflict,
            _ => self.failure("write", &error),
        })
    }

    /// Waits for the answer to one request. The timeout leaves time to retry on another connection if the server is
    /// silent.
    async fn answer<T>(&self, asked: impl Future<Output = T>) -> Result<T, Failure> {
        let patience = self.timing.deadline / 2;
        let late = |_| {
            let seconds = patience.as_secs_f32();
            Failure::Other(format!("the API server does not answer within {seconds} s"))
        };
        tokio::time::timeout(patience, asked).await.map_err(late)
    }

    fn failure(&self, verb: &str, error: &kube::Error) -> Failure {
        Failure::Other(format!("cannot {verb} the Lease {}: {}", self.place, words(error)))
    }
}
