//! What hypervisors measure of the VMs that they run. No guest is asked.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use crate::wire::proto::v1::PowerState;

/// What a hypervisor says of a VM now; what it does not say, or the VM does not have, is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured {
    /// Whether it runs.
    pub power: PowerState,
    /// How many virtual processors it has.
    pub processors: Option<u64>,
    /// Bytes of memory that it was given.
    pub memory: Option<u64>,
    /// Bytes of it that its balloon leaves to it.
    pub balloon: Option<u64>,
    /// Its disks, the busiest first; few.
    pub disks: Vec<Disk>,
    /// How many more there are.
    pub more_disks: usize,
}

/// A disk of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// What the hypervisor calls it, which no other disk of the VM is called.
    pub name: String,
    /// As much of its serial number as the guest can read; empty if it has none.
    pub serial: String,
    /// What was read.
    pub reads: Requests,
    /// What was written.
    pub writes: Requests,
}

/// Requests that were completed since the VM was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// How many.
    pub count: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// Time that they took together.
    pub nanoseconds: u64,
}

/// Why there is nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unmeasured {
    /// It did not answer in time.
    #[error("the hypervisor does not answer in time")]
    Late,
    /// It is off, cannot be asked, or said what cannot be understood.
    #[error("{0}")]
    Failed(String),
}

/// The answer of a backend.
pub type Answer = Pin<Box<dyn Future<Output = Result<Measured, Unmeasured>> + Send>>;

/// Measures VMs.
pub trait Meters: fmt::Debug + Send + Sync {
    /// Whether the VM of this name has a hypervisor that this asks.
    fn measures(&self, vm: &str) -> bool;

    /// Asks it, now and once; it is waited for so long.
    fn measure(&self, vm: &str, patience: Duration) -> Answer;
}

/// Of VMs whose hypervisors nobody asks: KubeVirt, which has them, tells Prometheus itself.
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
