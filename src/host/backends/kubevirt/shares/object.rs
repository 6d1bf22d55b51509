//! Harvester's NetworkFilesystem (`harvesterhci.io/v1beta1`): what is read of it, and what is next. Pure.
//!
//! ```text
//!  status.state   Disabled ──▶ Enabling ──▶ Enabled ──▶ Disabling ──▶ Disabled
//!                              endpoint moves: ▲ │
//!                                              └─┘ status.status: Reconciling or NotReady, then Ready
//! ```
//! Harvester acts first and writes the state after that, and what it writes is lost if somebody has changed the object meanwhile.
//! One that is wanted again while what serves it is being taken away stays `Enabling` or `Disabling` for ever, and one that is no
//! more wanted while that begins is served for ever. So what is wanted is turned only where Harvester has come to: to `Enabled` at
//! `Disabled`, and to `Disabled` where it has begun. What somebody has left in between, or stands still ([`unstick`]), is wanted
//! `Disabled`, which always leads on.

use std::fmt;

use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer};

use crate::host::backends::kubevirt::objects::{or_default, resource};
use crate::host::backends::volumes::Export;

/// Where Harvester has all of them.
pub const NAMESPACE: &str = "harvester-system";
/// Its group and version.
pub const API: &str = "harvesterhci.io/v1beta1";
/// The annotation that says for which version of its claim an object was wanted last: it differs each time.
pub const MARK: &str = "guestlet.io/claim-version";
/// The annotation with the identifier of the volume.
pub const VOLUME: &str = "guestlet.io/volume";

/// A volume that may be served by NFS.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NetworkFilesystem {
    /// Its name is that of the PersistentVolume.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(default)]
    pub spec: Spec,
    /// How it is.
    #[serde(default, deserialize_with = "or_default")]
    pub status: Status,
}

/// What is wanted of it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// `Enabled` or `Disabled`.
    #[serde(deserialize_with = "state")]
    pub desired_state: State,
}

/// How it is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// The server's address; empty while there is none.
    #[serde(deserialize_with = "or_default")]
    pub endpoint: String,
    /// How far Harvester is.
    #[serde(deserialize_with = "state")]
    pub state: State,
    /// `Ready`, or why the endpoint is not.
    #[serde(rename = "status", deserialize_with = "or_default")]
    pub readiness: String,
    /// Mount options that Harvester recommends, from the storage class.
    #[serde(deserialize_with = "or_default")]
    pub mount_opts: String,
    /// What was said of it.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<Condition>,
}

/// What was said of it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// For people.
    #[serde(deserialize_with = "or_default")]
    pub message: String,
}

/// The states that matter here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are Harvester's words")]
pub enum State {
    Enabled,
    Enabling,
    Disabling,
    Disabled,
    /// None yet, or one that is not known here.
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

/// What is next for an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It is made.
    Make,
    /// This is what is to be wanted of it.
    Want(State),
    /// Harvester is at it.
    Wait,
    /// There is nothing to do.
    Done,
}

/// What is next so that a share is served: [`Step::Done`] when it is.
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

/// What is next so that a share is not served: [`Step::Done`] when it is not.
pub fn end(object: Option<&NetworkFilesystem>) -> Step {
    let Some(object) = object else { return Step::Done };
    match (object.spec.desired_state, object.status.state) {
        (State::Disabled, State::Disabled | State::Unknown) => Step::Done,
        (State::Disabled, _) | (State::Enabled, State::Disabled | State::Unknown) => Step::Wait,
        _ => Step::Want(State::Disabled),
    }
}

/// What is to be wanted of an object that is wanted, and has not come further for a long time.
pub fn unstick(object: &NetworkFilesystem) -> Option<State> {
    let is_on_its_way = (object.spec.desired_state, object.status.state) != (State::Enabled, State::Enabled);
    (is_on_its_way && object.spec.desired_state == State::Enabled).then_some(State::Disabled)
}

impl NetworkFilesystem {
    fn is_ready(&self) -> bool {
        // While it is made larger its server goes on.
        matches!(self.status.readiness.as_str(), "Ready" | "Expanding") && !self.status.endpoint.is_empty()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// An annotation.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// Where it is served.
    pub fn export(&self) -> Export {
        Export {
            server: self.status.endpoint.clone(),
            path: format!("/{}", self.name()),
            options: self.status.mount_opts.clone(),
        }
    }

    /// How far it is, in words for the host.
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
            // Harvester may have taken away what serves it, and not have said so yet.
            ("Disabled", "Enabled", "Ready", address, Wait, Wait),
            ("Disabled", "Enabling", "NotReady", None, Wait, Wait),
            // Never wanted again before it has ended, and freed if somebody has.
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
