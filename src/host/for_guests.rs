//! What answers the calls of guests about volumes (`csi.v1.Controller`), and about their cluster's VMs and load balancers
//! (`guestlet.v1.Cloud`). A session hands them on, and knows no more of either than this; which VM asks is known from its
//! connection.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use http::{Request, Response};
use tokio::sync::watch;
use tonic::body::Body;

use super::audit::Audit;
use super::backends::Vm;
use super::place::Told;
use crate::wire::proto::v1::{HealthCheckResult, HealthCheckTarget};

/// A guest that asks.
#[derive(Debug, Clone)]
pub struct Asking {
    /// The VM that was dialled.
    pub vm: Arc<Vm>,
    /// Where it runs, as it is told itself.
    pub place: watch::Receiver<Told>,
    /// Where it is recorded who did what.
    pub audit: Audit,
}

/// The answer to come.
pub type Answering = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Answers the calls of guests about volumes.
#[tonic::async_trait]
pub trait Volumes: fmt::Debug + Send + Sync {
    /// Answers a call of `csi.v1.Controller`. What it begins goes on when the future is dropped.
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering;

    /// How many volumes a VM can have at a time; 0 if nothing bounds it.
    async fn most(&self, vm: &Vm) -> u32;
}

/// The health checks that the agents of a cluster make.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Checks {
    /// Grows with each change.
    pub generation: u64,
    /// Seconds from one report of an agent to the next, if nothing changes.
    pub report_seconds: u32,
    /// All of them.
    pub targets: Vec<HealthCheckTarget>,
}

/// Answers the calls of guests about their cluster's VMs and load balancers.
#[tonic::async_trait]
pub trait Cloud: fmt::Debug + Send + Sync {
    /// Answers a call of `guestlet.v1.Cloud`.
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering;

    /// What the agent of a VM is to check; nothing if its VM has no cluster.
    async fn checks(&self, vm: &Vm) -> Option<watch::Receiver<Arc<Checks>>>;

    /// What the agent of a VM says of the checks of a generation.
    async fn checked(&self, vm: &Vm, generation: u64, results: Vec<HealthCheckResult>);
}
