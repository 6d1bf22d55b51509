//! Harvester's NetworkFilesystem (`harvesterhci.io/v1beta1`): the fields that are read of it, and the decision
//! on the next step. Pure.
//!
//! ```text
//!  status.state   Disabled ──▶ Enabling ──▶ Enabled ──▶ Disabling ──▶ Disabled
//!                              endpoint moves: ▲ │
//!                                              └─┘ status.status: Reconciling or NotReady, then Ready
//! ```
//! Harvester acts first and writes the state afterwards, and that write is lost if the object has been changed
//! meanwhile. An object that is enabled again while its server is being removed stays `Enabling` or `Disabling`
//! indefinitely, and one that is disabled while its server is being started is served indefinitely. The desired
//! state is therefore changed only when Harvester has settled: to `Enabled` when the state is `Disabled`, and
//! to `Disabled` once it has begun. Objects that were left in between or make no progress ([`unstick`]) are set
//! to `Disabled`, from where progress is always possible.

use std::fmt;

use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer};

use crate::host::backends::kubevirt::objects::{or_default, resource};
use crate::host::backends::volumes::Export;

/// Namespace of all these objects.
pub const NAMESPACE: &str = "harvester-system";
/// Group and version of the kind.
pub const API: &str = "harvesterhci.io/v1beta1";
/// Annotation with the version of the claim for which the desired state was last written: each write differs.
pub const MARK: &str = "guestlet.io/claim-version";
/// Annotation with the identifier of the volume.
pub const VOLUME: &str = "guestlet.io/volume";

/// Object that requests an NFS server for a volume.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NetworkFilesystem {
    /// Metadata; the name is that of the PersistentVolume.
    pub metadata: ObjectMeta,
    /// Desired state.
    #[serde(default)]
    pub spec: Spec,
    /// Observed state.
    #[serde(default, deserialize_with = "or_default")]
    pub status: Status,
}

/// Desired state of a share.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Either `Enabled` or `Disabled`.
    #[serde(deserialize_with = "state")]
    pub desired_state: State,
}

/// Observed state of a share.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Address of the server; empty while there is none.
    #[serde(deserialize_with = "or_default")]
    pub endpoint: String,
    /// Progress of Harvester.
    #[serde(deserialize_with = "state")]
    pub state: State,
    /// Either `Ready`, or the reason why the endpoint is not ready.
    #[serde(rename = "status", deserialize_with = "or_default")]
    pub readiness: String,
    /// Mount options that Harvester recommends, from the storage class.
    #[serde(deserialize_with = "or_default")]
    pub mount_opts: String,
    /// Conditions that Harvester reports.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<Condition>,
}

/// Condition that Harvester reports.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Message for people.
    #[serde(deserialize_with = "or_default")]
    pub message: String,
}

/// States that are relevant here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are Harvester's words")]
pub enum State {
    Enabled,
    Enabling,
    Disabling,
    Disabled,
    /// No state yet, or an unknown one.
    #[default]
    Unknown,
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Enabled => "Enabled",
            Self::Enabling => "Enabling",
            Self::Disabling => "Disabling",
            Self::Disabled => "Disabled",
            Self::Unknown => "Unknown",
        })
    }
}

fn state<'d, D: Deserializer<'d>>(from: D) -> Result<State, D::Error> {
    let text: String = or_default(from)?;
    Ok(match text.as_str() {
        "Enabled" => State::Enabled,
        "Enabling" => State::Enabling,
        "Disabling" => State::Disabling,
        "Disabled" => State::Disabled,
        _ => State::Unknown,
    })
}

resource!(NetworkFilesystem, "NetworkFilesystem", "networkfilesystems", "harvesterhci.io", "v1beta1");

/// Next step for an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Create the object.
    Make,
    /// Set this desired state.
    Want(State),
    /// Wait for Harvester.
    Wait,
    /// No step is left.
    Done,
}

/// Returns the next step towards serving a share: [`Step::Done`] once it is served.
pub fn serve(object: Option<&NetworkFilesystem>) -> Step {
    let Some(object) = object else { return Step::Make };
    match (object.spec.desired_state, object.status.state) {
        _ if object.metadata.deletion_timestamp.is_some() => Step::Wait,
        (State::Enabled, State::Enabled) if object.is_ready() => Step::Done,
        (State::Enabled, State::Disabling) => Step::Want(State::Disabled),
        (State::Enabled, _) | (_, State::Disabling) | (State::Disabled, State::Enabled | State::Enabling) => {
            Step::Wait
        }
        _ => Step::Want(State::Enabled),
    }
}

/// Returns the next step towards ending a share: [`Step::Done`] once it is not served.
pub fn end(object: Option<&NetworkFilesystem>) -> Step {
    let Some(object) = object else { return Step::Done };
    match (object.spec.desired_state, object.status.state) {
        (State::Disabled, State::Disabled | State::Unknown) => Step::Done,
        (State::Disabled, _) | (State::Enabled, State::Disabled | State::Unknown) => Step::Wait,
        _ => Step::Want(State::Disabled),
    }
}

