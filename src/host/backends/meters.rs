//! Metrics that hypervisors report for the VMs that they run. Guests are not queried.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use crate::wire::proto::v1::PowerState;

/// Metrics of a VM at one moment. A value that the hypervisor does not report, or that the VM does not have, is
/// absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured {
    /// Power state of the VM.
    pub power: PowerState,
    /// Number of virtual CPUs.
    pub processors: Option<u64>,
    /// Size of its memory in bytes.
    pub memory: Option<u64>,
    /// Memory in bytes that the balloon leaves to the guest.
    pub balloon: Option<u64>,
    /// Disks of the VM, busiest first; the list is truncated.
    pub disks: Vec<Disk>,
    /// Number of disks that the list leaves out.
    pub more_disks: usize,
}

/// Disk of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Hypervisor's name for the disk, unique in the VM.
    pub name: String,
    /// Serial number, as far as the guest can read it; empty if the disk has none.
    pub serial: String,
    /// Completed read requests.
    pub reads: Requests,
    /// Completed write requests.
    pub writes: Requests,
}

/// Requests that were completed since the VM started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// Number of requests.
    pub count: u64,
    /// Total size in bytes.
    pub bytes: u64,
    /// Total time in nanoseconds that they took.
    pub nanoseconds: u64,
}

/// Reason why there are no metrics.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unmeasured {
    /// The hypervisor did not answer in time.
    #[error("the hypervisor does not answer in time")]
    Late,
    /// The VM is off, its hypervisor cannot be reached, or its answer cannot be parsed.
    #[error("{0}")]
    Failed(String),
}

/// Future with the result of a query.
pub type Answer = Pin<Box<dyn Future<Output = Result<Measured, Unmeasured>> + Send>>;

/// Reads metrics of VMs.
pub trait Meters: fmt::Debug + Send + Sync {
    /// Reports whether the VM with this name has a hypervisor that this implementation queries.
    fn measures(&self, vm: &str) -> bool;

    /// Queries the VM's hypervisor once, waiting at most `patience`.
    fn measure(&self, vm: &str, patience: Duration) -> Answer;
}

/// Implementation for VMs whose hypervisors are not queried: KubeVirt exports their metrics to Prometheus
/// itself.
#[derive(Debug, Clone, Copy)]
pub struct Unasked;

impl Meters for Unasked {
    fn measures(&self, _: &str) -> bool {
        false
    }

    fn measure(&self, _: &str, _: Duration) -> Answer {
        Box::pin(async { Err(Unmeasured::Failed("its hypervisor is not asked".to_owned())) })
    }
}
