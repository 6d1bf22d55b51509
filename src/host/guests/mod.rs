//! What a cluster sees of guests: an object for each, and events.
//!
//! ```text
//!  fleet ──which VMs have changed──▶ writer ──status, if it is another──▶ Guest (server-side apply)
//!                                       └─────what people should see────▶ Event of the VirtualMachineInstance
//! ```
//!
//! An object has the name of its VirtualMachineInstance and is owned by it, so that both go together. It is written when
//! what it says has changed, and not oftener than every few seconds; no VM is written to. Who reaches a guest writes its
//! object: after a migration the node that it came to. An object is read once, by each process that comes to write it: what
//! an earlier one wrote still holds while nothing else is known, so that a restart writes nothing and no condition begins anew.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio::time::Instant;

use super::backends::kubevirt::node::{Instance, Options, Roster};
use super::changed::Changed;
use super::fleet::{Handle, Known};
use super::text;
use crate::kubernetes::standing::Teller;
use crate::supervise;
use crate::wire::guest_object::Status;
use crate::wire::proto::v1::{PowerState, SessionState};

mod status;
mod write;

use status::{Notice, notices, settled, status};

/// What comes at once is written at once.
const SETTLE: Duration = Duration::from_millis(200);
/// Between two writes of one object, and two tries.
const BETWEEN: Duration = Duration::from_secs(5);
/// Between two writes of any.
const PACE: Duration = Duration::from_millis(10);
/// How long the status that an earlier process wrote is kept while there is no session yet, or the guest has not reported its
/// state. All guests of a node are reconnected within a few seconds.
const GRACE: Duration = Duration::from_secs(30);
/// After a failure, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How long the same event is not told again.
const SAME_NOTICE: Duration = Duration::from_secs(3600);
/// Between two events of one guest.
const BETWEEN_NOTICES: Duration = Duration::from_secs(10);

/// What writes the objects of a node's guests.
pub struct Writer {
    /// The name of the node.
    pub node: String,
    /// Knows the guests.
    pub fleet: Handle,
    /// Which have changed.
    pub changed: Arc<Changed>,
    /// Whose objects there are.
    pub roster: Arc<Roster>,
    /// What the settings say.
    pub options: watch::Receiver<Options>,
    /// Is told what cannot be written.
    pub teller: Teller,
}

/// What became of a look at a guest.
enum Outcome {
    /// Its object is another now.
    Written,
    /// There was nothing to write.
    Same,
    /// The guest's state is not known yet; look again then.
    Early(Instant),
    /// It could not be written.
    Failed,
}

/// What was written of a guest.
#[derive(Debug)]
struct Written {
    /// The VirtualMachineInstance that owns its object.
    uid: String,
    /// The object is there, as far as is known.
    is_made: bool,
    status: Option<Status>,
    /// Until when the status that an earlier process on this node wrote is kept; none once the guest's state is known.
    kept_until: Option<Instant>,
    /// When it was tried last.
    at: Option<Instant>,
    told: VecDeque<(String, Instant)>,
}

impl Writer {
    /// Writes until the future is dropped, on a thread of its own.
    pub async fn run(self, cluster: kube::Config) {
        let work = move || async move {
            match Client::try_from(cluster) {
                Ok(client) => self.write(client).await,
                Err(error) => tracing::error!("the cluster cannot be asked: {}", text::chain(&error)),
            }
        };
        supervise::apart("guests", work).await;
    }

