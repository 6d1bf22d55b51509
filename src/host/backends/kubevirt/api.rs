//! What is read from the host cluster's API, and written to it. One function for each request; none remembers anything.
//!
//! Everything is read from the API server when it is asked for, since what follows from it may be that a disk is given to
//! somebody else. A request that fails says which, of what object, and what the API server said.

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{Method, Request};
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::authority::{self, Evidence};
use super::evidence::Reader;
use super::gates::{self, Way};
use super::hotplug::patch::Disk;
use super::hotplug::seen::Seen;
use super::names::Claim;
use super::objects::{Instance, KubeVirt, VirtualMachine};
use super::standing;
use crate::host::backends::Problems;
use crate::host::backends::volumes::VolumeError;
use crate::host::half::Half;
use crate::kubernetes::fence::{Closed, Fence};
use crate::kubernetes::lists::{self, Failed};
use crate::kubernetes::standing::Teller;
pub(super) use crate::kubernetes::{code, refusal, words};

/// How many events of an object are looked at.
const EVENTS: u32 = 500;
/// Characters of an event's text that are told.
const LONGEST_EVENT: usize = 300;

/// The API server.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    problems: watch::Sender<Problems>,
    half: Arc<Half>,
    /// Lets changes pass, where others may make them as well.
    fence: Option<Fence>,
    reader: Reader,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Cluster")
    }
}

impl From<Closed> for VolumeError {
    fn from(closed: Closed) -> Self {
        Self::Unavailable(format!("{closed}; repeat the call"))
    }
}

/// What became of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// It was made.
    Yes,
    /// Somebody has changed the object since it was read.
    Conflict,
    /// The object is not there any more.
    Gone,
}

/// What it means that `what` was not done: refused if somebody has said so, and else that it cannot be asked.
pub(super) fn failed(what: &str, error: &Error) -> VolumeError {
    match (error, code(error)) {
        // An admission webhook.
        (Error::Api(status), None) => refused(&status.message),
        _ => VolumeError::Unavailable(format!("cannot {what}: {}", words(error))),
    }
}

/// Why there is no answer.
pub(super) fn failed_words(failed: &Failed) -> String {
    match failed {
        Failed::Answered(error) => words(error),
        Failed::Late => failed.to_string(),
    }
}

/// A request for which kube has no words of its own.
pub(super) fn json_request(
    method: Method,
    path: &str,
    body: &Value,
    what: &str,
) -> Result<Request<Vec<u8>>, VolumeError> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(|error| VolumeError::Unavailable(format!("cannot {what}: {error}")))
}

pub(super) fn unanswered(what: &str, failed: &Failed) -> VolumeError {
    VolumeError::Unavailable(format!("cannot {what}: {}", failed_words(failed)))
}

/// The answer to a request about `what`, within the deadline.
async fn ask<T>(what: &str, request: impl Future<Output = Result<T, Error>>) -> Result<T, VolumeError> {
    lists::in_time(request).await.map_err(|failed| unanswered(what, &failed))
}

