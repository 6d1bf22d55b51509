//! Interfaces for calls of guests about volumes (`csi.v1.Controller`), and about their cluster's VMs and load
//! balancers (`guestlet.v1.Cloud`). A session forwards these calls and depends on nothing else of either. The
//! calling VM is known from its connection.

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

/// Guest that makes a call.
#[derive(Debug, Clone)]
pub struct Asking {
    /// The VM that was dialled.
    pub vm: Arc<Vm>,
    /// Topology of the VM, as its guest is informed of it.
    pub place: watch::Receiver<Told>,
    /// Audit log for its calls.
    pub audit: Audit,
}

/// Future of the answer to a call.
pub type Answering = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Handler of guests' calls about volumes.
#[tonic::async_trait]
pub trait Volumes: fmt::Debug + Send + Sync {
    /// Answers a call of `csi.v1.Controller`. Work that it has begun continues when the future is dropped.
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering;

    /// Returns how many volumes a VM can have at a time; 0 for no limit.
    async fn most(&self, vm: &Vm) -> u32;
}

/// Health checks that the agents of a cluster make.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Checks {
    /// Generation, which increases with each change.
    pub generation: u64,
    /// Interval of an agent's reports in seconds, if nothing changes.
    pub report_seconds: u32,
    /// All health checks of the cluster.
    pub targets: Vec<HealthCheckTarget>,
}

/// Handler of guests' calls about their cluster's VMs and load balancers.
#[tonic::async_trait]
pub trait Cloud: fmt::Debug + Send + Sync {
    /// Answers a call of `guestlet.v1.Cloud`.
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering;

    /// Returns the health checks for the agent of a VM; `None` if the VM has no cluster.
    async fn checks(&self, vm: &Vm) -> Option<watch::Receiver<Arc<Checks>>>;

    /// Takes the results that the agent of a VM reports for the checks of a generation.
    async fn checked(&self, vm: &Vm, generation: u64, results: Vec<HealthCheckResult>);
}
