//! What the node role of a Kubernetes cluster is made of, beside what all roles share.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::watch;

use crate::host::backends::kubevirt::cluster;
use crate::host::backends::kubevirt::node::{Options, Site};
use crate::host::backends::{Kind, Problems};
use crate::host::place::Topology;

/// Which node, and how its cluster is reached.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Says where the API server is and who asks it; without one, what a pod is told.
    pub kubeconfig: Option<PathBuf>,
    /// The name of the Node.
    pub name: String,
}

/// The backend of a node; where it is goes to `topology`, and what cannot be learned to `problems`.
///
/// # Errors
/// If it is not known how to reach the cluster.
pub async fn kind(
    node: &NodeOptions,
    options: watch::Receiver<Options>,
    topology: watch::Sender<Arc<Topology>>,
    problems: watch::Sender<Problems>,
) -> anyhow::Result<Kind> {
    let cluster = cluster::config(node.kubeconfig.as_deref()).await;
    let cluster = cluster.context("cannot ask the Kubernetes API")?;
    tracing::info!(node = node.name, server = %cluster.cluster_url, "the VMs of a node");
    let node = node.name.clone();
    Ok(Kind::KubevirtNode(Box::new(Site { cluster, node, options, topology, problems })))
}
