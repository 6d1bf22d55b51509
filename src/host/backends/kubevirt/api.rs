//! Reads and writes objects through the API of the host cluster: one function per request, none of which keeps
//! any state.
//!
//! Every read goes to the API server at the time of the call, because the result may decide that a disk is
//! given to another VM. The error of a failed request names the request, the object, and the API server's
//! message.

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

/// Maximum number of events of an object that are read.
const EVENTS: u32 = 500;
/// Maximum length, in characters, of an event's text in an error.
const LONGEST_EVENT: usize = 300;

/// Client of the host cluster's API server.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    problems: watch::Sender<Problems>,
    half: Arc<Half>,
    /// Fence that blocks changes while another replica may make them; `None` if there are no others.
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

/// Outcome of a conditional change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The change was made.
    Yes,
    /// The object has been changed since it was read.
    Conflict,
    /// The object no longer exists.
    Gone,
}

/// Returns the error for a failed `what`: refused if an admission webhook denied it, unavailable otherwise.
pub(super) fn failed(what: &str, error: &Error) -> VolumeError {
    match (error, code(error)) {
        // Denied by an admission webhook.
        (Error::Api(status), None) => refused(&status.message),
        _ => VolumeError::Unavailable(format!("cannot {what}: {}", words(error))),
    }
}

/// Describes why a request has no usable answer.
pub(super) fn failed_words(failed: &Failed) -> String {
    match failed {
        Failed::Answered(error) => words(error),
        Failed::Late => failed.to_string(),
    }
}

/// Builds a request for which the kube crate has no function.
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

/// Returns the answer to a request within the deadline; `what` describes the request in errors.
async fn ask<T>(what: &str, request: impl Future<Output = Result<T, Error>>) -> Result<T, VolumeError> {
    lists::in_time(request).await.map_err(|failed| unanswered(what, &failed))
}

/// Returns the same, but leaves refusals by the API server to the caller.
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

/// Returns the error for a refusal by the host cluster with this message.
fn refused(words: &str) -> VolumeError {
    VolumeError::Refused(format!("the host cluster refuses it: {words}"))
}

/// Turns a missing object (404) into `None`, and any other failure into an error.
pub(super) fn found<T>(outcome: Result<T, Error>, what: &str) -> Result<Option<T>, VolumeError> {
    match outcome {
        Ok(object) => Ok(Some(object)),
        Err(error) if code(&error) == Some(404) => Ok(None),
        Err(error) => Err(failed(what, &error)),
    }
}

impl Cluster {
    /// Creates a client for the host cluster. Watches that fail are reported to `problems`, and counted in the
    /// metrics of `half`.
    pub fn new(client: Client, problems: watch::Sender<Problems>, half: Arc<Half>) -> Self {
        let reader = Reader::new(client.clone());
        Self { client, problems, half, fence: None, reader }
    }

    /// Returns a copy that makes changes only while the fence is open.
    #[must_use]
    pub fn behind(self, fence: Fence) -> Self {
        Self { fence: Some(fence), ..self }
    }

    /// Reports whether this process may make changes at present.
    pub fn is_changeable(&self) -> bool {
        self.fence.as_ref().is_none_or(Fence::is_open)
    }

    /// Makes a change, if this process may make changes at present.
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

    /// Creates a reporter of the state of a watch; `what` is reported when it fails.
    pub fn teller(&self, what: &'static str) -> Teller {
        standing::teller(what, self.problems.clone(), Arc::clone(&self.half))
    }

