//! Serial consoles of running VMs, as provided by the hypervisor: connection and errors. Guests are not
//! involved.

use std::fmt;
use std::pin::Pin;

use crate::transport::BoxStream;

/// Connection to a console. Dropping it disconnects.
pub struct Console {
    /// Byte stream to and from the guest's console.
    pub stream: BoxStream,
    /// Hypervisor's name for the console, such as the path of its socket.
    pub place: String,
    /// Completes when the VM can from now on be reached only in another way, or not at all.
    pub gone: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Resolves to the reason for the end of the stream, which is known only shortly after the end itself.
    pub after: Pin<Box<dyn Future<Output = End> + Send>>,
}

impl fmt::Debug for Console {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Console").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Reason why a hypervisor has ended a console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The VM has ended.
    Vm,
    /// Only the console ended; the VM is still running as far as is known.
    Console,
}

/// Reason why a console cannot be connected to. The texts come from the backend and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The VM is in no list.
    #[error("there is no such VM")]
    UnknownVm,
    /// The VM is off, or was created without a console that can be connected to.
    #[error("{0}")]
    None(String),
    /// The hypervisor cannot be reached at present.
    #[error("{0}")]
    Unreachable(String),
    /// Another program on this host is connected to it.
    #[error("{0}")]
    Taken(String),
    /// The socket or device belongs to a process other than the VM's hypervisor.
    #[error("{0}")]
    Foreign(String),
    /// The hypervisor refused, or gave an answer that cannot be parsed.
    #[error("{0}")]
    Strange(String),
    /// Consoles of the VMs of this backend are accessed in another way.
    #[error("{0}")]
    Elsewhere(String),
}

/// Future with the result of a connection attempt.
pub type Answer = Pin<Box<dyn Future<Output = Result<Console, ConsoleError>> + Send>>;

/// Connects to the consoles of VMs.
pub trait Consoles: fmt::Debug + Send + Sync {
    /// Connects to the console of the VM with this name. A console has one client at a time: the caller ensures
    /// that no other part of this program is connected.
    fn open(&self, vm: &str) -> Answer;
}
