//! Holder of the Lease: renews it until it is lost or released.

use std::fmt;
use std::pin::Pin;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;

use super::record::{held, released};
use super::{Candidate, Failure, Notice};

/// Leadership, which lasts while [`Leading::lost`] is polled and does not return.
pub struct Leading {
    held: Held,
    /// Start of the last successful renewal.
    renewed: Instant,
    /// Time of the next renewal.
    next: Instant,
    /// Renewal in progress, and when it began. It is kept here so that it continues after `lost` was dropped and
    /// called again.
    renewal: Option<(Instant, Renewal)>,
    /// Reason why the last renewal failed.
    failure: Option<String>,
    /// Reason why this replica no longer leads.
    over: Option<String>,
}

type Renewal = Pin<Box<dyn Future<Output = Result<Lease, Failure>> + Send>>;

impl fmt::Debug for Leading {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Leading");
        shown.field("held", &self.held).field("renewed", &self.renewed).field("over", &self.over);
        shown.finish_non_exhaustive()
    }
}

impl Leading {
    pub(super) fn new(held: Held, renewed: Instant) -> Self {
        let next = renewed + held.candidate.timing.every;
        Self { held, renewed, next, renewal: None, failure: None, over: None }
    }

    /// Renews the Lease until it is lost, and returns the reason; the caller then has to stop leading at once. At the
    /// start and after each renewal, `told` is called with the time until which this replica leads for certain,
    /// whatever the outcome of the next renewal. The future may be dropped and the function called again, but the
    /// renewal must not be left unpolled for longer than [`Timing::deadline`](super::Timing::deadline).
    pub async fn lost(&mut self, mut told: impl FnMut(Instant)) -> String {
        loop {
            if self.over.is_none() {
                told(self.renewed + self.held.candidate.timing.deadline);
            }
            if let Some(reason) = self.step().await {
                return reason;
            }
        }
    }

    /// Does the next step: waits, or renews. Returns the reason if the Lease is lost.
    async fn step(&mut self) -> Option<String> {
        if self.over.is_some() {
            return self.over.clone();
        }
        let end = self.renewed + self.held.candidate.timing.deadline;
        if Instant::now() >= end {
            self.over = Some(self.reason());
            return self.over.clone();
        }
        let next = self.next.min(end);
        if self.renewal.is_none() && Instant::now() < next {
            tokio::time::sleep_until(next).await;
            return None;
        }
        let start = || (Instant::now(), Box::pin(self.held.clone().renew()) as Renewal);
        let (begun, renewal) = self.renewal.get_or_insert_with(start);
        let (begun, outcome) = (*begun, tokio::time::timeout_at(end, renewal).await);
        self.renewal = None;
        self.next = begun + self.held.candidate.timing.every;
        // On a timeout the deadline has passed, and the next step ends the leadership.
        if let Ok(outcome) = outcome {
            self.came(begun, outcome);
        }
        None
    }

    fn came(&mut self, begun: Instant, outcome: Result<Lease, Failure>) {
        let Candidate { place, teller, .. } = &self.held.candidate;
        match outcome {
            Ok(lease) => {
                teller.well();
                (self.held.lease, self.renewed, self.failure) = (lease, begun, None);
            }
            Err(Failure::Taken(by)) if by.is_empty() => {
                self.over = Some(format!("the Lease {place} was lost: its holder was removed"));
            }
            Err(Failure::Taken(by)) => {
                self.over = Some(format!("the Lease {place} was lost: {by} holds it"));
            }
            Err(Failure::Conflict) => self.failure = Some("others write it all the time".to_owned()),
            Err(Failure::Other(words)) => {
                teller.failed(&words);
                self.failure = Some(words);
            }
        }
    }

    fn reason(&self) -> String {
        let Candidate { place, timing, .. } = &self.held.candidate;
        let seconds = timing.deadline.as_secs_f32();
        let why = self.failure.as_deref().unwrap_or("no answer came in time");
        format!("the Lease {place} could not be renewed for {seconds} s: {why}")
    }

    /// Releases the Lease, so that another candidate can take it at once. The caller has to stop leading before.
    pub async fn release(self) {
        let Self { held, over: None, .. } = self else { return };
        let place = held.candidate.place.clone();
        let why = match held.release().await {
            Ok(()) => return,
            Err(Failure::Conflict) => "others write it at the same time".to_owned(),
            Err(Failure::Taken(by)) => format!("{by:?} has it"),
            Err(Failure::Other(words)) => words,
        };
        tracing::warn!("the Lease {place} was not released: {why}");
    }
}

/// Lease that a candidate holds.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) candidate: Candidate,
    pub(super) notice: Notice,
    /// Lease as last returned by the API server.
    pub(super) lease: Lease,
}

impl Held {
    /// Writes the Lease again. If it was changed by others, writes it only if it still names this holder or was
    /// deleted.
    async fn renew(self) -> Result<Lease, Failure> {
        let Self { candidate, notice, lease } = self;
        let anew = |read| held(read, candidate.name, &candidate.identity, &notice, candidate.timing.lease);
        match candidate.write(anew(Some(lease))).await {
            Err(Failure::Conflict) => candidate.write(anew(candidate.own().await?)).await,
            outcome => outcome,
        }
    }

    async fn release(self) -> Result<(), Failure> {
        let Self { candidate, notice, lease } = self;
        match candidate.write(released(lease, &notice)).await {
            Err(Failure::Conflict) => match candidate.own().await? {
                None => Ok(()),
                Some(lease) => candidate.write(released(lease, &notice)).await.map(drop),
            },
            outcome => outcome.map(drop),
        }
    }
}
