//! The `[kubevirt]` table: settings for the VMs of a Kubernetes cluster, which are discovered automatically.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::{DEFAULT_PORT, Source};
use crate::labels;

/// Maximum number of labels of the Node that are passed on to guests.
const MOST_LABELS: usize = 64;
/// Default limit on the volumes of a VM: KubeVirt allows 256 disks in all, and a VM has others of its own.
const MAX_VOLUMES: u32 = 240;

/// Default address on which the controller accepts connections of nodes: every address of its pod.
const CONTROLLER: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 9971);

/// Settings for all VMs of a cluster, or of one of its nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubevirtSettings {
    /// Directory of the hybrid vsock sockets on which agents are reached, instead of through the node's own vsock.
    pub sockets: Option<PathBuf>,
    /// Vsock port of the agents.
    pub port: u32,
    /// Maximum number of volumes that are attached to a VM.
    pub max_volumes: u32,
    /// Labels of the Node that are passed on to guests, in addition to region and zone.
    pub node_labels: Vec<String>,
    /// True if guests have objects and events in the cluster.
    pub guests: bool,
    /// Address on which the controller accepts connections of nodes.
    pub controller: SocketAddr,
    /// Access mode of claims.
    pub access_mode: AccessMode,
}

/// Access mode of claims: how many nodes of a cluster may use a claim at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[allow(clippy::enum_variant_names, reason = "Kubernetes calls them so")]
pub enum AccessMode {
    /// Several nodes, so that VMs with the claim can be migrated.
    #[default]
    ReadWriteMany,
    /// One node.
    ReadWriteOnce,
    /// One pod of one node.
    ReadWriteOncePod,
}

impl AccessMode {
    /// Returns the name in Kubernetes.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadWriteMany => "ReadWriteMany",
            Self::ReadWriteOnce => "ReadWriteOnce",
            Self::ReadWriteOncePod => "ReadWriteOncePod",
        }
    }
}

impl Default for KubevirtSettings {
    fn default() -> Self {
        Self {
            sockets: None,
            port: DEFAULT_PORT,
            max_volumes: MAX_VOLUMES,
            node_labels: Vec::new(),
            guests: true,
            controller: CONTROLLER,
            access_mode: AccessMode::default(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct KubevirtFragment {
    sockets: Option<Spanned<PathBuf>>,
    port: Option<Spanned<u32>>,
    max_volumes: Option<u32>,
    node_labels: Option<Vec<Spanned<String>>>,
    guests: Option<bool>,
    controller: Option<Spanned<String>>,
    access_mode: Option<AccessMode>,
}

/// Merges the settings of this fragment into those before.
pub(super) fn check(
    source: &Source,
    found: &KubevirtFragment,
    settings: &mut KubevirtSettings,
) -> Result<(), Error> {
    if let Some(sockets) = &found.sockets {
        settings.sockets = Some(source.absolute("kubevirt.sockets", sockets)?);
    }
    if let Some(port) = &found.port {
        if *port.get_ref() == 0 {
            return Err(
                source.wrong(port, "kubevirt.port = 0 is not a port; agents listen on 970".to_owned())
            );
        }
        settings.port = *port.get_ref();
    }
    if let Some(max_volumes) = found.max_volumes {
        settings.max_volumes = max_volumes;
    }
    settings.guests = found.guests.unwrap_or(settings.guests);
    settings.access_mode = found.access_mode.unwrap_or(settings.access_mode);
    if let Some(controller) = &found.controller {
        settings.controller = controller.get_ref().parse().map_err(|_| {
            let found = controller.get_ref();
            let problem =
                format!("kubevirt.controller = {found:?} is not an address and port, such as \"[::]:9971\"");
            source.wrong(controller, problem)
        })?;
    }
    if let Some(keys) = &found.node_labels {
        for (at, key) in keys.iter().enumerate() {
            labels::check_settable(key.get_ref()).map_err(|why| {
                source.wrong(key, format!("kubevirt.node-labels: {:?}: {why}", key.get_ref()))
            })?;
            if at >= MOST_LABELS {
                let problem = format!("kubevirt.node-labels has more than {MOST_LABELS} labels");
                return Err(source.wrong(key, problem));
            }
        }
        settings.node_labels = keys.iter().map(|key| key.get_ref().clone()).collect();
    }
    Ok(())
}