    /// Returns the client, for watches.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn vms(&self, namespace: &str) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Reads a claim; `None` if it does not exist.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn claim(&self, claim: &Claim) -> Result<Option<PersistentVolumeClaim>, VolumeError> {
        let what = format!("read the claim {}/{}", claim.namespace, claim.name);
        let outcome = in_time(&what, self.claims(&claim.namespace).get(&claim.name)).await?;
        found(outcome, &what)
    }

    /// Creates a claim; `None` if one with this name already exists.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn make(
        &self,
        namespace: &str,
        claim: &PersistentVolumeClaim,
    ) -> Result<Option<PersistentVolumeClaim>, VolumeError> {
        let what = format!("create a claim in the namespace {namespace}");
        let made = self.alter(&what, self.claims(namespace).create(&PostParams::default(), claim)).await?;
        match made {
            Ok(made) => Ok(Some(made)),
            Err(error) if code(&error) == Some(409) => Ok(None),
            // A ResourceQuota or an admission policy refused it, or the namespace is being deleted.
            Err(error) if code(&error) == Some(403) && words(&error).contains("exceeded quota") => Err(
                VolumeError::Full(format!("the host cluster has no space left for it: {}", words(&error))),
            ),
            Err(error) => Err(failed(&what, &error)),
        }
    }

    /// Deletes exactly the claim that was read: the UID is a precondition. The object remains until nothing uses it
    /// any longer.
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

    /// Sets or removes an annotation of a claim, unless the claim has been changed since it was read.
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
            // Preconditions: the API server refuses the change if the object was replaced or modified.
            "uid": read.metadata.uid,
            "resourceVersion": read.metadata.resource_version,
        }});
        self.merge(claim, &patch).await
    }

    /// Requests a larger size in bytes.
    ///
    /// # Errors
    /// If the claim cannot be expanded.
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

    /// Reads a VM and its run; `None` if the VM does not exist.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn seen(&self, namespace: &str, name: &str) -> Result<Option<Seen>, VolumeError> {
        let what = format!("read the VirtualMachine {namespace}/{name}");
        let Some(vm) = found(in_time(&what, self.vms(namespace).get(name)).await?, &what)? else {
            return Ok(None);
        };
        let what = format!("read the VirtualMachineInstance {namespace}/{name}");
        let instances = Api::<Instance>::namespaced(self.client.clone(), namespace);
        let instance = found(in_time(&what, instances.get(name)).await?, &what)?;
        // An instance with this name that is not the VM's own keeps the VM from running.
        let is_its = |one: &Instance| authority::lasting(one) == vm.metadata.uid;
        Ok(Some(Seen { instance: instance.filter(is_its), vm, way: None }))
    }

    /// Reads the same, and also determines what becomes of volumes that the run has but the VM does not list.
    ///
    /// # Errors
    /// If any of it cannot be read.
    pub async fn seen_in_full(&self, namespace: &str, name: &str) -> Result<Option<Seen>, VolumeError> {
        let way = match self.way().await {
            Ok(way) => Some(way),
            // KubeVirt cannot hot-plug in its present configuration.
            Err(VolumeError::Refused(_)) => None,
            Err(error) => return Err(error),
        };
        Ok(self.seen(namespace, name).await?.map(|seen| Seen { way, ..seen }))
    }

    /// Reports whether a VM with this name, or a run of one, has this UID.
    ///
    /// # Errors
    /// If they cannot be read.
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

    /// Applies a JSON patch to a VM. The patch tests that the VM is still in the version that was `read`.
    ///
    /// # Errors
    /// If KubeVirt refuses it, with its message, or cannot be reached.
    pub async fn change(&self, read: &VirtualMachine, steps: Value) -> Result<Written, VolumeError> {
        let (namespace, name) = of(read);
        let what = format!("change the VirtualMachine {namespace}/{name}");
        let steps = serde_json::from_value(steps)
            .map_err(|error| VolumeError::Unavailable(format!("cannot {what}: {error}")))?;
        let vms = self.vms(namespace);
        let parameters = PatchParams::default();
        let patched = self.alter(&what, vms.patch(name, &parameters, &Patch::<()>::Json(steps))).await?;
        // This includes a JSON patch whose `test` operation fails.
        match patched.as_ref().err().and_then(refusal) {
            Some(words) => self.changed_or_refused(read, words, &what).await,
            None => written(patched.map(drop), &what),
        }
    }

    /// Decides the outcome of a change that was refused with this message: a conflict if the VM has changed since
    /// it was `read`, a refusal otherwise.
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

    /// Requests from KubeVirt that a disk be plugged into a VM. Succeeds if this was requested before.
    ///
    /// # Errors
    /// If KubeVirt refuses it, with its message, or cannot be reached.
    pub async fn add_volume(&self, vm: &VirtualMachine, disk: &Disk) -> Result<Written, VolumeError> {
        let name = disk.volume();
        let body = json!({"name": name, "disk": disk.device(), "volumeSource": disk.source()});
        self.subresource(vm, "addvolume", &body).await
    }

    /// Requests from KubeVirt that the disk with this name be unplugged. Succeeds if this was requested before.
    ///
    /// # Errors
    /// If KubeVirt refuses it, with its message, or cannot be reached.
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
            // The VM already has the volume, or no longer has it, or an earlier request is pending, or another client was
            // faster.
            Err(Error::Api(status)) if matches!(status.code, 400 | 409 | 422) => {
                self.changed_or_refused(vm, &status.message, &what).await
            }
            Err(error) => Err(failed(&what, &error)),
        }
    }

    /// Returns the interface through which KubeVirt hot-plugs disks.
    ///
    /// # Errors
    /// If it cannot hot-plug at all, with advice, or if this cannot be determined.
    pub async fn way(&self) -> Result<Way, VolumeError> {
        let what = "read the KubeVirt object";
        let installed =
            ask(what, Api::<KubeVirt>::all(self.client.clone()).list(&ListParams::default())).await?;
        gates::way(&installed.items).map_err(VolumeError::Refused)
    }

    /// Reads the evidence for the holder of a claim; `volume` is the name of its PersistentVolume.
    ///
    /// # Errors
    /// If any of it cannot be read.
    pub async fn evidence(&self, claim: &Claim, volume: Option<&str>) -> Result<Evidence, VolumeError> {
        self.reader.evidence(claim, volume).await.map_err(VolumeError::Unavailable)
    }

    /// Returns the most recent warning event of an object, if there is one, as the reason why it makes no progress.
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

/// Returns the namespace and name of a VM.
fn of(vm: &VirtualMachine) -> (&str, &str) {
    (vm.metadata.namespace.as_deref().unwrap_or_default(), vm.metadata.name.as_deref().unwrap_or_default())
}
