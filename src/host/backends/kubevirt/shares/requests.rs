//! Requests to the API server about objects of the kind `NetworkFilesystem`.

use http::Method;
use kube::Error;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::json;

use super::object::{API, MARK, NAMESPACE, NetworkFilesystem, State, VOLUME};
use crate::host::backends::kubevirt::api::{
    Cluster, Written, code, found, in_time, json_request, unanswered, written,
};
use crate::host::backends::kubevirt::claims::OURS;
use crate::host::backends::volumes::VolumeError;
use crate::kubernetes::lists::{self, Failed, Selector};

/// Kind of the objects, for error texts.
const KIND: &str = "NetworkFilesystem";
/// Maximum number of objects in one page of a list.
const PAGE: u32 = 100;

impl Cluster {
    fn shares(&self) -> Api<NetworkFilesystem> {
        Api::namespaced(self.client(), NAMESPACE)
    }

    /// Reads the object of a PersistentVolume; `None` if it does not exist.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn share(&self, volume: &str) -> Result<Option<NetworkFilesystem>, VolumeError> {
        let what = format!("read the {KIND} {NAMESPACE}/{volume}");
        found(in_time(&what, self.shares().get(volume)).await?, &what)
    }

    /// Lists the objects that guestlet created.
    ///
    /// # Errors
    /// [`VolumeError::Refused`] if the host cluster does not have this kind, or denies access to it: an API server
    /// checks permissions first, and so gives the same answer for an unknown kind.
    pub async fn our_shares(&self) -> Result<Vec<NetworkFilesystem>, VolumeError> {
        let what = format!("list the {KIND}s of the namespace {NAMESPACE}");
        let ours = Selector { labels: Some(format!("{}={}", OURS.0, OURS.1)), ..Selector::default() };
        match lists::all(&self.shares(), &ours, PAGE).await {
            Ok(listed) => Ok(listed.all),
            Err(Failed::Answered(error)) if matches!(code(&error), Some(403 | 404)) => Err(unknown()),
            Err(failed) => Err(unanswered(&what, &failed)),
        }
    }

    /// Creates the object of a PersistentVolume, which requests that the share of a volume be served.
    ///
    /// # Errors
    /// If it cannot be created; [`VolumeError::Refused`] if the host cluster does not have this kind.
    pub async fn make_share(&self, volume: &str, id: &str, mark: &str) -> Result<Written, VolumeError> {
        let what = format!("create the {KIND} {NAMESPACE}/{volume}");
        let object = json!({
            "apiVersion": API,
            "kind": KIND,
            "metadata": {
                "name": volume,
                "namespace": NAMESPACE,
                "labels": {OURS.0: OURS.1},
                "annotations": {VOLUME: id, MARK: mark},
            },
            "spec": {"networkFSName": volume, "desiredState": State::Enabled.to_string()},
        });
        let path = format!("/apis/{API}/namespaces/{NAMESPACE}/networkfilesystems");
        let request = json_request(Method::POST, &path, &object, &what)?;
        match self.alter(&what, self.client().request_text(request)).await? {
            // A missing namespace means the same: only Harvester has it.
            Err(error) if code(&error) == Some(404) => Err(unknown()),
            outcome => written(outcome.map(drop), &what),
        }
    }

    /// Sets the desired state of an object, for this version of its claim, unless it has been changed since it was
    /// read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn want_share(
        &self,
        read: &NetworkFilesystem,
        wanted: State,
        mark: &str,
    ) -> Result<Written, VolumeError> {
        let name = read.name();
        let what = format!("change the {KIND} {NAMESPACE}/{name}");
        let patch = json!({
            "metadata": {
                "annotations": {MARK: mark},
                "uid": read.metadata.uid,
                "resourceVersion": read.metadata.resource_version,
            },
            "spec": {"desiredState": wanted.to_string()},
        });
        let shares = self.shares();
        let parameters = PatchParams::default();
        let patched = self.alter(&what, shares.patch(name, &parameters, &Patch::Merge(&patch))).await?;
        written(patched.map(drop), &what)
    }

    /// Deletes exactly the object that was read.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub async fn delete_share(&self, read: &NetworkFilesystem) -> Result<Written, VolumeError> {
        let what = format!("delete the {KIND} {NAMESPACE}/{}", read.name());
        let preconditions = Preconditions {
            uid: read.metadata.uid.clone(),
            resource_version: read.metadata.resource_version.clone(),
        };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let deleted: Result<_, Error> =
            self.alter(&what, self.shares().delete(read.name(), &parameters)).await?;
        written(deleted.map(drop), &what)
    }
}

/// Returns the error for a kind that does not exist or that may not be accessed.
fn unknown() -> VolumeError {
    VolumeError::Refused(format!(
        "the host cluster cannot serve a volume to many nodes: it has no {KIND} ({API}), which Harvester's \
         networkfs-manager installs, or the controller lacks the permission for it, which the manifests for \
         Harvester grant"
    ))
}
