//! The kind Guest of the group guestlet.io: what people see of a guest by kubectl. packaging/kubernetes/host/base/crd.yaml defines
//! it; a field here has its line there.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};

/// The group of the kind.
pub const GROUP: &str = "guestlet.io";
/// Its version.
pub const VERSION: &str = "v1alpha1";
/// The condition that says whether a guest can be asked for everything.
pub const READY: &str = "Ready";

/// One guest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Guest {
    /// Name and namespace of its VirtualMachineInstance, which owns it.
    pub metadata: ObjectMeta,
    /// How it is.
    #[serde(default)]
    pub status: Status,
}

/// How a guest is. What is not known is left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Whether it can be asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// `Connected`, `Connecting`, `Refused`, `NoVsock`, or `Off`.
    pub session: String,
    /// Why it is not connected, in words for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The node that it runs on, and whose host half says all this.
    pub host: String,
    /// Its guest cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cluster: String,
    /// The name of its Node in that.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Whether that Node is ready: `True`, `False` or `Unknown`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_ready: String,
    /// The version of its agent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub agent_version: String,
    /// Its host name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub host_name: String,
    /// Its operating system, as that calls itself.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operating_system: String,
    /// How many disks it sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<u32>,
    /// How many volumes of guestlet's are plugged into it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<u32>,
    /// How its last freeze ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_freeze: Option<Freeze>,
    /// What is wrong, in words for people.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// A freeze that is over.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Freeze {
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Time>,
    /// What ended it: `asked`, `deadline`, `person`, `crash`, `hang`, `failed` or `other`.
    pub end: String,
    /// Who had asked for it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub holder: String,
    /// What went wrong.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// The id of its receipt.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub receipt: String,
    /// What a snapshot is worth by the receipt: `crash`, `filesystem` or `application`.
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
