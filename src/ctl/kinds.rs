//! The names of everything that can happen: what programs read, and what `watch --kind` takes.

use crate::events;
use crate::wire::proto::v1::{VirtualMachineEvent, VolumeAction, virtual_machine_event::Kind};

/// What an event is called that a newer program knows.
const UNKNOWN: &str = "unknown";

/// The names of what the host sees.
const OF_HOST: [&str; 13] = [
    "power-changed",
    "guest-reset",
    "guest-suspended",
    "session-opened",
    "session-closed",
    "volume-created",
    "volume-removed",
    "volume-attached",
    "volume-detached",
    "volume-expanded",
    "volume-reattached",
    "load-balancer-changed",
    "disk-error",
];

/// All names, in the order in which people are told them.
pub fn names() -> impl Iterator<Item = &'static str> {
    OF_HOST.iter().chain(events::NAMES).copied().chain([UNKNOWN])
}

/// The name of an event; always one of [`names`].
pub fn name(happened: &VirtualMachineEvent) -> &'static str {
    match &happened.kind {
        Some(Kind::PowerChanged(_)) => "power-changed",
        Some(Kind::GuestReset(_)) => "guest-reset",
        Some(Kind::GuestSuspended(_)) => "guest-suspended",
        Some(Kind::SessionOpened(_)) => "session-opened",
        Some(Kind::SessionClosed(_)) => "session-closed",
        Some(Kind::GuestEvent(event)) => event.kind.as_ref().map_or(UNKNOWN, events::name),
        Some(Kind::VolumeChanged(changed)) => match changed.action() {
            VolumeAction::Created => "volume-created",
            VolumeAction::Removed => "volume-removed",
            VolumeAction::Attached => "volume-attached",
            VolumeAction::Detached => "volume-detached",
            VolumeAction::Expanded => "volume-expanded",
            VolumeAction::Reattached => "volume-reattached",
            VolumeAction::Unspecified => UNKNOWN,
        },
        Some(Kind::LoadBalancerChanged(_)) => "load-balancer-changed",
        Some(Kind::IoError(_)) => "disk-error",
        None => UNKNOWN,
    }
}
