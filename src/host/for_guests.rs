//! What answers the calls of guests about volumes (`csi.v1.Controller`). A session hands them on, and knows no more of
//! volumes than this; which VM asks is known from its connection.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use http::{Request, Response};
use tokio::sync::watch;
use tonic::body::Body;

use super::audit::Audit;
use super::backends::Vm;
use super::place::Told;

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
