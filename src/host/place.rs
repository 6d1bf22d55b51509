//! Topology of a VM: where it runs according to its backend, and whether its guest has accepted that.

use std::sync::Arc;

use tokio::sync::watch;

pub use crate::wire::proto::v1::Topology;

/// Topology of one VM; `None` until the backend has reported it.
pub type Told = Option<Arc<Topology>>;

/// Result of sending the topology to a guest.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The guest has accepted this topology.
    Acknowledged(Arc<Topology>),
    /// The guest has not accepted the topology, for this reason.
    Problem(String),
}

/// Creates a channel for the topology of a VM. The backend's end is dropped when the VM is no longer known.
pub fn channel() -> (watch::Sender<Told>, watch::Receiver<Told>) {
    watch::channel(None)
}
