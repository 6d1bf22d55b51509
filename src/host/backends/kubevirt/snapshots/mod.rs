//! Annotates the snapshots of the host cluster with their consistency levels, according to the receipts of
//! guests: `VirtualMachineSnapshot`s, and `VolumeSnapshot`s of the claims of a VM.
//!
//! ```text
//!  receipt, window ──▶ candidate snapshots ──▶ times of the snapshots ──▶ judge ──▶ annotations, if they show a lower level
//! ```
//!
//! It does its work once per request, and keeps no state except for the kinds that the cluster does not have.
//! The level from another receipt is replaced only by a higher one, so that the freeze that a snapshot was
//! taken in wins, whichever is processed first.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::api::{Api, Patch, PatchParams};
use kube::core::NamespaceResourceScope;
use prost_types::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::api::{Cluster, Written, code, found, in_time, unanswered, written};
use super::names::{Claim, is_subdomain};
use super::objects::{Disk, Instance};
use crate::host::backends::volumes::VolumeError;
use crate::kubernetes::lists::{self, Failed};
use crate::kubernetes::standing::Teller;
use crate::receipt::envelope::{Check, Verdict, open};
use crate::receipt::{Level, MOST_BYTES, Receipt};
use crate::trust::key::signer;
use crate::wire::proto::v1::AttachReceiptRequest;

mod judge;
mod objects;

use judge::{Cut, Part, Worth, of_claim, of_machine};
use objects::{OF_CLAIMS, VirtualMachineSnapshot, VolumeSnapshot, VolumeSnapshotContent};

/// Annotation with the identifier of the receipt that determined the level.
pub const RECEIPT: &str = "guestlet.io/receipt";
/// Annotation with the consistency level of the snapshot: `crash`, `filesystem` or `application`.
pub const LEVEL: &str = "guestlet.io/receipt-level";
/// Annotation with the reason why the level is not higher, for people.
pub const WHY: &str = "guestlet.io/receipt-why";
/// Annotation with the receipt itself, in its envelope.
pub const ENVELOPE: &str = "guestlet.io/receipt-envelope";

/// Maximum number of receipts that are attached at a time.
const AT_A_TIME: usize = 4;
/// Maximum number of objects in one page of a list.
const PAGE: u32 = 100;
/// Maximum number of snapshots of one kind that may belong to one freeze.
const MOST: usize = 256;
/// Time for which a missing kind is not requested again.
const ABSENT: Duration = Duration::from_secs(600);
/// Time before a freeze within which the snapshot of a VM may have been requested, because the VM is frozen
/// only when KubeVirt processes the request; then the same for the snapshot of a claim, and the time after a
/// freeze for both. In microseconds.
const MACHINE_BEFORE: i64 = 600_000_000;
const CLAIM_BEFORE: i64 = 60_000_000;
const AFTER: i64 = 300_000_000;

/// Completed freeze, as reported by the node. Times are in microseconds since 1970, by the node's clock.
#[derive(Debug, Clone, Default)]
pub struct Freeze {
    /// Receipt of the freeze.
    pub receipt: Receipt,
    /// Receipt in its envelope.
    pub envelope: String,
    /// Interval in which everything was frozen, if it is proved.
    pub window: Option<(i64, i64)>,
    /// Reason why the window is not proved.
    pub problem: String,
    /// Time when the freeze was over.
    pub ended: i64,
}

impl Freeze {
    /// Parses the report of a node.
    ///
    /// # Errors
    /// If the report is invalid; the text says why.
    pub fn told(request: AttachReceiptRequest) -> Result<Self, String> {
        let AttachReceiptRequest { envelope, frozen_from, frozen_until, problem, ended, .. } = request;
        let opened = open(&envelope, None, |key, message, signature| {
            signer(key, message, signature)
                .map_or(Check::Bad, |fingerprint| Check::Good(fingerprint.to_string()))
        });
        let receipt = match (opened.receipt, &opened.verdict) {
            (Some(receipt), Verdict::Signed(_) | Verdict::Unsigned) => receipt,
            (_, verdict) => return Err(format!("the receipt is {}: {}", verdict.word(), verdict.detail())),
        };
        let ended = ended.as_ref().and_then(micros).ok_or("the time at which the freeze ended is missing")?;
        let window = match (frozen_from, frozen_until) {
            (None, None) => None,
            (from, until) => {
                let both = from.as_ref().and_then(micros).zip(until.as_ref().and_then(micros));
                Some(both.filter(|(from, until)| from < until).ok_or("the window of the freeze is empty")?)
            }
        };
        let envelope = String::from_utf8(envelope).map_err(|_| "the receipt is not UTF-8")?;
        Ok(Self { receipt, envelope, window, problem, ended })
    }

