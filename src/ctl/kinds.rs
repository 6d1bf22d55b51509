//! The names of everything that can happen: what programs read, and what `watch --kind` takes.

use crate::wire::proto::v1::{VirtualMachineEvent, event, virtual_machine_event::Kind};

/// All names, in the order in which people are told them.
pub const NAMES: [&str; 27] = [
    "power-changed",
    "guest-reset",
    "session-opened",
    "session-closed",
    "agent-ready",
    "agent-started",
    "agent-stopping",
    "shutdown-requested",
    "shutdown-begun",
    "interfaces-changed",
    "file-system-mounted",
    "file-system-unmounted",
    "user-logged-in",
    "user-logged-out",
    "clock-jumped",
    "suspending",
    "resumed",
    "frozen",
    "thawed",
    "disk-added",
    "disk-removed",
    "disk-resized",
    "disk-changed",
    "disk-mounted",
    "disk-failed",
    "heartbeat",
    "unknown",
];

/// The name of an event; always one of [`NAMES`].
pub fn name(happened: &VirtualMachineEvent) -> &'static str {
    match &happened.kind {
        Some(Kind::PowerChanged(_)) => "power-changed",
        Some(Kind::GuestReset(_)) => "guest-reset",
        Some(Kind::SessionOpened(_)) => "session-opened",
        Some(Kind::SessionClosed(_)) => "session-closed",
        Some(Kind::GuestEvent(event)) => match &event.kind {
            Some(event::Kind::AgentReady(_)) => "agent-ready",
            Some(event::Kind::AgentStarted(_)) => "agent-started",
            Some(event::Kind::AgentStopping(_)) => "agent-stopping",
            Some(event::Kind::ShutdownRequested(_)) => "shutdown-requested",
            Some(event::Kind::ShutdownBegun(_)) => "shutdown-begun",
            Some(event::Kind::InterfacesChanged(_)) => "interfaces-changed",
            Some(event::Kind::FileSystemMounted(_)) => "file-system-mounted",
            Some(event::Kind::FileSystemUnmounted(_)) => "file-system-unmounted",
            Some(event::Kind::UserLoggedIn(_)) => "user-logged-in",
            Some(event::Kind::UserLoggedOut(_)) => "user-logged-out",
            Some(event::Kind::ClockJumped(_)) => "clock-jumped",
            Some(event::Kind::Suspending(_)) => "suspending",
            Some(event::Kind::Resumed(_)) => "resumed",
            Some(event::Kind::Frozen(_)) => "frozen",
            Some(event::Kind::Thawed(_)) => "thawed",
            Some(event::Kind::DiskAdded(_)) => "disk-added",
            Some(event::Kind::DiskRemoved(_)) => "disk-removed",
            Some(event::Kind::DiskResized(_)) => "disk-resized",
            Some(event::Kind::DiskChanged(_)) => "disk-changed",
            Some(event::Kind::DiskMounted(_)) => "disk-mounted",
            Some(event::Kind::DiskFailed(_)) => "disk-failed",
            Some(event::Kind::Heartbeat(_)) => "heartbeat",
            None => "unknown",
        },
        None => "unknown",
    }
}
