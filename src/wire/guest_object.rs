//! The kind Guest of the group guestlet.io: what people see of a guest by kubectl. packaging/kubernetes/host/base/crd.yaml defines
//! it; a field here has its line there.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};

/// The group of the kind.
pub const GROUP: &str = "guestlet.io";
/// API version of the kind.
pub const VERSION: &str = "v1alpha1";
/// Condition that shows whether all requests to a guest are possible.
pub const READY: &str = "Ready";

/// Custom resource for one guest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Guest {
    /// Name and namespace of its VirtualMachineInstance, which owns it.
    pub metadata: ObjectMeta,
    /// Observed state of the guest.
    #[serde(default)]
    pub status: Status,
}

/// Observed state of a guest. Unknown values are left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Conditions of the guest, such as whether it is ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// `Connected`, `Connecting`, `Refused`, `NoVsock`, or `Off`.
    pub session: String,
    /// Reason why it is not connected, for display.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The node that it runs on, and whose host half says all this.
    pub host: String,
    /// Name of its guest cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cluster: String,
    /// The name of its Node in that.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Readiness of that Node: `True`, `False` or `Unknown`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_ready: String,
    /// The version of its agent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub agent_version: String,
    /// Host name of the guest.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub host_name: String,
    /// Name of its operating system, from os-release(5).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operating_system: String,
    /// Number of disks that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<u32>,
    /// Number of guestlet volumes that are attached to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<u32>,
    /// Result of its last freeze.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_freeze: Option<Freeze>,
    /// Current problems, for display.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// A freeze that is over.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Freeze {
    /// Time at which it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Time>,
    /// Cause of its end: `asked`, `deadline`, `person`, `crash`, `hang`, `failed` or `other`.
    pub end: String,
    /// Client that requested the freeze.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub holder: String,
    /// Description of the failure, if there was one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// The id of its receipt.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub receipt: String,
    /// Consistency of a snapshot according to the receipt: `crash`, `filesystem` or `application`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub level: String,
}

impl Resource for Guest {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Guest".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "guests".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
