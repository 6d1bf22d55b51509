//! What guest clusters are told by the controller, with the role that it is installed with.

use std::sync::Arc;

use guestlet::host::backends::Problems;
use guestlet::host::backends::kubevirt::api::Cluster;
use guestlet::host::backends::kubevirt::controller::Options;
use guestlet::host::cloud::remote::{Parts, Registry};
use guestlet::host::half::Half;
use guestlet::supervise::Scope;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::lab::Lab;
use crate::role;

/// The controller's part of it.
pub struct Clusters {
    _options: watch::Sender<Options>,
    _tasks: Scope,
}

impl Clusters {
    /// One that follows what the account may follow now; what it cannot is told there.
    pub async fn with(lab: &Lab, problems: watch::Sender<Problems>) -> Self {
        let options = Options { max_volumes: 64, limits: Arc::default(), node_labels: Vec::new() };
        let (set_options, options) = watch::channel(options);
        let half = Arc::new(Half::new("controller".into()));
        let client = kube::Client::try_from(role::config(lab.turn.plane()).await).unwrap();
        let cluster = Cluster::new(client, problems, Arc::clone(&half));
        let (_, facts) = mpsc::channel(1);
        let (registry, _) = Registry::new(Parts { half, cluster, options, facts });
        let tasks = Scope::new();
        tasks.children().spawn(registry.run(CancellationToken::new()));
        Self { _options: set_options, _tasks: tasks }
    }
}
