//! Looks VMs up by their lasting identifiers, in the present VirtualMachines and runs of the API server and not
//! in cached state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::Api;
use serde_json::Value;

use super::super::api::{Cluster, failed_words};
use super::super::objects::{CLUSTER_LABEL, VirtualMachine};
use super::super::seen::{Facts, Seen};
use super::super::shared::{Outcome, Shared};
use super::wanted::Wanted;
use crate::kubernetes::lists;

/// Maximum number of objects in one page of a list.
const PAGE: u32 = 100;

/// All VMs by lasting identifier.
type All = BTreeMap<String, Arc<Facts>>;

/// Lookup of VMs in the API server. Callers that arrive during a reading of all VMs share the next reading.
#[derive(Debug, Clone)]
pub struct Lasting {
    cluster: Cluster,
    readings: Shared<(), All>,
}

impl Lasting {
    /// Creates a lookup in this cluster.
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, readings: Shared::default() }
    }

    /// Finds the VM with this lasting identifier, given its last known name and namespace, if any. `None` means
    /// that no such VM exists anywhere in the host cluster.
    ///
    /// # Errors
    /// If this cannot be determined; the text says why.
    pub async fn find(
        &self,
        namespace: &str,
        name: Option<&str>,
        uid: &str,
    ) -> Result<Option<Arc<Facts>>, String> {
        // A name proves nothing, but most VMs still have their last known name.
        if let Some(name) = name
            && let Some(found) = self.named(namespace, name).await?
            && found.lasting == uid
        {
            return Ok(Some(found));
        }
        // The VM may be in another namespace.
        let read: Outcome<All> = self.readings.read(&(), self.all()).await;
        Ok(read?.get(uid).cloned())
    }

    /// Returns the guest clusters that have VMs in this namespace, from the labels of the VirtualMachines, of their
    /// templates, and of the runs.
    ///
    /// # Errors
    /// If not all of them can be read; the text says why.
    pub async fn clusters(&self, namespace: &str) -> Result<BTreeSet<String>, String> {
        let (client, mut all) = (self.cluster.client(), BTreeSet::new());
        let failed = |failed| format!("its VMs cannot be read: {}", failed_words(&failed));
        let mut put = |object: Value| {
            let labels = ["/metadata/labels", "/spec/template/metadata/labels"];
            let labels =
                labels.iter().filter_map(|labels| object.pointer(labels)?.get(CLUSTER_LABEL)?.as_str());
            all.extend(labels.map(str::to_owned));
        };
        let namespace = Some(namespace);
        lists::each::<VirtualMachine, Value>(&client, namespace, PAGE, &mut put).await.map_err(failed)?;
        lists::each::<Seen, Value>(&client, namespace, PAGE, &mut put).await.map_err(failed)?;
        Ok(all)
    }

    /// Returns the VM with this name: its run, if it has one.
    async fn named(&self, namespace: &str, name: &str) -> Result<Option<Arc<Facts>>, String> {
        let runs = Api::<Seen>::namespaced(self.cluster.client(), namespace);
        let failed = |failed| format!("the VM {namespace}/{name} cannot be read: {}", failed_words(&failed));
        if let Some(run) = lists::in_time(runs.get_opt(name)).await.map_err(failed)? {
            return Ok(run.facts);
        }
        let vms = Api::<Wanted>::namespaced(self.cluster.client(), namespace);
        let vm = lists::in_time(vms.get_opt(name)).await.map_err(failed)?;
        Ok(vm.and_then(|vm| vm.facts))
    }

    async fn all(&self) -> Result<All, String> {
        let (client, mut all) = (self.cluster.client(), All::new());
        let failed = |failed| format!("the VMs of the cluster cannot be read: {}", failed_words(&failed));
        let mut put = |facts: Option<Arc<Facts>>| {
            all.extend(facts.map(|facts| (facts.lasting.clone(), facts)));
        };
        // A run takes precedence over its VirtualMachine, and is therefore read last.
        let vms = lists::each::<VirtualMachine, Wanted>(&client, None, PAGE, |vm| put(vm.facts));
        vms.await.map_err(failed)?;
        let runs = lists::each::<Seen, Seen>(&client, None, PAGE, |run| put(run.facts));
        runs.await.map_err(failed)?;
        Ok(all)
    }
}
