//! The `[kubevirt]` table: the VMs of a Kubernetes cluster, which are found by themselves.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::{DEFAULT_PORT, Source};
use crate::labels;

/// Most labels of the node that guests are told.
const MOST_LABELS: usize = 64;
/// Volumes of a VM unless the settings say otherwise; KubeVirt takes 256 in all, and a VM has others of its own.
const MAX_VOLUMES: u32 = 240;

/// Where the controller takes the connections of nodes unless the settings say otherwise: in the network of its pod.
const CONTROLLER: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 9971);

/// What holds for all VMs of a cluster, or of a node of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubevirtSettings {
    /// The folder of hybrid vsocks by which agents are reached, instead of the node's own vsock.
    pub sockets: Option<PathBuf>,
    /// The port of agents.
    pub port: u32,
    /// How many volumes a VM may have.
    pub max_volumes: u32,
    /// Labels of the Node that guests are told, beside region and zone.
    pub node_labels: Vec<String>,
    /// Whether guests have objects in the cluster, and events.
    pub guests: bool,
    /// Where the controller takes the connections of nodes.
    pub controller: SocketAddr,
    /// The access mode of claims.
    pub access_mode: AccessMode,
}

/// How many nodes of a cluster may have a claim at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[allow(clippy::enum_variant_names, reason = "Kubernetes calls them so")]
pub enum AccessMode {
    /// Several: VMs that have it can be migrated.
    #[default]
    ReadWriteMany,
    /// One.
    ReadWriteOnce,
    /// One pod of one node.
    ReadWriteOncePod,
}

impl AccessMode {
    /// As Kubernetes calls it.
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

/// Takes what this fragment sets.
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