    /// Estimates when the freeze was requested.
    fn begun(&self) -> i64 {
        let times = &self.receipt.times;
        let moments = [&times.asked, &times.frozen, &times.thaw_asked, &times.thawed];
        let moments = moments.into_iter().flatten().map(|moment| moment.boottime_ms);
        let (first, last) = (moments.clone().min(), moments.max());
        let took = first.zip(last).map_or(0, |(first, last)| last - first).saturating_mul(1000);
        self.ended.saturating_sub(i64::try_from(took).unwrap_or(i64::MAX))
    }

    /// Reports whether an object that was created at `made` may belong to this freeze; `before` is the time in
    /// microseconds by which it may precede the freeze.
    fn concerns(&self, made: Option<&Time>, before: i64) -> bool {
        // The API reports whole seconds.
        made.map(|time| time.0.as_microsecond()).is_some_and(|made| {
            made.saturating_add(1_000_000) >= self.begun().saturating_sub(before)
                && made <= self.ended.saturating_add(AFTER)
        })
    }
}

fn micros(time: &Timestamp) -> Option<i64> {
    time.seconds.checked_mul(1_000_000)?.checked_add(i64::from(time.nanos) / 1000)
}

/// Result of attaching a receipt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attached {
    /// Number of snapshots that were annotated.
    pub attached: u32,
    /// True if some snapshots have not been taken yet, or were changed by another program just now.
    pub pending: bool,
}

/// Annotates snapshots; clones share their state.
#[derive(Debug, Clone)]
pub struct Snapshots {
    cluster: Cluster,
    teller: Teller,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    places: Semaphore,
    /// Kinds that the cluster does not have, with the time when this was found.
    absent: Mutex<BTreeMap<String, Instant>>,
}

impl Snapshots {
    /// Creates the judge of the snapshots in a cluster.
    pub fn new(cluster: Cluster) -> Self {
        let teller = cluster.teller("snapshots cannot be read or annotated with their consistency");
        let shared = Shared { places: Semaphore::new(AT_A_TIME), absent: Mutex::default() };
        Self { cluster, teller, shared: Arc::new(shared) }
    }

    /// Checks the snapshots of a VM that may have been taken during a freeze, once. `lasting` is the UID of its
    /// VirtualMachine.
    ///
    /// # Errors
    /// If not all of them could be read or written.
    pub async fn attach(
        &self,
        instance: &Instance,
        lasting: &str,
        freeze: &Freeze,
    ) -> Result<Attached, VolumeError> {
        let _place = self.shared.places.acquire().await;
        let outcome = self.look(instance, lasting, freeze).await;
        match &outcome {
            Ok(_) => self.teller.well(),
            Err(error) => self.teller.failed(&error.to_string()),
        }
        outcome
    }

    async fn look(
        &self,
        instance: &Instance,
        lasting: &str,
        freeze: &Freeze,
    ) -> Result<Attached, VolumeError> {
        let (name, namespace) = (instance.metadata.name.as_deref(), instance.metadata.namespace.as_deref());
        let (name, namespace) = (name.unwrap_or_default(), namespace.unwrap_or_default());
        let disks = disks(instance);
        let near = |one: &VolumeSnapshot| {
            disks.contains_key(one.claim())
                && freeze.concerns(one.metadata.creation_timestamp.as_ref(), CLAIM_BEFORE)
        };
        let is_its = |one: &VirtualMachineSnapshot| {
            let source = &one.spec.source;
            (source.kind.as_str(), source.name.as_str()) == ("VirtualMachine", name)
                && one.status.source_uid.eq_ignore_ascii_case(lasting)
                && one.status.phase != "Failed"
                && freeze.concerns(one.metadata.creation_timestamp.as_ref(), MACHINE_BEFORE)
        };
        let of_vm = self.list::<VirtualMachineSnapshot>(namespace, is_its).await?;
        let of_claims = self.list::<VolumeSnapshot>(namespace, near).await?;
        let mut done = Attached::default();
        let mut cuts = Vec::new();
        for snapshot in of_claims {
            if !self.is_of_claim(namespace, &snapshot).await? {
                continue;
            }
            let cut = self.cut(&snapshot).await?;
            done.pending |= cut.is_none() && snapshot.status.error.is_none();
            if cut.is_none_or(|cut| cut.most >= freeze.begun()) {
                cuts.push((snapshot, cut));
            }
        }
        let mut problem = None;
        for machine in of_vm {
            let status = &machine.status;
            let cut = status.creation_time.as_deref().and_then(Cut::of_text);
            if cut.is_none() && status.phase != "Succeeded" {
                done.pending = true;
                continue;
            }
            if cut.is_some_and(|cut| cut.most < freeze.begun()) {
                continue;
            }
            let parts = cuts.iter().filter(|(snapshot, _)| snapshot.is_of(&machine));
            let parts: Vec<_> = parts.map(|(one, cut)| Part { claim: one.claim(), cut: *cut }).collect();
            let worth = of_machine(freeze, &machine, instance, &parts);
            done.count(self.say(&machine, freeze, &worth).await, &mut problem);
        }
        for (snapshot, cut) in &cuts {
            let (Some(cut), Some(disk)) = (cut, disks.get(snapshot.claim())) else { continue };
            let worth = of_claim(freeze, *cut, instance, disk);
            done.count(self.say(snapshot, freeze, &worth).await, &mut problem);
        }
        problem.map_or(Ok(done), Err)
    }

