//! Where a VM runs: what its backend says of it, and what its guest made of that.

use std::sync::Arc;

use tokio::sync::watch;

pub use crate::wire::proto::v1::Topology;

/// Where one VM runs; absent before the backend has said it.
pub type Told = Option<Arc<Topology>>;

/// What a guest made of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// It has this one.
    Acknowledged(Arc<Topology>),
    /// It has not, and why.
    Problem(String),
}

/// Where a VM runs, as its backend tells it, until it is no more.
pub fn channel() -> (watch::Sender<Told>, watch::Receiver<Told>) {
    watch::channel(None)
}