    async fn write(self, client: Client) {
        let mut written: HashMap<String, Written> = HashMap::new();
        // When which is to be looked at.
        let mut due: BTreeMap<String, Instant> = BTreeMap::new();
        // In a row, of all objects.
        let mut failures = 0;
        loop {
            let next = due.iter().min_by_key(|(_, at)| **at).map(|(name, at)| (name.clone(), *at));
            let names = tokio::select! {
                biased;
                () = until(next.as_ref().map(|(_, at)| *at)) => None,
                names = self.changed.take() => Some(names),
            };
            match (names, next) {
                (Some(names), _) => {
                    let now = Instant::now();
                    for name in names {
                        let last = written.get(&name).and_then(|written| written.at);
                        let soonest = last.map_or(now, |last| last + BETWEEN).max(now + SETTLE);
                        due.entry(name).and_modify(|at| *at = soonest.min(*at)).or_insert(soonest);
                    }
                }
                (None, Some((name, _))) => {
                    due.remove(&name);
                    match self.look(&client, &name, &mut written).await {
                        Outcome::Written => {
                            failures = 0;
                            tokio::time::sleep(PACE).await;
                        }
                        Outcome::Same => {}
                        Outcome::Early(until) => drop(due.insert(name, until)),
                        Outcome::Failed => {
                            // What keeps one from being written mostly keeps all.
                            let wait = FIRST_WAIT.saturating_mul(1 << failures.min(16)).min(LONGEST_WAIT);
                            failures += 1;
                            due.insert(name, Instant::now() + BETWEEN);
                            tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
                        }
                    }
                }
                (None, None) => {}
            }
        }
    }

    /// Writes what has changed of one guest.
    async fn look(&self, client: &Client, name: &str, all: &mut HashMap<String, Written>) -> Outcome {
        let known = self.fleet.get(name.to_owned()).await.ok().flatten();
        let (Some(known), Some(instance)) = (known, self.roster.get(name)) else {
            // It is gone, and so is its object, or another node's.
            all.remove(name);
            return Outcome::Same;
        };
        if !self.options.borrow().guests {
            return Outcome::Same;
        }
        let written = match all.entry(name.to_owned()) {
            Entry::Occupied(entry) if entry.get().uid == instance.uid => entry.into_mut(),
            entry => match self.read(client, &instance).await {
                Ok(found) => entry.insert_entry(found).into_mut(),
                Err(problem) => {
                    self.teller.failed(&problem);
                    return Outcome::Failed;
                }
            },
        };
        if let Some(until) = written.kept_until.filter(|until| Instant::now() < *until && is_starting(&known))
        {
            return Outcome::Early(until);
        }
        written.kept_until = None;
        let now = Status { volumes: instance.volumes, ..status(&self.node, &known) };
        let now = settled(now, written.status.as_ref(), Timestamp::now());
        if written.status.as_ref() == Some(&now) {
            return Outcome::Same;
        }
        written.at = Some(Instant::now());
        if let Err(problem) = write::guest(client, &instance, &now, !written.is_made).await {
            self.teller.failed(&problem);
            // The object may be gone, so it is made next time.
            written.is_made = false;
            return Outcome::Failed;
        }
        self.teller.well();
        written.is_made = true;
        let notices = notices(written.status.as_ref(), &now);
        written.status = Some(now);
        for notice in notices {
            self.tell(client, &instance, written, notice).await;
        }
        Outcome::Written
    }

    /// Reads what an earlier process has written about a guest.
    async fn read(&self, client: &Client, instance: &Instance) -> Result<Written, String> {
        let status = write::found(client, instance).await?;
        let is_own = status.as_ref().is_some_and(|status| status.host == self.node);
        Ok(Written {
            uid: instance.uid.clone(),
            is_made: status.is_some(),
            status,
            kept_until: is_own.then(|| Instant::now() + GRACE),
            at: None,
            told: VecDeque::new(),
        })
    }

    /// Makes an event, unless the same or too many were made just before. One that cannot be made is not tried again.
    async fn tell(&self, client: &Client, instance: &Instance, written: &mut Written, notice: Notice) {
        let now = Instant::now();
        written.told.retain(|(_, at)| now.duration_since(*at) < SAME_NOTICE);
        let is_same = written.told.iter().any(|(message, _)| *message == notice.message);
        let is_soon = written.told.back().is_some_and(|(_, at)| now.duration_since(*at) < BETWEEN_NOTICES);
        if is_same || is_soon {
            return;
        }
        written.told.push_back((notice.message.clone(), now));
        if let Err(problem) = write::event(client, instance, &self.node, &notice).await {
            tracing::debug!("an event of {} cannot be made: {problem}", instance.name);
        }
    }
}

/// Whether the session may still be on its way up, or its guest has not reported its state yet.
fn is_starting(known: &Known) -> bool {
    let Known { view, state, .. } = known;
    match view.session() {
        SessionState::Connecting => view.power() != PowerState::Off,
        SessionState::Connected => state.is_none(),
        _ => false,
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