    /// Lists the wanted objects of a namespace; empty if the cluster does not have the kind.
    async fn list<K>(&self, namespace: &str, wanted: impl Fn(&K) -> bool) -> Result<Vec<K>, VolumeError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned,
    {
        let kind = K::plural(&()).into_owned();
        let absent = || self.shared.absent.lock().unwrap_or_else(PoisonError::into_inner);
        if absent().get(&kind).is_some_and(|since| since.elapsed() < ABSENT) {
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        let take = |one: K| {
            if all.len() < MOST && wanted(&one) {
                all.push(one);
            }
        };
        let client = self.cluster.client();
        match lists::each::<K, K>(&client, Some(namespace), PAGE, take).await {
            Ok(()) => Ok(all),
            Err(Failed::Answered(error)) if code(&error) == Some(404) => {
                absent().insert(kind, Instant::now());
                Ok(Vec::new())
            }
            Err(failed) => Err(unanswered(&format!("list the {kind} of the namespace {namespace}"), &failed)),
        }
    }

    /// Reports whether the claim with this name is still the one of which the snapshot was requested.
    async fn is_of_claim(&self, namespace: &str, snapshot: &VolumeSnapshot) -> Result<bool, VolumeError> {
        let claim = Claim { namespace: namespace.to_owned(), name: snapshot.claim().to_owned() };
        let made = |metadata: &ObjectMeta| metadata.creation_timestamp.as_ref().map(|time| time.0);
        let claim = self.cluster.claim(&claim).await?;
        let both = claim.and_then(|claim| made(&claim.metadata)).zip(made(&snapshot.metadata));
        Ok(both.is_some_and(|(claim, snapshot)| claim <= snapshot))
    }

    /// Returns the interval in which a snapshot was taken; `None` before it is known.
    async fn cut(&self, snapshot: &VolumeSnapshot) -> Result<Option<Cut>, VolumeError> {
        let status = &snapshot.status;
        let Some(about) = status.creation_time.as_deref().and_then(Cut::of_text) else { return Ok(None) };
        let content = status.bound_volume_snapshot_content_name.as_deref().filter(|name| is_subdomain(name));
        let Some(content) = content else { return Ok(Some(about)) };
        let what = format!("read the VolumeSnapshotContent {content}");
        let path = format!("/apis/{OF_CLAIMS}/v1/volumesnapshotcontents/{content}");
        let request = Request::get(path).body(Vec::new());
        let request = request.map_err(|error| VolumeError::Unavailable(format!("cannot {what}: {error}")))?;
        let client = self.cluster.client();
        let read = in_time(&what, client.request::<VolumeSnapshotContent>(request)).await?;
        let exact = found(read, &what)?.and_then(|content| {
            let is_its = content.spec.volume_snapshot_ref.uid == snapshot.metadata.uid;
            content.status.creation_time.filter(|_| is_its).map(Cut::of_nanoseconds)
        });
        let is_within = |exact: &Cut| about.least <= exact.least && exact.most <= about.most;
        Ok(Some(exact.filter(is_within).unwrap_or(about)))
    }

    /// Annotates a snapshot with its level, unless its annotations need no change.
    async fn say<K>(&self, snapshot: &K, freeze: &Freeze, worth: &Worth) -> Result<Written, VolumeError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        let metadata = snapshot.meta();
        let id = freeze.receipt.id.as_str();
        if stands(metadata, id, worth) {
            return Ok(Written::Yes);
        }
        let name = metadata.name.as_deref().unwrap_or_default();
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let envelope = Some(&freeze.envelope).filter(|envelope| envelope.len() <= MOST_BYTES);
        let why = Some(&worth.why).filter(|why| !why.is_empty());
        let patch = json!({"metadata": {
            "annotations": {RECEIPT: id, LEVEL: worth.level.word(), WHY: why, ENVELOPE: envelope},
            // Preconditions: the API server refuses the change if the object was replaced or modified.
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
        }});
        let kind = K::kind(&());
        let what = format!("annotate the {kind} {namespace}/{name} with its consistency");
        let snapshots = Api::<K>::namespaced(self.cluster.client(), namespace);
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = snapshots.patch(name, &parameters, &patch);
        let outcome = written(self.cluster.alter(&what, patched).await?.map(drop), &what)?;
        if outcome == Written::Yes {
            let (level, why) = (worth.level.word(), &worth.why);
            tracing::info!(receipt = id, level, why, "{kind} {namespace}/{name}");
        }
        Ok(outcome)
    }
}

