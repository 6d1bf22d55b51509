//! Exporters in guests, for Prometheus: their metrics are fetched when Prometheus scrapes, over connections that
//! guests allow (`grant.forward`), and returned as the exporter's own.
//!
//! ```text
//! Prometheus ──/guests/VM/JOB/metrics──▶ permit ──▶ forward to the guest's exporter ──▶ HTTP ──▶ relabelled, with our label
//!                                          late, too large, no metrics: 502, and nothing that was already received
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

/// Limit on concurrent requests. Each answer may be in memory twice; further requests wait, within their timeout.
const AT_A_TIME: usize = 8;

/// Kind of exporter in guests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Name of the job in Prometheus.
    pub name: String,
    /// Address of the exporter in the guest, as written in the settings.
    pub target: String,
    /// HTTP path of its metrics.
    pub path: String,
    /// Patterns for the names of the VMs that have this exporter.
    pub vms: Vec<Pattern>,
    /// Scrape interval for Prometheus; `None` for its default.
    pub interval: Option<Duration>,
    /// Timeout of a request to the exporter.
    pub timeout: Duration,
    /// Limit on the bytes of an answer.
    pub max_bytes: usize,
    /// Limit on the samples of an answer.
    pub max_series: usize,
}

/// All jobs of the settings.
pub type Jobs = Arc<[Job]>;

/// Exporters in guests; clones share the limit on requests.
#[derive(Debug, Clone)]
pub struct Exporters {
    fleet: Handle,
    desks: Desks,
    half: Arc<Half>,
    jobs: watch::Receiver<Jobs>,
    places: Arc<Semaphore>,
}

/// Failure of a scrape: its message, and its outcome for the counters.
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

/// Result of a scrape.
#[derive(Debug)]
pub enum Found {
    /// Metrics of the exporter, relabelled.
    Answer(String),
    /// Message for a scrape that failed.
    Failed(String),
    /// No such VM, or it has no such job.
    Nothing,
}

/// Target of Prometheus' HTTP service discovery.
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
    /// Creates the exporters of the guests of this fleet.
    pub fn new(fleet: Handle, desks: Desks, half: Arc<Half>, jobs: watch::Receiver<Jobs>) -> Self {
        Self { fleet, desks, half, jobs, places: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// Creates an instance without exporters, for a program that has no sessions with guests.
    pub fn none(fleet: &Handle, half: &Arc<Half>) -> Self {
        Self::new(fleet.clone(), Desks::default(), Arc::clone(half), watch::channel(Jobs::default()).1)
    }

    /// Scrapes the exporter at `VM/JOB`.
    ///
    /// # Errors
    /// If the fleet has stopped.
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

    /// Lists all exporters of VMs that run and can be reached, as JSON for Prometheus' HTTP service discovery.
    /// `address` is the target of all of them.
    ///
    /// # Errors
    /// If the fleet has stopped.
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
        // Serialization cannot fail: the targets consist of strings only.
        Ok(serde_json::to_string(&all).unwrap_or_default())
    }
}

fn is_of(job: &Job, vm: &str) -> bool {
    job.vms.iter().any(|pattern| pattern.matches(vm))
}