/// Returns the desired state that gets an object moving again after it has made no progress for a long time.
pub fn unstick(object: &NetworkFilesystem) -> Option<State> {
    let is_on_its_way = (object.spec.desired_state, object.status.state) != (State::Enabled, State::Enabled);
    (is_on_its_way && object.spec.desired_state == State::Enabled).then_some(State::Disabled)
}

impl NetworkFilesystem {
    fn is_ready(&self) -> bool {
        // The server keeps running while its volume is being expanded.
        matches!(self.status.readiness.as_str(), "Ready" | "Expanding") && !self.status.endpoint.is_empty()
    }

    /// Returns the name of the object.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns an annotation.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the export of the share.
    pub fn export(&self) -> Export {
        Export {
            server: self.status.endpoint.clone(),
            path: format!("/{}", self.name()),
            options: self.status.mount_opts.clone(),
        }
    }

    /// Describes the progress, for the host.
    pub fn words(&self) -> String {
        let Status { state, readiness, conditions, .. } = &self.status;
        let said = conditions.last().map(|last| last.message.as_str()).filter(|said| !said.is_empty());
        let said = said.map(|said| format!(": {said}")).unwrap_or_default();
        let (name, wanted) = (self.name(), self.spec.desired_state);
        format!("NetworkFilesystem {NAMESPACE}/{name} is wanted {wanted}, and is {state}, {readiness}{said}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(wanted: &str, state: &str, status: &str, endpoint: Option<&str>) -> NetworkFilesystem {
        serde_json::from_value(json!({
            "metadata": {"name": "pvc-1"},
            "spec": {"desiredState": wanted, "networkFSName": "pvc-1"},
            "status": {"state": state, "status": status, "endpoint": endpoint, "mountOpts": null},
        }))
        .unwrap()
    }

    #[test]
    fn what_is_next() {
        use State::{Disabled, Enabled};
        use Step::{Done, Make, Wait, Want};
        assert_eq!((serve(None), end(None)), (Make, Done));
        let address = Some("10.0.0.1");
        for (wanted, state, status, endpoint, to_serve, to_end) in [
            ("Disabled", "Disabled", "NotReady", None, Want(Enabled), Done),
            ("Disabled", "", "", None, Want(Enabled), Done),
            // Harvester may be about to serve it.
            ("Enabled", "", "", None, Wait, Wait),
            ("Enabled", "Disabled", "NotReady", None, Wait, Wait),
            ("Enabled", "Enabling", "NotReady", None, Wait, Want(Disabled)),
            ("Enabled", "Enabled", "Ready", address, Done, Want(Disabled)),
            ("Enabled", "Enabled", "Ready", None, Wait, Want(Disabled)),
            ("Enabled", "Enabled", "Reconciling", address, Wait, Want(Disabled)),
            ("Enabled", "Enabled", "Expanding", address, Done, Want(Disabled)),
            // Harvester may have removed the server without having written that yet.
            ("Disabled", "Enabled", "Ready", address, Wait, Wait),
            ("Disabled", "Enabling", "NotReady", None, Wait, Wait),
            // Not enabled again before it has ended; if it was, it is disabled again to make progress.
            ("Disabled", "Disabling", "Ready", address, Wait, Wait),
            ("Enabled", "Disabling", "Ready", address, Want(Disabled), Want(Disabled)),
            ("Expand", "Enabled", "Ready", address, Want(Enabled), Want(Disabled)),
        ] {
            let object = object(wanted, state, status, endpoint);
            let what = format!("{wanted} {state} {status}");
            assert_eq!((serve(Some(&object)), end(Some(&object))), (to_serve, to_end), "{what}");
        }
    }

    #[test]
    fn what_stands_still_is_begun_anew() {
        for (wanted, state, freed) in [
            ("Enabled", "Enabling", Some(State::Disabled)),
            ("Enabled", "Disabled", Some(State::Disabled)),
            ("Enabled", "", Some(State::Disabled)),
            ("Enabled", "Enabled", None),
            ("Disabled", "Enabling", None),
        ] {
            assert_eq!(unstick(&object(wanted, state, "NotReady", None)), freed, "{wanted} {state}");
        }
    }

    #[test]
    fn what_is_said_of_it() {
        let mut object = object("Enabled", "Enabled", "Ready", Some("10.0.0.1"));
        object.status.mount_opts = "vers=4.1".into();
        let export = Export { server: "10.0.0.1".into(), path: "/pvc-1".into(), options: "vers=4.1".into() };
        assert_eq!(object.export(), export);
        object.status.conditions = vec![Condition { message: "it is so".into() }];
        let words =
            "NetworkFilesystem harvester-system/pvc-1 is wanted Enabled, and is Enabled, Ready: it is so";
        assert_eq!(object.words(), words);
        let bare: NetworkFilesystem =
            serde_json::from_value(json!({"metadata": {}, "spec": {}, "status": null})).unwrap();
        assert_eq!(
            (serve(Some(&bare)), end(Some(&bare))),
            (Step::Want(State::Enabled), Step::Want(State::Disabled))
        );
    }
}
