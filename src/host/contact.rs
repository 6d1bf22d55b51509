//! How a session reaches its guest, and what the guest is told of itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::backends::Vm;
use super::half::Half;
use super::metered::{Gate, Metered};
use super::place::Told;
use super::volumes::Keeper;
use crate::transport::BoxStream;
use crate::transport::dial;
use crate::wire::proto::v1::WhoAmIResponse;

/// How long a stream may take to come about. The guest's kernel answers, not its agent; while a guest boots, a
/// request may be lost, and this is the time lost with it.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

/// One VM, as its session holds it.
#[derive(Debug, Clone)]
pub struct Contact {
    /// The VM.
    pub vm: Arc<Vm>,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// For what its guest asks of volumes, where there are any.
    pub volumes: Option<Keeper>,
    /// Where the VM runs.
    pub topology: watch::Receiver<Told>,
}

impl Contact {
    /// Reaches `vm` as it says.
    pub fn new(
        vm: Arc<Vm>,
        half: Arc<Half>,
        volumes: Option<Keeper>,
        topology: watch::Receiver<Told>,
    ) -> Self {
        Self { vm, half, volumes, topology }
    }

    /// Dials its agent. The stream is counted, and cut when the guest sends too much.
    ///
    /// # Errors
    /// If there is none within the deadline.
    pub async fn dial(&self) -> Result<(Metered<BoxStream>, Gate), dial::Error> {
        let metrics = &self.half.metrics;
        metrics.dials.fetch_add(1, Ordering::Relaxed);
        let stream = dial::within(&*self.vm.dial, DIAL_DEADLINE).await.inspect_err(|_| {
            metrics.dial_failures.fetch_add(1, Ordering::Relaxed);
        })?;
        Ok(Metered::new(stream, Arc::clone(&self.half), &self.vm.limits))
    }

    /// What the guest is told of itself, if that many volumes may be plugged into it. All of it comes from the VM that
    /// was dialled, none from the guest.
    pub fn identity(&self, max_volumes: u32) -> WhoAmIResponse {
        WhoAmIResponse {
            host: Some(self.half.host.clone()),
            vm_name: self.vm.name.clone(),
            namespace: String::new(),
            vm_uid: self.vm.ids.lasting.clone(),
            cluster: self.vm.cluster.clone(),
            provider_id: self.vm.ids.provider.clone(),
            max_volumes,
        }
    }
}
