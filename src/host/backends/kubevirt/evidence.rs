//! Reads from the host cluster which objects use claims: all VMs, runs and pods of a namespace, and all
//! VolumeAttachments, because the API server cannot select any of them by the claims that they use.
//!
//! There may be very many of them. They are read page by page, only the users of claims are kept, and one
//! reading serves all callers that asked before it began ([`Shared`]). Of the objects that are not KubeVirt's,
//! only the fields below are parsed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::api::failed_words;
use super::authority::{Evidence, Lister, Use};
use super::names::Claim;
use super::objects::{Instance, VirtualMachine, or_default};
use super::shared::Shared;
use crate::kubernetes::lists;

/// Maximum number of objects in one page of a list.
const PAGE: u32 = 250;
/// Prefix of the names of KubeVirt's hot-plug pods.
const ATTACHER: &str = "hotplug-disk";

/// Reader of the evidence; clones share their readings.
#[derive(Clone)]
pub struct Reader {
    client: Client,
    namespaces: Shared<String, Namespace>,
    /// Reading of all VolumeAttachments, which have no namespace; hence the single key.
    attachments: Shared<(), Attachments>,
}

/// VolumeAttachments by PersistentVolume.
type Attachments = BTreeMap<String, Vec<Use>>;

/// Users of claims in a namespace.
#[derive(Debug, Default)]
pub struct Namespace {
    vms: Arc<Vec<Lister>>,
    instances: Arc<Vec<Lister>>,
    /// Pods by the claims that they use.
    pods: BTreeMap<String, Vec<Use>>,
}

#[derive(Deserialize)]
struct SlimPod {
    metadata: Metadata,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    name: String,
    #[serde(default, deserialize_with = "or_default")]
    labels: Labels,
    #[serde(rename = "ownerReferences", default, deserialize_with = "or_default")]
    owners: Vec<Owner>,
}

#[derive(Deserialize)]
struct Owner {
    #[serde(default)]
    uid: String,
}

/// Labels of pods, of which one is relevant.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Labels {
    #[serde(rename = "kubevirt.io")]
    role: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    node_name: Option<String>,
    volumes: Option<Vec<PodVolume>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodVolume {
    persistent_volume_claim: Option<PodClaim>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodClaim {
    claim_name: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: Option<String>,
}

#[derive(Deserialize)]
struct SlimAttachment {
    metadata: Metadata,
    spec: AttachmentSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AttachmentSpec {
    #[serde(default)]
    node_name: String,
    source: AttachmentSource,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AttachmentSource {
    persistent_volume_name: Option<String>,
}

impl Reader {
    /// Creates a reader that uses this client.
    pub fn new(client: Client) -> Self {
        Self { client, namespaces: Shared::default(), attachments: Shared::default() }
    }

    /// Reads the evidence for the holder of a claim; `volume` is the name of its PersistentVolume.
    ///
    /// # Errors
    /// If any of it cannot be read; the text says why.
    pub async fn evidence(&self, claim: &Claim, volume: Option<&str>) -> Result<Evidence, String> {
        // Attachments are read first and VMs last: a VM that begins to list the claim between the readings is then
        // still seen.
        let attachments = match volume {
            None => Vec::new(),
            Some(volume) => {
                let all = self.attachments.read(&(), self.read_attachments()).await?;
                all.get(volume).cloned().unwrap_or_default()
            }
        };
        let namespace = &claim.namespace;
        let found = self.namespaces.read(namespace, self.read_namespace(namespace)).await?;
        Ok(Evidence {
            vms: Arc::clone(&found.vms),
            instances: Arc::clone(&found.instances),
            attachments,
            pods: found.pods.get(&claim.name).cloned().unwrap_or_default(),
        })
    }

    async fn read_attachments(&self) -> Result<Attachments, String> {
        let mut all = Attachments::new();
        let keep = |one: SlimAttachment| {
            let SlimAttachment { metadata, spec } = one;
            let Some(volume) = spec.source.persistent_volume_name else { return };
            let one = Use { name: metadata.name, node: spec.node_name, ..Use::default() };
            all.entry(volume).or_default().push(one);
        };
        self.each::<VolumeAttachment, _>(None, keep).await?;
        Ok(all)
    }

    async fn read_namespace(&self, namespace: &str) -> Result<Namespace, String> {
        let mut pods = BTreeMap::new();
        self.each::<Pod, _>(Some(namespace), |pod| keep_pod(&mut pods, pod)).await?;
        let (mut instances, mut vms) = (Vec::new(), Vec::new());
        let keep = |one: Instance| instances.extend(Lister::of_instance(&one));
        self.each::<Instance, _>(Some(namespace), keep).await?;
        let keep = |one: VirtualMachine| vms.extend(Lister::of_vm(&one));
        self.each::<VirtualMachine, _>(Some(namespace), keep).await?;
        Ok(Namespace { vms: Arc::new(vms), instances: Arc::new(instances), pods })
    }

    /// Passes each object of kind `K`, in a namespace or in all, to `found`, parsed as `S`.
    async fn each<K, S>(&self, namespace: Option<&str>, found: impl FnMut(S)) -> Result<(), String>
    where
        K: Resource<DynamicType = ()>,
        S: DeserializeOwned,
    {
        let listed = lists::each::<K, S>(&self.client, namespace, PAGE, found).await;
        listed.map_err(|failed| {
            let place =
                namespace.map(|namespace| format!(" of the namespace {namespace}")).unwrap_or_default();
            format!("cannot list the {}{place}: {}", K::plural(&()), failed_words(&failed))
        })
    }
}

/// Adds a pod to the users of each of its claims, unless it has ended.
fn keep_pod(pods: &mut BTreeMap<String, Vec<Use>>, pod: SlimPod) {
    let SlimPod { metadata, spec, status } = pod;
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return;
    }
    let is_attacher = metadata.labels.role.as_deref() == Some(ATTACHER);
    let owners = metadata.owners.into_iter().map(|owner| owner.uid).collect();
    let one = Use { name: metadata.name, node: spec.node_name.unwrap_or_default(), is_attacher, owners };
    let claims = spec.volumes.into_iter().flatten().filter_map(|volume| volume.persistent_volume_claim);
    for claim in claims {
        pods.entry(claim.claim_name).or_default().push(one.clone());
    }
}