/// The same, where some refusals mean something.
pub(super) async fn in_time<T>(
    what: &str,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<Result<T, Error>, VolumeError> {
    match lists::in_time(request).await {
        Ok(answer) => Ok(Ok(answer)),
        Err(Failed::Answered(error)) => Ok(Err(error)),
        Err(failed) => Err(unanswered(what, &failed)),
    }
}

/// The host cluster does not do it, in these words.
fn refused(words: &str) -> VolumeError {
    VolumeError::Refused(format!("the host cluster refuses it: {words}"))
}

/// What it is if there is nothing of this name.
pub(super) fn found<T>(outcome: Result<T, Error>, what: &str) -> Result<Option<T>, VolumeError> {
    match outcome {
        Ok(object) => Ok(Some(object)),
        Err(error) if code(&error) == Some(404) => Ok(None),
        Err(error) => Err(failed(what, &error)),
    }
}

impl Cluster {
    /// The one that this client asks. What cannot be followed is told to `problems`, and counted by `half`.
    pub fn new(client: Client, problems: watch::Sender<Problems>, half: Arc<Half>) -> Self {
        let reader = Reader::new(client.clone());
        Self { client, problems, half, fence: None, reader }
    }

    /// The same, which is changed only as long as the fence is open.
    #[must_use]
    pub fn behind(self, fence: Fence) -> Self {
        Self { fence: Some(fence), ..self }
    }

    /// Whether changes may be made now.
    pub fn is_changeable(&self) -> bool {
        self.fence.as_ref().is_none_or(Fence::is_open)
    }

    /// What comes of a change, if it may be made.
    pub(super) async fn alter<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<Result<T, Error>, VolumeError> {
        match &self.fence {
            None => in_time(what, request).await,
            Some(fence) => fence.change(in_time(what, request)).await,
        }
    }

    /// Tells how it goes with what is followed; `what` is said when it fails.
    pub fn teller(&self, what: &'static str) -> Teller {
        standing::teller(what, self.problems.clone(), Arc::clone(&self.half))
    }

    /// For what is watched.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn vms(&self, namespace: &str) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// A claim, if it is there.
    ///
    /// # Errors
    /// If that cannot be told.
    pub async fn claim(&self, claim: &Claim) -> Result<Option<PersistentVolumeClaim>, VolumeError> {
        let what = format!("read the claim {}/{}", claim.namespace, claim.name);
        let outcome = in_time(&what, self.claims(&claim.namespace).get(&claim.name)).await?;
        found(outcome, &what)
    }

    /// Makes a claim; none if there is one of this name already.
    ///
    /// # Errors
    /// If it cannot be made.
    pub async fn make(
        &self,
        namespace: &str,
        claim: &PersistentVolumeClaim,
    ) -> Result<Option<PersistentVolumeClaim>, VolumeError> {
        let what = format!("make a claim in the namespace {namespace}");
        let made = self.alter(&what, self.claims(namespace).create(&PostParams::default(), claim)).await?;
        match made {
            Ok(made) => Ok(Some(made)),
            Err(error) if code(&error) == Some(409) => Ok(None),
            // A ResourceQuota, or an admission policy; or the namespace is going.
            Err(error) if code(&error) == Some(403) && words(&error).contains("exceeded quota") => Err(
                VolumeError::Full(format!("the host cluster has no space left for it: {}", words(&error))),
            ),
            Err(error) => Err(failed(&what, &error)),
        }
    }

    /// Deletes the very claim that was read. It is there until nothing uses it any more.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub async fn delete(&self, claim: &Claim, read: &PersistentVolumeClaim) -> Result<Written, VolumeError> {
        let what = format!("delete the claim {}/{}", claim.namespace, claim.name);
        let preconditions = Preconditions {
            uid: read.metadata.uid.clone(),
            resource_version: read.metadata.resource_version.clone(),
        };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let deleted =
            self.alter(&what, self.claims(&claim.namespace).delete(&claim.name, &parameters)).await?;
        written(deleted.map(drop), &what)
    }

    /// Writes an annotation of a claim, or takes it away, unless the claim has changed since it was read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn annotate(
        &self,
        claim: &Claim,
        read: &PersistentVolumeClaim,
        (key, text): (&str, Option<String>),
    ) -> Result<Written, VolumeError> {
        let patch = json!({"metadata": {
            "annotations": {key: text},
            // With these, the change is refused if the object is another one, or not as it was.
            "uid": read.metadata.uid,
            "resourceVersion": read.metadata.resource_version,
        }});
        self.merge(claim, &patch).await
    }

    /// Asks for more bytes.
    ///
    /// # Errors
    /// If the claim cannot be made larger.
    pub async fn resize(&self, claim: &Claim, bytes: u64) -> Result<Written, VolumeError> {
        let patch = json!({"spec": {"resources": {"requests": {"storage": bytes.to_string()}}}});
        self.merge(claim, &patch).await
    }

    async fn merge(&self, claim: &Claim, patch: &Value) -> Result<Written, VolumeError> {
        let what = format!("change the claim {}/{}", claim.namespace, claim.name);
        let claims = self.claims(&claim.namespace);
        let parameters = PatchParams::default();
        let patched = self.alter(&what, claims.patch(&claim.name, &parameters, &Patch::Merge(patch))).await?;
        match patched.as_ref().err().and_then(refusal) {
            Some(words) => Err(refused(words)),
            None => written(patched.map(drop), &what),
        }
    }

    /// A VM and its run, if the VM is there.
    ///
    /// # Errors
    /// If that cannot be told.
    pub async fn seen(&self, namespace: &str, name: &str) -> Result<Option<Seen>, VolumeError> {
        let what = format!("read the VirtualMachine {namespace}/{name}");
        let Some(vm) = found(in_time(&what, self.vms(namespace).get(name)).await?, &what)? else {
            return Ok(None);
        };
        let what = format!("read the VirtualMachineInstance {namespace}/{name}");
        let instances = Api::<Instance>::namespaced(self.client.clone(), namespace);
        let instance = found(in_time(&what, instances.get(name)).await?, &what)?;
        // One of this name that is not the VM's keeps it from running.
        let is_its = |one: &Instance| authority::lasting(one) == vm.metadata.uid;
        Ok(Some(Seen { instance: instance.filter(is_its), vm, way: None }))
    }

    /// The same, which tells also what a run has that its VM does not list.
    ///
    /// # Errors
    /// If any of it cannot be told.
    pub async fn seen_in_full(&self, namespace: &str, name: &str) -> Result<Option<Seen>, VolumeError> {
        let way = match self.way().await {
            Ok(way) => Some(way),
            // It cannot plug anything as things are.
            Err(VolumeError::Refused(_)) => None,
            Err(error) => return Err(error),
        };
        Ok(self.seen(namespace, name).await?.map(|seen| Seen { way, ..seen }))
    }

    /// Whether there is a VM of this name, or a run of one, that this UID means.
    ///
    /// # Errors
    /// If that cannot be told.
    pub async fn has_vm(&self, namespace: &str, name: &str, uid: &str) -> Result<bool, VolumeError> {
        let is_it = |one: Option<String>| one.is_some_and(|one| one.eq_ignore_ascii_case(uid));
        let what = format!("read the VirtualMachine {namespace}/{name}");
        let vm = found(in_time(&what, self.vms(namespace).get(name)).await?, &what)?;
        if is_it(vm.and_then(|vm| vm.metadata.uid)) {
            return Ok(true);
        }
        let what = format!("read the VirtualMachineInstance {namespace}/{name}");
        let instances = Api::<Instance>::namespaced(self.client.clone(), namespace);
        let instance = found(in_time(&what, instances.get(name)).await?, &what)?;
        Ok(is_it(instance.and_then(|instance| authority::lasting(&instance))))
    }

    /// Changes a VM as a JSON patch says that tests the version that was `read`.
    ///
    /// # Errors
    /// If KubeVirt refuses it, in its words, or it cannot be asked.
    pub async fn change(&self, read: &VirtualMachine, steps: Value) -> Result<Written, VolumeError> {
        let (namespace, name) = of(read);
        let what = format!("change the VirtualMachine {namespace}/{name}");
        let steps = serde_json::from_value(steps)
            .map_err(|error| VolumeError::Unavailable(format!("cannot {what}: {error}")))?;
        let vms = self.vms(namespace);
        let parameters = PatchParams::default();
        let patched = self.alter(&what, vms.patch(name, &parameters, &Patch::<()>::Json(steps))).await?;
        // Of a patch whose test fails, too.
        match patched.as_ref().err().and_then(refusal) {
            Some(words) => self.changed_or_refused(read, words, &what).await,
            None => written(patched.map(drop), &what),
        }
    }

    /// What became of a change that was refused in these words: if the VM is not as it was `read`, that may be why.
    async fn changed_or_refused(
        &self,
        read: &VirtualMachine,
        words: &str,
        what: &str,
    ) -> Result<Written, VolumeError> {
        let (namespace, name) = of(read);
        match found(in_time(what, self.vms(namespace).get(name)).await?, what)? {
            None => Ok(Written::Gone),
            Some(now) if now.metadata.resource_version != read.metadata.resource_version => {
                Ok(Written::Conflict)
            }
            Some(_) => Err(VolumeError::Refused(format!("KubeVirt refuses it: {words}"))),
        }
    }

    /// Asks KubeVirt to plug a disk into a VM. Success if it was asked before.
    ///
    /// # Errors
    /// If KubeVirt refuses it, in its words, or it cannot be asked.
    pub async fn add_volume(&self, vm: &VirtualMachine, disk: &Disk) -> Result<Written, VolumeError> {
        let name = disk.volume();
        let body = json!({"name": name, "disk": disk.device(), "volumeSource": disk.source()});
        self.subresource(vm, "addvolume", &body).await
    }

    /// Asks KubeVirt to unplug the disk of this name from a VM. Success if it was asked before.
    ///
    /// # Errors
    /// If KubeVirt refuses it, in its words, or it cannot be asked.
    pub async fn remove_volume(&self, vm: &VirtualMachine, name: &str) -> Result<Written, VolumeError> {
        self.subresource(vm, "removevolume", &json!({"name": name})).await
    }

    async fn subresource(
        &self,
        vm: &VirtualMachine,
        verb: &str,
        body: &Value,
    ) -> Result<Written, VolumeError> {
        let (namespace, name) = of(vm);
        let what = format!("ask KubeVirt for {verb} of the VirtualMachine {namespace}/{name}");
        let path =
            format!("/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{name}/{verb}");
        let request = json_request(Method::PUT, &path, body, &what)?;
        match self.alter(&what, self.client.request_text(request)).await? {
            Ok(_) => Ok(Written::Yes),
            Err(error) if code(&error) == Some(404) => Ok(Written::Gone),
            // It has the volume already, or not any more, or is being asked; or somebody else was faster.
            Err(Error::Api(status)) if matches!(status.code, 400 | 409 | 422) => {
                self.changed_or_refused(vm, &status.message, &what).await
            }
            Err(error) => Err(failed(&what, &error)),
        }
    }

    /// How KubeVirt is told to plug a disk.
    ///
    /// # Errors
    /// If it cannot plug any, with what to do about it, or that cannot be told.
    pub async fn way(&self) -> Result<Way, VolumeError> {
        let what = "read the KubeVirt object";
        let installed =
            ask(what, Api::<KubeVirt>::all(self.client.clone()).list(&ListParams::default())).await?;
        gates::way(&installed.items).map_err(VolumeError::Refused)
    }

    /// What there is to tell who holds a claim, whose PersistentVolume is of this name.
    ///
    /// # Errors
    /// If any of it cannot be read.
    pub async fn evidence(&self, claim: &Claim, volume: Option<&str>) -> Result<Evidence, VolumeError> {
        self.reader.evidence(claim, volume).await.map_err(VolumeError::Unavailable)
    }

    /// The last warning of the events of an object, if there is one: why it does not get on.
    pub async fn warning(&self, namespace: &str, kind: &str, name: &str) -> Option<String> {
        let events = Api::<Event>::namespaced(self.client.clone(), namespace);
        let fields = format!("involvedObject.kind={kind},involvedObject.name={name},type=Warning");
        let parameters = ListParams::default().fields(&fields).limit(EVENTS);
        let listed = lists::in_time(events.list(&parameters)).await.ok()?;
        let time = |event: &Event| event.last_timestamp.as_ref().map(|time| time.0);
        let last = listed.items.into_iter().max_by_key(time)?;
        let text: String = last.message?.chars().take(LONGEST_EVENT).collect();
        Some(format!("{}: {text}", last.reason.unwrap_or_default()))
    }
}

pub(super) fn written(outcome: Result<(), Error>, what: &str) -> Result<Written, VolumeError> {
    match outcome {
        Ok(()) => Ok(Written::Yes),
        Err(error) if code(&error) == Some(409) => Ok(Written::Conflict),
        Err(error) if code(&error) == Some(404) => Ok(Written::Gone),
        Err(error) => Err(failed(what, &error)),
    }
}

/// Where a VM is.
fn of(vm: &VirtualMachine) -> (&str, &str) {
    (vm.metadata.namespace.as_deref().unwrap_or_default(), vm.metadata.name.as_deref().unwrap_or_default())
}
