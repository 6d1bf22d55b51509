//! Health of this program, over HTTP on loopback, for the probes of kubelet.
//!
//! | path | 200 as long as |
//! |---|---|
//! | `/healthz`, `/livez` | the work as leader makes progress, and has not outlived its Lease; otherwise only a restart helps |
//! | `/readyz` | the API server and the host half answer, as far as this replica calls them |
//!
//! A program that is stuck as a whole does not answer at all, which counts as a failure, too. An API server
//! or host half that cannot be reached is no reason to restart: a restart would not help.
//!
//! To have another loop supervised, give it a [`Pulse`] and beat in it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Method, Response, StatusCode};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::kubernetes::standing::Problems;
use crate::supervise::Scope;
use crate::transport::http1;

/// Interval between two signs of life of a loop, and the time without one after which it counts as stuck.
const BEAT: Duration = Duration::from_secs(5);
const STUCK: Duration = Duration::from_secs(60);
/// Time that a leader may take to end after its Lease has ended, as in Kubernetes' own components.
const OVERDUE: Duration = Duration::from_secs(20);
/// Clients at a time; a further one waits.
const CLIENTS: usize = 8;
/// Limit for one client, from its connection to the last answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause before connections are accepted again after the system was out of resources for one.
const PAUSE: Duration = Duration::from_secs(1);

/// Health of this replica; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Health {
    known: Arc<Mutex<Known>>,
    problems: watch::Receiver<Problems>,
}

#[derive(Debug, Default)]
struct Known {
    /// Time of the last sign of life of each loop.
    beats: BTreeMap<&'static str, Instant>,
    /// Time until which this replica leads, if it does.
    leads_until: Option<Instant>,
}

impl Known {
    /// Returns the reason why only a restart helps; `None` if the program is well.
    fn stuck(&self, now: Instant) -> Option<String> {
        let late = |since: Instant, most: Duration| now.saturating_duration_since(since) >= most;
        if self.leads_until.is_some_and(|until| late(until, OVERDUE)) {
            return Some("the Lease has expired, but this replica is still running".to_owned());
        }
        let stuck = self.beats.iter().find(|(_, last)| late(**last, STUCK));
        stuck.map(|(part, _)| format!("no progress is made with the {part}"))
    }
}

impl Health {
    /// Returns the health of a replica with these problems.
    pub(super) fn new(problems: watch::Receiver<Problems>) -> Self {
        Self { known: Arc::default(), problems }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // No operation under the lock can leave the value half changed, so a poisoned lock is usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this replica leads until this time.
    pub(super) fn leads_until(&self, until: Instant) {
        self.known().leads_until = Some(until);
    }

    /// Starts the supervision of a loop, which has to beat from now on.
    pub(super) fn pulse(&self, part: &'static str) -> Pulse {
        let mut ticks = tokio::time::interval(BEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let pulse = Pulse { health: self.clone(), part, ticks };
        pulse.beat();
        pulse
    }

    /// Serves probes until the future is dropped.
    pub(super) async fn serve(self, listener: TcpListener) {
        let (tasks, places) = (Scope::new(), Arc::new(Semaphore::new(CLIENTS)));
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let health = self.clone();
                    tasks.children().spawn(async move {
                        drop(tokio::time::timeout(PATIENCE, health.client(stream)).await);
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!("cannot accept a connection for a probe: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn client(self, stream: TcpStream) {
        let served = http1::serve(stream, |request| {
            let (status, words) = self.answer(request.method(), request.uri().path());
            let mut response = Response::new(words);
            *response.status_mut() = status;
            async move { response }
        });
        if let Err(error) = served.await {
            tracing::debug!(%error, "a probe");
        }
    }

    fn answer(&self, method: &Method, path: &str) -> (StatusCode, String) {
        let problem = match (method, path) {
            (&Method::GET, "/healthz" | "/livez") => self.known().stuck(Instant::now()),
            (&Method::GET, "/readyz") => {
                let problems = self.problems.borrow();
                let lines = problems.iter().map(|(what, why)| format!("{what}: {why}"));
                (!problems.is_empty()).then(|| lines.collect::<Vec<_>>().join("\n"))
            }
            (&Method::GET, _) => {
                return (StatusCode::NOT_FOUND, "probes are at /healthz, /livez and /readyz\n".to_owned());
            }
            _ => return (StatusCode::METHOD_NOT_ALLOWED, "only GET is supported\n".to_owned()),
        };
        match problem {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(words) => (StatusCode::SERVICE_UNAVAILABLE, format!("{words}\n")),
        }
    }
}

/// Sign of life of a loop. Dropping it ends the supervision: the end of a loop is noticed elsewhere.
#[derive(Debug)]
pub(super) struct Pulse {
    health: Health,
    part: &'static str,
    ticks: Interval,
}

impl Pulse {
    fn beat(&self) {
        self.health.known().beats.insert(self.part, Instant::now());
    }

    /// Waits for the next tick, and reports that the loop is alive.
    pub(super) async fn next(&mut self) {
        self.ticks.tick().await;
        self.beat();
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.health.known().beats.remove(self.part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health() -> (watch::Sender<Problems>, Health) {
        let (problems, told) = watch::channel(Problems::new());
        (problems, Health::new(told))
    }

    fn get(health: &Health, path: &str) -> (u16, String) {
        let (status, words) = health.answer(&Method::GET, path);
        (status.as_u16(), words)
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_goes_on_is_well_and_one_that_is_stuck_is_not() {
        let (_problems, health) = health();
        let mut pulse = health.pulse("Services");
        for _ in 0..60 {
            pulse.next().await;
            assert_eq!(get(&health, "/healthz"), (200, "ok\n".to_owned()));
        }
        tokio::time::advance(STUCK).await;
        assert_eq!(get(&health, "/livez"), (503, "no progress is made with the Services\n".to_owned()));
        // The loop was held up.
        pulse.next().await;
        assert_eq!(get(&health, "/livez").0, 200);
        drop(pulse);
        tokio::time::advance(STUCK).await;
        assert_eq!(get(&health, "/livez").0, 200, "it has ended");
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_does_not_end_with_its_lease_is_stuck() {
        let (_problems, health) = health();
        health.leads_until(Instant::now() + OVERDUE);
        tokio::time::advance(OVERDUE + Duration::from_millis(19_999)).await;
        assert_eq!(get(&health, "/healthz").0, 200);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(get(&health, "/healthz").0, 503);
    }

    #[tokio::test]
    async fn what_cannot_be_asked_makes_it_unready_and_not_unhealthy() {
        let (problems, health) = health();
        problems.send_modify(|all| drop(all.insert("the Nodes cannot be read", "refused".to_owned())));
        assert_eq!(get(&health, "/healthz").0, 200);
        assert_eq!(get(&health, "/readyz"), (503, "the Nodes cannot be read: refused\n".to_owned()));
        problems.send_modify(Problems::clear);
        assert_eq!(get(&health, "/readyz").0, 200);
        assert_eq!(get(&health, "/metrics").0, 404);
        assert_eq!(health.answer(&Method::POST, "/healthz").0, StatusCode::METHOD_NOT_ALLOWED);
    }
}
