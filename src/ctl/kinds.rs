//! Names of all kinds of events, as programs read them and `watch --kind` accepts them.

use crate::events;
use crate::wire::proto::v1::{VirtualMachineEvent, VolumeAction, virtual_machine_event::Kind};

/// Name of an event of a kind that only newer programs know.
const UNKNOWN: &str = "unknown";

/// Names of the events that the host observes.
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

/// Returns all names, in the order in which they are shown to people.
pub fn names() -> impl Iterator<Item = &'static str> {
    OF_HOST.iter().chain(events::NAMES).copied().chain([UNKNOWN])
}

/// Returns the name of an event; always one of [`names`].
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
