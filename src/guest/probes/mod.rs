//! Health checks of this guest's own node ports: periodic TCP connections to each of them.
//!
//! ```text
//!  Probes::set ──▶ Prober, which has all state ──▶ Standing (watched): reported to the owner
//!                    │   ▲
//!               due  ▼   │ outcome
//!                  connection::attempt ──▶ judge::Verdict
//! ```
//!
//! Checks belong to an owner, and end with it. Each check has at most one try under way, so that one that hangs
//! does not delay the others. Without checks nothing wakes the agent.

mod connection;
mod judge;

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

pub use judge::{Check, Family};

use crate::guest::topology::Desk;
use connection::{Addresses, attempt};
use judge::Verdict;

/// Time between the first tries of checks that begin together, so that they are spread out.
const APART: Duration = Duration::from_millis(4);
/// Maximum number of requests that wait for the prober.
const WAITING: usize = 16;

/// Set of checks that an owner asks for.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Number that distinguishes the owner of these checks from other owners.
    pub owner: u64,
    /// Number that the owner has given to this set of checks.
    pub generation: u64,
    /// Interval at which results are reported even if none has changed; `None` to report changes only.
    pub report_every: Option<Duration>,
    /// Checks; no two have the same identifier.
    pub checks: Vec<Check>,
}

/// Present result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Identifier of the check.
    pub id: String,
    /// True if the check counts as healthy by its thresholds.
    pub healthy: bool,
    /// Reason why the last try failed, for people; empty if it succeeded.
    pub problem: String,
}

/// Results of all checks, with their owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// Owner, as in [`Wanted`].
    pub owner: u64,
    /// Generation, as in [`Wanted`].
    pub generation: u64,
    /// Interval of reports, as in [`Wanted`].
    pub report_every: Option<Duration>,
    /// Results in the order of the checks.
    pub outcomes: Vec<Outcome>,
}

/// Reason why checks are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client that owns the checks has already disconnected.
    #[error("the client that requested the health checks has disconnected")]
    Ended,
    /// The agent is stopping, so checks are no longer made.
    #[error("the agent is stopping")]
    Stopping,
}

type Ended = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Request {
    wanted: Wanted,
    ended: Ended,
    answer: oneshot::Sender<Result<Vec<Outcome>, Refusal>>,
}

/// Handle for requests to the [`Prober`]; clones share it.
#[derive(Debug, Clone)]
pub struct Probes {
    requests: mpsc::Sender<Request>,
    standing: watch::Receiver<Standing>,
}