impl Attached {
    /// Counts the outcome for one snapshot.
    fn count(&mut self, outcome: Result<Written, VolumeError>, problem: &mut Option<VolumeError>) {
        match outcome {
            Ok(Written::Yes) => self.attached += 1,
            Ok(Written::Conflict) => self.pending = true,
            Ok(Written::Gone) => {}
            Err(error) => *problem = Some(error),
        }
    }
}

/// Returns the disks of a VM that are claims, by claim name.
fn disks(instance: &Instance) -> BTreeMap<&str, &Disk> {
    let disks = &instance.spec.domain.devices.disks;
    let named = |name: &str| disks.iter().find(|disk| disk.name == name);
    let volumes = &instance.spec.volumes;
    volumes.iter().filter_map(|volume| Some((volume.claim()?, named(&volume.name)?))).collect()
}

/// Reports whether the annotations of a snapshot need no change: they come from this receipt, show at least the
/// same level from another receipt, or were written by another program.
fn stands(metadata: &ObjectMeta, id: &str, worth: &Worth) -> bool {
    let say = |key| metadata.annotations.as_ref()?.get(key).map(String::as_str);
    match (say(RECEIPT), say(LEVEL)) {
        (None, None) => false,
        (Some(known), level) if known == id => {
            level == Some(worth.level.word()) && say(WHY).unwrap_or_default() == worth.why
        }
        (_, level) => level.and_then(Level::named).is_none_or(|known| worth.level <= known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receipt::envelope::seal;
    use crate::receipt::{Moment, Times};

    fn worth(level: Level) -> Worth {
        Worth { level, why: "why".to_owned() }
    }

    #[test]
    fn only_a_higher_level_takes_the_place_of_another_receipts() {
        let says = |pairs: &[(&str, &str)]| {
            let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            ObjectMeta { annotations: Some(annotations.collect()), ..ObjectMeta::default() }
        };
        let own = says(&[(RECEIPT, "a"), (LEVEL, "filesystem"), (WHY, "why")]);
        assert!(stands(&own, "a", &worth(Level::FileSystem)));
        assert!(!stands(&own, "a", &worth(Level::Crash)), "it is known better by now");
        assert!(stands(&own, "b", &worth(Level::Crash)) && stands(&own, "b", &worth(Level::FileSystem)));
        assert!(!stands(&own, "b", &worth(Level::Application)));
        assert!(!stands(&ObjectMeta::default(), "a", &worth(Level::Crash)));
        // Annotations of another program are left alone.
        let foreign = says(&[(LEVEL, "best")]);
        assert!(stands(&foreign, "a", &worth(Level::Application)));
    }

    #[test]
    fn what_a_node_tells_is_checked() {
        let at = |boottime_ms| Some(Moment { boottime_ms, time: String::new() });
        let times = Times { asked: at(1000), thawed: at(4000), ..Times::default() };
        let envelope =
            seal(Receipt { id: "a".to_owned(), times, ..Receipt::default() }, |_| None).into_bytes();
        let time = |seconds| Some(Timestamp { seconds, nanos: 0 });
        let request = AttachReceiptRequest {
            envelope,
            frozen_from: time(98),
            frozen_until: time(99),
            ended: time(100),
            ..AttachReceiptRequest::default()
        };
        let freeze = Freeze::told(request.clone()).unwrap();
        assert_eq!((freeze.window, freeze.begun()), (Some((98_000_000, 99_000_000)), 97_000_000));
        let told = |change: fn(&mut AttachReceiptRequest)| {
            let mut request = request.clone();
            change(&mut request);
            Freeze::told(request).map(|freeze| freeze.window)
        };
        assert_eq!(told(|request| (request.frozen_from, request.frozen_until) = (None, None)), Ok(None));
        assert!(told(|request| request.frozen_until = None).is_err());
        assert!(told(|request| std::mem::swap(&mut request.frozen_from, &mut request.frozen_until)).is_err());
        assert!(told(|request| request.ended = None).is_err());
        assert!(told(|request| request.envelope.truncate(20)).unwrap_err().contains("unreadable"));
    }
}
