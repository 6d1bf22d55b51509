//! One that has the Lease: it renews it, until it is lost or given up.

use std::fmt;
use std::pin::Pin;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;

use super::record::{held, released};
use super::{Candidate, Failure, Notice};

/// One that leads, as long as [`Leading::lost`] is polled and does not say otherwise.
pub struct Leading {
    held: Held,
    /// When the last renewal that succeeded was begun.
    renewed: Instant,
    /// When the next one begins.
    next: Instant,
    /// The one that is under way, and when it was begun: it goes on when whoever waits for it does something else first.
    renewal: Option<(Instant, Renewal)>,
    /// Why the last one did not succeed.
    failure: Option<String>,
    /// Why it does not lead any more.
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

    /// Renews the Lease, and says why it is lost when it is: whoever led has to stop at once. Until when it leads for certain,
    /// whatever becomes of the next renewal, is `told` at once and after each. It may be dropped and called again, but not be
    /// left alone for longer than [`Timing::deadline`](super::Timing::deadline).
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

    /// Does what is next; why it is lost, if it is.
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
        // If it did not come in time, the end is there.
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

    /// Gives the Lease up, so that the next one takes it at once. Whoever led has stopped before.
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

/// A Lease that a candidate has.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) candidate: Candidate,
    pub(super) notice: Notice,
    /// As the API server had it last.
    pub(super) lease: Lease,
}

impl Held {
    /// Writes the Lease anew. If it is not as it was, only if it still says who has it, or is gone.
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
