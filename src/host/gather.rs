//! Metrics of guests, and of VMs from their hypervisors (`hypervisor`), gathered when Prometheus scrapes. All
//! guests are asked at the same time, each with its own deadline, so that a guest that is slow or does not answer
//! delays only its own series.
//!
//! ```text
//!         ┌─ no session, or not capable ────────▶ not asked
//! guest ──┼─ answered within the last second ───▶ the same answer
//!         ├─ asked ──▶ answered ────────────────▶ cleaned, and kept for a second
//!         │      └───▶ late ────────────────────▶ nothing; shorter timeout until it is in time again
//!         └─ denied a moment ago ───────────────▶ not asked
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use super::backends::meters::Meters;
use super::fleet::{Handle, Known, Reach, Stopped};
use super::half::Half;
use super::metrics::gathered::Outcome;
use crate::metrics::{MOST_OF_GUEST, MOST_SERIES, ROOM_OF_HYPERVISOR, Sample, check, message, table};
use crate::wire::proto::v1::{CollectMetricsRequest, CollectMetricsResponse, SessionState};

mod hypervisor;

/// Capability that an agent reports if it provides metrics.
const CAPABILITY: &str = "metrics";
/// Timeout of a guest, below the scrape timeout of Prometheus.
const PATIENCE: Duration = Duration::from_secs(4);
/// Timeout of a guest that was late the last time.
const LITTLE_PATIENCE: Duration = Duration::from_millis(500);
/// Time for which an answer is reused for further scrapes.
const FRESH: Duration = Duration::from_secs(1);
/// Time for which a guest that has denied a request is not asked again, so that its audit log is not filled with
/// denials.
const DENIED_FOR: Duration = Duration::from_secs(60);

/// Gatherer of metrics; clones share the last results.
#[derive(Debug, Clone)]
pub struct Gatherer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    fleet: Handle,
    half: Arc<Half>,
    meters: Arc<dyn Meters>,
    /// Last results, by the names of VMs.
    places: Mutex<BTreeMap<String, Arc<Place>>>,
}

/// Last results of one VM. Each lock is held while the guest or its hypervisor is asked, so concurrent scrapes get
/// the same answer.
#[derive(Debug, Default)]
struct Place {
    guest: tokio::sync::Mutex<Last>,
    hypervisor: tokio::sync::Mutex<hypervisor::Last>,
}

/// Result of the last request.
#[derive(Debug, Default)]
struct Last {
    asked: Option<Instant>,
    told: Told,
    is_late: bool,
    denied: Option<Instant>,
}

#[derive(Debug, Clone, Default)]
enum Told {
    /// The guest was not asked, or denied the request.
    #[default]
    Nothing,
    /// The guest did not answer in time, or with an error.
    Silence,
    Answer(Arc<CollectMetricsResponse>),
}

/// Metrics of one VM.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Name of the VM.
    pub name: String,
    /// Metrics in the order of the table: first those that this host half knows, then those from the guest.
    pub metrics: CollectMetricsResponse,
}

impl Gatherer {
    /// Creates a gatherer for the VMs of this fleet. Requests to guests are counted by outcome.
    pub fn new(fleet: Handle, half: Arc<Half>, meters: Arc<dyn Meters>) -> Self {
        Self(Arc::new(Inner { fleet, half, meters, places: Mutex::default() }))
    }

    /// Gathers the metrics of all VMs, sorted by name.
    ///
    /// # Errors
    /// If the fleet has stopped.
    pub async fn all(&self) -> Result<Vec<Guest>, Stopped> {
        let known = self.0.fleet.list().await?;
        self.forget_others(&known);
        let all = known.iter().map(|known| self.of(known));
        Ok(futures_util::future::join_all(all).await)
    }

    /// Gathers the metrics of the VM with this name; `None` if it does not exist.
    ///
    /// # Errors
    /// If the fleet has stopped.
    pub async fn one(&self, name: &str) -> Result<Option<Guest>, Stopped> {
        let Some(known) = self.0.fleet.get(name.to_owned()).await? else { return Ok(None) };
        Ok(Some(self.of(&known).await))
    }

