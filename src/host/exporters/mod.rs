//! What exporters in guests answer, for Prometheus: fetched when that asks, over connections that guests allow (`grant.forward`), and
//! handed on as theirs.
//!
//! ```text
//! Prometheus ──/guests/VM/JOB/metrics──▶ a place ──▶ forward to the guest's exporter ──▶ HTTP ──▶ relabelled, with our label
//!                                          late, too large, no metrics: 502, and nothing of what had come
//! ```

mod call;

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{Semaphore, watch};

use super::fleet::{Handle, Known, Stopped};
use super::half::Half;
use super::machine::Desks;
use super::metrics::exporters::Outcome;
use crate::access::Pattern;
use crate::metrics::relabel::relabel;
use crate::transport::http1::{self, Fetch};
use crate::wire::proto::v1::SessionState;

/// Answers that are fetched at a time, each of which may be in memory twice; further ones wait, within their time.
const AT_A_TIME: usize = 8;

/// One kind of exporter in guests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// What Prometheus calls it.
    pub name: String,
    /// Where it listens in the guest, as its settings write it.
    pub target: String,
    /// Where it has its metrics.
    pub path: String,
    /// In which VMs.
    pub vms: Vec<Pattern>,
    /// How often Prometheus is to ask, if it is not to do so as usual.
    pub interval: Option<Duration>,
    /// How long it may take.
    pub timeout: Duration,
    /// Most bytes of an answer.
    pub max_bytes: usize,
    /// Most samples of it.
    pub max_series: usize,
}

/// All jobs.
pub type Jobs = Arc<[Job]>;

/// Fetches; clones share the places.
#[derive(Debug, Clone)]
pub struct Exporters {
    fleet: Handle,
    desks: Desks,
    half: Arc<Half>,
    jobs: watch::Receiver<Jobs>,
    places: Arc<Semaphore>,
}

/// Why there is no answer, in words for people, and how it is counted.
#[derive(Debug)]
pub struct Failure {
    outcome: Outcome,
    words: String,
}

impl Failure {
    fn new(outcome: Outcome, words: impl Into<String>) -> Self {
        Self { outcome, words: words.into() }
    }
}

/// What is found at a path.
#[derive(Debug)]
pub enum Found {
    /// The answer, as it is handed on.
    Answer(String),
    /// Why there is none.
    Failed(String),
    /// There is no such VM, or job of it.
    Nothing,
}

/// A target, as Prometheus discovers it over HTTP.
#[derive(Debug, Serialize)]
struct Discovered<'d> {
    targets: [&'d str; 1],
    labels: Labels<'d>,
}

#[derive(Debug, Serialize)]
struct Labels<'d> {
    job: &'d str,
    instance: &'d str,
    #[serde(rename = "__metrics_path__")]
    path: String,
    #[serde(rename = "__scrape_interval__", skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
    #[serde(rename = "__meta_guestlet_cluster")]
    cluster: &'d str,
    #[serde(rename = "__meta_guestlet_uuid")]
    uuid: &'d str,
}

impl Exporters {
    /// Those of the guests of this fleet.
    pub fn new(fleet: Handle, desks: Desks, half: Arc<Half>, jobs: watch::Receiver<Jobs>) -> Self {
        Self { fleet, desks, half, jobs, places: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// None: sessions with these guests are elsewhere.
    pub fn none(fleet: &Handle, half: &Arc<Half>) -> Self {
        Self::new(fleet.clone(), Desks::default(), Arc::clone(half), watch::channel(Jobs::default()).1)
    }

    /// What the exporter at `VM/JOB` answers now.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn at(&self, place: &str) -> Result<Found, Stopped> {
        let Some((vm, job)) = place.rsplit_once('/') else { return Ok(Found::Nothing) };
        let job = self.jobs.borrow().iter().find(|one| one.name == job).cloned();
        let Some(job) = job.filter(|job| is_of(job, vm)) else { return Ok(Found::Nothing) };
        if self.fleet.get(vm.to_owned()).await?.is_none() {
            return Ok(Found::Nothing);
        }
        let fetched = tokio::time::timeout(job.timeout, self.fetch(&job, vm)).await;
        let fetched = fetched.unwrap_or_else(|_| {
            let words = format!("it has not answered within {} s", job.timeout.as_secs());
            Err(Failure::new(Outcome::Late, words))
        });
        let outcome = fetched.as_ref().map_or_else(|failure| failure.outcome, |_| Outcome::Answered);
        self.half.metrics.exporters.count(&job.name, outcome);
        Ok(match fetched {
            Ok(text) => Found::Answer(text),
            Err(Failure { words, .. }) => {
                let Job { name, target, .. } = &job;
                Found::Failed(format!("the exporter of job {name} at {target} in {vm}: {words}"))
            }
        })
    }

    async fn fetch(&self, job: &Job, vm: &str) -> Result<String, Failure> {
        let closed = |_| Failure::new(Outcome::Unreachable, "guestlet-host is stopping");
        let _place = self.places.acquire().await.map_err(closed)?;
        let fetch = Fetch {
            path: &job.path,
            accept: "text/plain;version=0.0.4;q=1,*/*;q=0.1",
            max_bytes: job.max_bytes,
        };
        let connection = call::Connection { fleet: &self.fleet, desks: &self.desks, vm, job };
        let answer = connection.with(|stream| http1::get(stream, fetch)).await?;
        let answer = answer.map_err(|error| {
            let outcome = match error {
                http1::NoAnswer::TooLarge(_) => Outcome::TooLarge,
                _ => Outcome::Wrong,
            };
            let more = if outcome == Outcome::TooLarge {
                "; scrape.max-bytes in the settings allows more"
            } else {
                ""
            };
            Failure::new(outcome, format!("{error}{more}"))
        })?;
        let wrong = |words: String| Failure::new(Outcome::Wrong, words);
        let text = std::str::from_utf8(&answer).map_err(|_| wrong("its answer is not UTF-8".to_owned()))?;
        relabel(text, vm, job.max_series).map_err(|error| wrong(error.to_string()))
    }

    /// All exporters, each as a target of Prometheus at `address`: those of VMs that run and can be reached.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn discovery(&self, address: &str) -> Result<String, Stopped> {
        let known = self.fleet.list().await?;
        let jobs = Jobs::clone(&self.jobs.borrow());
        let of = |job: &'_ Job, known: &'_ Known| {
            let can_be = matches!(
                known.view.session(),
                SessionState::Connected | SessionState::Connecting | SessionState::Refused
            );
            can_be && is_of(job, &known.view.name)
        };
        let mut all = Vec::new();
        for job in jobs.iter() {
            for known in known.iter().filter(|known| of(job, known)) {
                let name = &known.view.name;
                let labels = Labels {
                    job: &job.name,
                    instance: name,
                    path: format!("/guests/{name}/{}/metrics", job.name),
                    interval: job.interval.map(|interval| format!("{}s", interval.as_secs())),
                    cluster: &known.view.cluster,
                    uuid: &known.view.uuid,
                };
                all.push(Discovered { targets: [address], labels });
            }
        }
        // Texts alone, which can always be written.
        Ok(serde_json::to_string(&all).unwrap_or_default())
    }
}

fn is_of(job: &Job, vm: &str) -> bool {
    job.vms.iter().any(|pattern| pattern.matches(vm))
}
