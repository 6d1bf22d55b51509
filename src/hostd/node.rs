//! Parts of the node role of a Kubernetes cluster, in addition to those that all roles share.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::watch;

use super::Work;
use crate::host::backends::kubevirt::node::{Options, Roster, Site};
use crate::host::backends::kubevirt::standing;
use crate::host::backends::{Kind, Problems, Standing};
use crate::host::changed::Changed;
use crate::host::fleet::Handle;
use crate::host::guests::Writer;
use crate::host::half::Half;
use crate::host::place::Topology;
use crate::host::relay::{self, Link, Relay};
use crate::kubernetes::connect;

/// Node, and access to its cluster.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Configuration with the API server and credentials; without one, the service account of a pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the Node.
    pub name: String,
    /// Namespace of guestlet's own objects.
    pub namespace: String,
    /// File with the token by which the controller identifies the node.
    pub token: PathBuf,
}

/// Parts of a node.
pub struct Node {
    /// Kind of the backend.
    pub kind: Kind,
    /// Topology of the node.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// State of the backend.
    pub standing: Standing,
    /// VMs that have changed, for the writer.
    pub changed: Arc<Changed>,
    /// VirtualMachineInstances of the reported VMs, for the writer.
    roster: Arc<Roster>,
    problems: watch::Sender<Problems>,
    options: watch::Receiver<Options>,
    cluster: kube::Config,
    namespace: String,
    token: PathBuf,
}

impl Node {
    /// Builds the parts of a node with these settings.
    ///
    /// # Errors
    /// Fails if no access to the cluster is configured.
    pub async fn new(node: &NodeOptions, options: watch::Receiver<Options>) -> anyhow::Result<Self> {
        let cluster = connect::config(node.kubeconfig.as_deref()).await;
        let cluster = cluster.context("cannot access the Kubernetes API")?;
        tracing::info!(node = node.name, server = %cluster.cluster_url, "the VMs of a node");
        // The topology is unknown until the API has reported it.
        let nowhere = Topology { host: node.name.clone(), ..Topology::default() };
        let (place, topology) = watch::channel(Arc::new(nowhere));
        let (problems, told) = watch::channel(Problems::new());
        let (advice, advised) = watch::channel(Vec::new());
        let changed = Arc::<Changed>::default();
        let roster = Arc::new(Roster::new(Arc::clone(&changed)));
        let site = Site {
            cluster: cluster.clone(),
            node: node.name.clone(),
            options: options.clone(),
            topology: place,
            problems: problems.clone(),
            advice,
            roster: Arc::clone(&roster),
        };
        let standing = Standing { node: node.name.clone(), problems: told, advice: advised };
        let kind = Kind::KubevirtNode(Box::new(site));
        let NodeOptions { namespace, token, .. } = node.clone();
        Ok(Self { kind, topology, standing, changed, roster, problems, options, cluster, namespace, token })
    }

    /// Returns the tasks that run in addition to the sessions, and the relay of the guests' calls to the
    /// controller.
    pub fn beside(&self, fleet: &Handle, half: &Arc<Half>) -> (Vec<(&'static str, Work)>, Relay) {
        let telling = self.write(fleet.clone(), Arc::clone(half));
        let (link, relay) = self.link(fleet.clone(), Arc::clone(half));
        let attaching = relay::attach(relay.clone(), fleet.clone());
        let work: Vec<(_, Work)> = vec![
            ("guests", Box::pin(telling)),
            ("controller", Box::pin(link.run())),
            ("receipts", Box::pin(attaching)),
        ];
        (work, relay)
    }

    /// Writes the guests' objects in the cluster, until the future is dropped.
    fn write(&self, fleet: Handle, half: Arc<Half>) -> impl Future<Output = ()> + Send + use<> {
        let writer = Writer {
            node: self.standing.node.clone(),
            fleet,
            changed: Arc::clone(&self.changed),
            roster: Arc::clone(&self.roster),
            options: self.options.clone(),
            teller: standing::teller("cannot write the guests' objects", self.problems.clone(), half),
        };
        writer.run(self.cluster.clone())
    }

    /// Builds the connection to the controller, and the relay that sends the calls of guests over it.
    fn link(&self, fleet: Handle, half: Arc<Half>) -> (Link, Relay) {
        let teller = "guestlet's controller cannot be reached; volumes are neither plugged nor unplugged";
        Link::new(relay::Site {
            cluster: self.cluster.clone(),
            namespace: self.namespace.clone(),
            token: self.token.clone(),
            fleet,
            roster: Arc::clone(&self.roster),
            teller: standing::teller(teller, self.problems.clone(), Arc::clone(&half)),
            half,
        })
    }
}
