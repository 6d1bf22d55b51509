//! Guests as a host cluster sees them: a `Guest` object for each, and events.
//!
//! ```text
//!  fleet ──which VMs have changed──▶ writer ──labels and status, if changed──▶ Guest (server-side apply)
//!                                       └─────changes worth an event─────────▶ Event of the VirtualMachineInstance
//! ```
//!
//! An object has the name of its VirtualMachineInstance and is owned by it, so both are deleted together. It has the
//! labels of its VM, but for those that others have set on it to other values. It is written when its content has
//! changed, at most once in a few seconds; the VM's own objects are never written. The node that reaches a guest
//! writes its object: after a migration, the new node. Each process reads an object once, before it first writes it.
//! What an earlier process wrote remains valid as long as nothing else is known, so a restart writes nothing and does
//! not reset the transition time of any condition.

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
use crate::labels::Labels;
use crate::supervise;
use crate::wire::guest_object::Status;
use crate::wire::proto::v1::{PowerState, SessionState};

mod labels;
mod status;
mod write;

use status::{Notice, notices, settled, status};
use write::Found;

/// Delay before a change is written, so that changes in quick succession become one write.
const SETTLE: Duration = Duration::from_millis(200);
/// Shortest time between two writes of one object, and between two attempts.
const BETWEEN: Duration = Duration::from_secs(5);
/// Pause between the writes of any two objects.
const PACE: Duration = Duration::from_millis(10);
/// Time for which the status from an earlier process is kept while there is no session yet, or the guest has not
/// reported its state. All guests of a node reconnect within a few seconds.
const GRACE: Duration = Duration::from_secs(30);
/// First and longest delay after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Time for which the same event of a guest is not repeated.
const SAME_NOTICE: Duration = Duration::from_secs(3600);
/// Shortest time between two events of one guest.
const BETWEEN_NOTICES: Duration = Duration::from_secs(10);

/// Writer of the objects of a node's guests.
pub struct Writer {
    /// The name of the node.
    pub node: String,
    /// Fleet, which knows the guests.
    pub fleet: Handle,
    /// Set of the guests that have changed.
    pub changed: Arc<Changed>,
    /// VirtualMachineInstances of this node, which own the objects.
    pub roster: Arc<Roster>,
    /// Settings of VMs; they say whether objects are written at all.
    pub options: watch::Receiver<Options>,
    /// Reporter of failed writes.
    pub teller: Teller,
}

/// Result of looking at one guest.
enum Outcome {
    /// The object was updated.
    Written,
    /// The object is up to date.
    Same,
    /// The guest's state is not known yet. The guest is looked at again at this time.
    Early(Instant),
    /// The object could not be read or written.
    Failed,
}

/// State of the object of a guest.
#[derive(Debug)]
struct Written {
    /// UID of the VirtualMachineInstance that owns the object.
    uid: String,
    /// UID of the object; `None` if it does not exist, or may have been deleted.
    object: Option<String>,
    status: Option<Status>,
    /// Labels that were written, or left to others; `None` if they are not known.
    labels: Option<Arc<Labels>>,
    /// End of the time for which the status from an earlier process on this node is kept; `None` once the guest's
    /// state is known.
    kept_until: Option<Instant>,
    /// Time of the last attempt to write.
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
        // Time at which each guest is to be looked at.
        let mut due: BTreeMap<String, Instant> = BTreeMap::new();
        // Consecutive failures, across all objects.
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
                            // Whatever prevents one write usually prevents all of them, so the delay applies to all.
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

    /// Writes the object of one guest, if it has changed.
    async fn look(&self, client: &Client, name: &str, all: &mut HashMap<String, Written>) -> Outcome {
        let known = self.fleet.get(name.to_owned()).await.ok().flatten();
        let (Some(known), Some(instance)) = (known, self.roster.get(name)) else {
            // The VM has ended, which deletes its object, or it has moved to another node, which writes its object.
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
        let is_known = written.object.is_some() && written.status.as_ref() == Some(&now);
        if is_known && written.labels.as_ref() == Some(&instance.labels) {
            return Outcome::Same;
        }
        written.at = Some(Instant::now());
        if let Err(problem) = self.put(client, &instance, written, now).await {
            self.teller.failed(&problem);
            // The object may have been deleted, so the next attempt creates it again.
            (written.object, written.labels) = (None, None);
            return Outcome::Failed;
        }
        self.teller.well();
        Outcome::Written
    }

    /// Writes what has changed of a guest, and creates its object and events if need be.
    async fn put(
        &self,
        client: &Client,
        instance: &Instance,
        written: &mut Written,
        now: Status,
    ) -> Result<(), String> {
        let is_made = written.object.is_some();
        if !is_made {
            written.object = write::object(client, instance).await?;
        }
        // Before the status, so that an object with a status has its labels. The status does not depend on them: it is
        // written even if they are refused.
        let mut labelled = Ok(());
        if written.labels.as_ref() != Some(&instance.labels)
            && let Some(object) = &written.object
        {
            labelled = write::labels(client, instance, object, &instance.labels).await;
            if labelled.is_ok() {
                written.labels = Some(Arc::clone(&instance.labels));
            }
        }
        if !is_made || written.status.as_ref() != Some(&now) {
            write::status(client, instance, &now).await?;
            let notices = notices(written.status.as_ref(), &now);
            written.status = Some(now);
            for notice in notices {
                self.tell(client, instance, written, notice).await;
            }
        }
        labelled
    }

    /// Reads what an earlier process has written about a guest.
    async fn read(&self, client: &Client, instance: &Instance) -> Result<Written, String> {
        let (object, status, labels) = match write::found(client, instance).await? {
            Found::Nothing => (None, None, Some(Arc::default())),
            // Labels on it may be guestlet's.
            Found::Unusable => (None, None, None),
            Found::Own(guest) => {
                let labels = Arc::new(labels::settled(&guest.metadata, &instance.labels));
                (guest.metadata.uid, Some(guest.status), Some(labels))
            }
        };
        let is_own = status.as_ref().is_some_and(|status| status.host == self.node);
        Ok(Written {
            uid: instance.uid.clone(),
            object,
            status,
            labels,
            kept_until: is_own.then(|| Instant::now() + GRACE),
            at: None,
            told: VecDeque::new(),
        })
    }

    /// Creates an event, unless the same event or too many events were created recently. A failed event is not
    /// retried.
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

/// Returns whether the session may still be connecting, or its guest has not reported its state yet.
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