impl Probes {
    /// Returns a receiver of the results and their changes.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// Replaces all checks with these, until `ended` completes. A check that already runs with the same fields
    /// continues unchanged. Returns the present results, in the order of the checks.
    ///
    /// # Errors
    /// If the owner has ended already, in which case the present checks stay; or if the agent is stopping.
    pub async fn set(
        &self,
        wanted: Wanted,
        ended: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Vec<Outcome>, Refusal> {
        let (answer, answered) = oneshot::channel();
        let request = Request { wanted, ended: Box::pin(ended), answer };
        self.requests.send(request).await.map_err(|_| Refusal::Stopping)?;
        answered.await.unwrap_or(Err(Refusal::Stopping))
    }
}

/// Function that returns the address to connect to for a family, or the reason why there is none.
type Place = Box<dyn FnMut(Family) -> Result<IpAddr, String> + Send>;
/// Try under way: completes with the number of its check and the outcome, or with `None` if the check has ended.
type Trying = Pin<Box<dyn Future<Output = Option<(u64, Result<(), String>)>> + Send>>;

/// Task that makes the checks and owns their state.
pub struct Prober {
    requests: mpsc::Receiver<Request>,
    standing: watch::Sender<Standing>,
    place: Place,
    /// Checks in the order of [`Standing::outcomes`].
    probes: Vec<Probe>,
    tries: FuturesUnordered<Trying>,
    /// Completes when the checks end.
    ended: Ended,
    /// Number of the next new check.
    next: u64,
}

impl std::fmt::Debug for Prober {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Prober").field("probes", &self.probes).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Probe {
    number: u64,
    check: Check,
    verdict: Verdict,
    due: Instant,
    /// Sender that is dropped to cancel the try under way.
    trying: Option<oneshot::Sender<()>>,
}

impl Probe {
    fn outcome(&self) -> Outcome {
        let Verdict { healthy, ref problem, .. } = self.verdict;
        Outcome { id: self.check.id.clone(), healthy, problem: problem.clone() }
    }
}

/// Creates the task that checks this machine, which is the Node that `topology` knows, and the handle for requests
/// to it.
pub fn probes(topology: Arc<Desk>) -> (Probes, Prober) {
    let mut addresses = Addresses::new(topology);
    at(Box::new(move |family| addresses.of(family)))
}

fn at(place: Place) -> (Probes, Prober) {
    let (send, requests) = mpsc::channel(WAITING);
    let standing = watch::Sender::default();
    let way = Probes { requests: send, standing: standing.subscribe() };
    let prober = Prober {
        requests,
        standing,
        place,
        probes: Vec::new(),
        tries: FuturesUnordered::new(),
        ended: Box::pin(std::future::pending()),
        next: 0,
    };
    (way, prober)
}

impl Prober {
    /// Makes the requested checks, until all handles are dropped.
    pub async fn run(mut self) {
        loop {
            let due = self.due();
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.take(request),
                    None => return,
                },
                () = &mut self.ended => self.end(),
                Some(tried) = self.tries.next(), if !self.tries.is_empty() => self.judge(tried),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.begin(),
            }
        }
    }

    /// Returns when the next try begins.
    fn due(&self) -> Option<Instant> {
        self.probes.iter().filter(|probe| probe.trying.is_none()).map(|probe| probe.due).min()
    }

    fn take(&mut self, Request { wanted, mut ended, answer }: Request) {
        if (&mut ended).now_or_never().is_some() {
            let _ = answer.send(Err(Refusal::Ended));
            return;
        }
        let is_same_owner = self.standing.borrow().owner == wanted.owner;
        let mut before = std::mem::take(&mut self.probes);
        let mut due = Instant::now();
        for check in wanted.checks {
            let place = before.iter().position(|probe| is_same_owner && probe.check == check);
            let probe = if let Some(place) = place {
                before.swap_remove(place)
            } else {
                self.next += 1;
                let new = Probe { number: self.next, check, verdict: Verdict::default(), due, trying: None };
                due += APART;
                new
            };
            self.probes.push(probe);
        }
        self.ended = ended;
        let outcomes: Vec<_> = self.probes.iter().map(Probe::outcome).collect();
        let Wanted { owner, generation, report_every, .. } = wanted;
        self.standing.send_replace(Standing { owner, generation, report_every, outcomes: outcomes.clone() });
        // The caller may have stopped waiting; the checks are made all the same.
        let _ = answer.send(Ok(outcomes));
    }

    fn end(&mut self) {
        self.ended = Box::pin(std::future::pending());
        self.probes.clear();
        self.standing.send_replace(Standing::default());
    }

    /// Begins the tries that are due.
    fn begin(&mut self) {
        let now = Instant::now();
        for probe in self.probes.iter_mut().filter(|probe| probe.trying.is_none() && probe.due <= now) {
            let Check { port, family, timeout, period, .. } = probe.check;
            probe.due += period;
            if probe.due <= now {
                // Tries that were missed because the machine was suspended or busy are not made up for.
                probe.due = now + period;
            }
            let (trying, unwanted) = oneshot::channel::<()>();
            probe.trying = Some(trying);
            let (number, place) = (probe.number, (self.place)(family));
            self.tries.push(Box::pin(async move {
                let tried = async {
                    let place = place?;
                    attempt(SocketAddr::new(place, port), timeout).await
                };
                tokio::select! {
                    _ = unwanted => None,
                    outcome = tried => Some((number, outcome)),
                }
            }));
        }
    }

    fn judge(&mut self, tried: Option<(u64, Result<(), String>)>) {
        let Some((number, outcome)) = tried else { return };
        let Some(place) = self.probes.iter().position(|probe| probe.number == number) else { return };
        let probe = &mut self.probes[place];
        probe.trying = None;
        let was_healthy = probe.verdict.healthy;
        if !probe.verdict.take(&probe.check, outcome) {
            return;
        }
        let outcome = probe.outcome();
        if outcome.healthy != was_healthy {
            let Outcome { healthy, problem, .. } = &outcome;
            let port = probe.check.port;
            if *healthy {
                tracing::info!("the health check of node port {port} passes");
            } else {
                tracing::info!("the health check of node port {port} fails: {problem}");
            }
        }
        self.standing.send_modify(|standing| {
            if let Some(told) = standing.outcomes.get_mut(place) {
                *told = outcome;
            }
        });
    }
}

#[cfg(test)]
mod tests;
