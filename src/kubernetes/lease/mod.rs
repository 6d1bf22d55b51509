//! Which replica leads: the one that holds the Lease.
//!
//! ```text
//!             it was given back, or it has been the same, or gone, for as long as it is valid
//!  candidate ────────────────────────────────────────────────────────────────▶ leads ──renews──┐
//!                                                                                │  ▲──────────┘
//!      it cannot be renewed in time, or another has it: lost ◀───────────────────┤
//!      orderly stop: released, and the next one takes it at once ◀───────────────┘
//! ```
//!
//! Every write names the version that was read, so that of two that write only one succeeds. No clock is compared with that
//! of another machine. A leader gives up [`Timing::deadline`] after it *began* its last successful renewal; others wait
//! [`Timing::lease`], which is longer, from when they *saw* it: by then it has given up. One that was stopped
//! meanwhile changes nothing when it goes on: each change asks the clock first ([`Fence`](super::fence::Fence)). That clock
//! stands still while a machine is suspended or a virtual one is paused: what a leader had begun before, it may end afterwards, and the
//! versions that it names in what it writes keep it from undoing what another has done.

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

/// How long things last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// For how long others leave the Lease to whoever has it and does not renew it. Whole seconds.
    pub lease: Duration,
    /// After how long without a renewal a leader gives up; shorter than `lease`.
    pub deadline: Duration,
    /// Between two renewals, and between two looks of a candidate.
    pub every: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let [lease, deadline, every] = [15, 10, 2].map(Duration::from_secs);
        Self { lease, deadline, every }
    }
}

/// Annotations by which whoever leads tells others something.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notice {
    /// Those that are taken away when the Lease is given up.
    pub while_held: BTreeMap<&'static str, String>,
    /// Those that stay.
    pub lasting: BTreeMap<&'static str, String>,
}

/// Which Lease candidates take turns with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: &'static str,
}

/// One that leads when it may.
#[derive(Debug, Clone)]
pub struct Candidate {
    leases: Api<Lease>,
    name: &'static str,
    /// The Lease's namespace and name, for people.
    place: String,
    identity: String,
    timing: Timing,
    teller: Teller,
}

/// Why a request came to nothing.
enum Failure {
    /// Somebody has changed the Lease since it was read, made one, or deleted it.
    Conflict,
    /// This one has it now.
    Taken(String),
    /// In words for people.
    Other(String),
}

impl Candidate {
    /// One of this name among the candidates for a Lease. A run of the program is a candidate of its own: one
    /// that is started again under the same name does not take what its predecessor may still have.
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

    /// What the Lease says of its holder while this one leads.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Waits until it leads. It may be dropped at any time; whatever was on its way is then over by itself after
    /// [`Timing::lease`].
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
                // Somebody was quicker.
                Err(Failure::Conflict | Failure::Taken(_)) => {}
                Err(Failure::Other(words)) => self.teller.failed(&words),
            }
            tokio::time::sleep_until(begun + self.timing.every).await;
        }
    }

    /// Looks once, and takes the Lease if it may; with the time before which that was not yet written.
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

    /// The Lease as it is now, unless another has it.
    async fn own(&self) -> Result<Option<Lease>, Failure> {
        match self.read().await? {
            Some(lease) if holder(&lease) != self.identity => Err(Failure::Taken(holder(&lease).to_owned())),
            lease => Ok(lease),
        }
    }

    /// Writes it in the place of the version that it was made from, or makes it if it was made from none.
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

    /// The answer to one request. Of a server that is silent another connection is made in time.
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
