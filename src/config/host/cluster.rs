//! A `[cluster.<name>]` table: limits and permissions of one cluster for volumes and load balancers. For missing
//! keys, the host half has defaults.

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::{PoolSettings, Source, VmSettings};
use crate::text::parse_size;

/// Limits and permissions of one cluster, checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSettings {
    /// Maximum number of volumes.
    pub max_volumes: Option<u64>,
    /// Maximum size of all volumes together, in bytes.
    pub max_bytes: Option<u64>,
    /// Names of the pools that the cluster may use.
    pub classes: Option<Vec<String>>,
    /// Names of the cluster's VMs that may act for it.
    pub controllers: Option<Vec<String>>,
    /// Maximum number of load balancers.
    pub max_load_balancers: Option<u32>,
}

/// Table `[cluster.<name>]`, unchecked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ClusterFragment {
    max_volumes: Option<u64>,
    max_bytes: Option<Spanned<Size>>,
    classes: Option<Vec<Spanned<String>>>,
    controllers: Option<Vec<Spanned<String>>>,
    max_load_balancers: Option<u32>,
}

/// Size as it is written: a number of bytes, or a text such as `500G`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Size {
    Bytes(u64),
    Text(String),
}

pub(super) fn check(
    source: &Source,
    name: &str,
    cluster: &Spanned<ClusterFragment>,
) -> Result<ClusterSettings, Error> {
    let fragment = cluster.get_ref();
    if name.is_empty() {
        let problem = "[cluster] has an empty name; VMs without a cluster have no volumes".to_owned();
        return Err(source.wrong(cluster, problem));
    }
    let max_bytes = match &fragment.max_bytes {
        None => None,
        Some(size) => Some(match size.get_ref() {
            Size::Bytes(bytes) => *bytes,
            Size::Text(text) => parse_size(text)
                .map_err(|problem| source.wrong(size, format!("max-bytes = {text:?}: {problem}")))?,
        }),
    };
    let names = |list: &Option<Vec<Spanned<String>>>| {
        list.as_ref().map(|names| names.iter().map(|name| name.get_ref().clone()).collect())
    };
    Ok(ClusterSettings {
        max_volumes: fragment.max_volumes,
        max_bytes,
        classes: names(&fragment.classes),
        controllers: names(&fragment.controllers),
        max_load_balancers: fragment.max_load_balancers,
    })
}

/// Checks that the pools and VMs that a cluster names exist. A misspelled name would deny access to all.
pub(super) fn check_references(
    source: &Source,
    cluster: &str,
    fragment: &Spanned<ClusterFragment>,
    pools: &[PoolSettings],
    vms: &[VmSettings],
) -> Result<(), Error> {
    let fragment = fragment.get_ref();
    for class in fragment.classes.iter().flatten() {
        let name = class.get_ref();
        if !pools.iter().any(|pool| pool.name == *name) {
            let problem = format!("classes has {name:?}, but no [[pool]] has that name");
            return Err(source.wrong(class, problem));
        }
    }
    for controller in fragment.controllers.iter().flatten() {
        let name = controller.get_ref();
        if !vms.iter().any(|vm| vm.name == *name && vm.cluster == cluster) {
            let problem =
                format!("controllers has {name:?}, but no [[vm]] of the cluster {cluster} has that name");
            return Err(source.wrong(controller, problem));
        }
    }
    Ok(())
}
