//! The serial consoles of running VMs, as their hypervisor has them: how one is reached, and what can go wrong. No guest is asked.

use std::fmt;
use std::pin::Pin;

use crate::transport::BoxStream;

/// A console that is connected to. The connection ends when this is dropped.
pub struct Console {
    /// What the guest writes, and what it is to read.
    pub stream: BoxStream,
    /// What the hypervisor calls the place.
    pub place: String,
    /// Completes when the VM is reached in another way, or not at all, from now on.
    pub gone: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// What the end of the stream meant, which is known a moment later.
    pub after: Pin<Box<dyn Future<Output = End> + Send>>,
}

impl fmt::Debug for Console {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Console").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Why a hypervisor has ended a console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The VM has ended.
    Vm,
    /// The VM goes on, as far as is known.
    Console,
}

/// Why a console cannot be connected to. The words are the backend's, and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The VM is in no list.
    #[error("there is no such VM")]
    UnknownVm,
    /// The VM is off, or was not made with a console that can be reached.
    #[error("{0}")]
    None(String),
    /// The hypervisor cannot be asked now.
    #[error("{0}")]
    Unreachable(String),
    /// Another program of this host has it.
    #[error("{0}")]
    Taken(String),
    /// What is there belongs to somebody else than the VM's hypervisor.
    #[error("{0}")]
    Foreign(String),
    /// The hypervisor said no, or what cannot be understood.
    #[error("{0}")]
    Strange(String),
    /// Consoles of these VMs are reached in another way.
    #[error("{0}")]
    Elsewhere(String),
}

/// The answer of a backend.
pub type Answer = Pin<Box<dyn Future<Output = Result<Console, ConsoleError>> + Send>>;

/// Connects to consoles.
pub trait Consoles: fmt::Debug + Send + Sync {
    /// Connects to the console of the VM of this name. It has one client at a time: the caller sees to it that no other of this
    /// program has it.
    fn open(&self, vm: &str) -> Answer;
}