    async fn of(&self, known: &Known) -> Guest {
        let name = &known.view.name;
        let place = Arc::clone(self.places().entry(name.clone()).or_default());
        let is_measured = self.0.meters.measures(name);
        let most = if is_measured { MOST_OF_GUEST - ROOM_OF_HYPERVISOR } else { MOST_OF_GUEST };
        let told = async {
            match known.view.session() {
                SessionState::Connected => self.told(name, &place, most).await,
                _ => Told::Nothing,
            }
        };
        let measured = async {
            let meters = Some(&*self.0.meters).filter(|_| is_measured)?;
            hypervisor::measured(meters, name, &place.hypervisor).await
        };
        let (told, measured) = tokio::join!(told, measured);
        let mut samples = Vec::new();
        let mut put = |family, labels: &[&str], value| samples.push(Sample::new(family, labels, value));
        match (known.view.session(), &told) {
            (SessionState::Connected, Told::Nothing | Told::Answer(_)) => put(&table::UP, &[], 1.0),
            (SessionState::Connected | SessionState::Connecting | SessionState::Refused, _) => {
                put(&table::UP, &[], 0.0);
            }
            _ => {}
        }
        put(&table::VM_INFO, &[&known.view.uuid, &known.view.cluster], 1.0);
        if is_measured {
            let of_guest = match &told {
                Told::Answer(answer) => answer.families.iter().map(|family| family.samples.len()).sum(),
                _ => 0,
            };
            let room = MOST_SERIES.saturating_sub(samples.len() + of_guest);
            let power = known.view.power();
            samples.extend(hypervisor::samples(measured.as_deref(), power, room));
        }
        let mut metrics = message(&samples);
        if let Told::Answer(answer) = told {
            metrics.families.extend(answer.families.iter().cloned());
        }
        Guest { name: name.clone(), metrics }
    }

    async fn told(&self, name: &str, place: &Place, most: usize) -> Told {
        let Ok(mut last) = tokio::time::timeout(PATIENCE, place.guest.lock()).await else {
            return Told::Silence;
        };
        let now = Instant::now();
        if last.asked.is_some_and(|asked| now.duration_since(asked) < FRESH) {
            return last.told.clone();
        }
        if last.denied.is_some_and(|denied| now.duration_since(denied) < DENIED_FOR) {
            return Told::Nothing;
        }
        let patience = if last.is_late { LITTLE_PATIENCE } else { PATIENCE };
        let (told, outcome) = self.ask(name, patience, most).await;
        if let Some(outcome) = outcome {
            self.0.half.metrics.gathered.count(outcome);
            last.is_late = outcome == Outcome::Late;
            last.denied = (outcome == Outcome::Denied).then(Instant::now);
        }
        last.asked = Some(Instant::now());
        last.told = told.clone();
        told
    }

    /// Asks the guest for at most this many series, on behalf of this host half. There is no outcome if it cannot be
    /// asked.
    async fn ask(&self, name: &str, patience: Duration, most: usize) -> (Told, Option<Outcome>) {
        let agent = match self.0.fleet.caller(name.to_owned()).await {
            Ok(Some(Reach::Session { agent, capabilities }))
                if !agent.is_elsewhere() && capabilities.iter().any(|one| one == CAPABILITY) =>
            {
                agent
            }
            _ => return (Told::Nothing, None),
        };
        let calls = agent.on_behalf_of_any(None);
        let max_samples = u32::try_from(most).unwrap_or_default();
        let answer = calls.hand_on(CollectMetricsRequest { max_samples, ..CollectMetricsRequest::default() });
        match tokio::time::timeout(patience, answer).await {
            Ok(Ok(answer)) => {
                let answer = check::clean_to(answer.into_inner(), most);
                self.0.half.recent.take(name, &answer);
                (Told::Answer(Arc::new(answer)), Some(Outcome::Answered))
            }
            Ok(Err(status)) if matches!(status.code(), Code::PermissionDenied | Code::Unimplemented) => {
                (Told::Nothing, Some(Outcome::Denied))
            }
            Ok(Err(status)) => {
                tracing::debug!(vm = name, code = ?status.code(), "a guest reports no metrics");
                (Told::Silence, Some(Outcome::Failed))
            }
            Err(_) => (Told::Silence, Some(Outcome::Late)),
        }
    }

    /// Removes the results of VMs that no longer exist.
    fn forget_others(&self, known: &[Known]) {
        let is_known = |name: &String| known.binary_search_by(|one| one.view.name.cmp(name)).is_ok();
        self.places().retain(|name, _| is_known(name));
    }

    fn places(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<Place>>> {
        // A panic under the lock cannot leave the map half changed.
        self.0.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
