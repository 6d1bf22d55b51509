//! What guests are like: how they behave, how they are reached, and what they say of themselves.

use guestlet::wire::proto::v1::{self, GuestInfo, GuestState, OperatingSystem};

use crate::asking::Unruly;
use crate::frames::Trick;

/// How a guest behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Good,
    /// Takes the stream and says nothing.
    Silent,
    /// Answers, opens the events, and says nothing more.
    Mute,
    /// Speaks something else than HTTP/2.
    Garbage,
    /// Sends events as fast as it can.
    Flood,
    /// Sends few events that are large.
    Bulky,
    /// Leaves an event out once per stream.
    Hole,
    /// Closes the stream as soon as the events are open.
    Fickle,
    /// Is held by another host half.
    Held,
    /// Its settings give the host half nothing but `status`.
    Narrow,
    /// Calls the host as fast as it can.
    Nagging,
    /// Makes calls of the host and cancels them at once.
    Resetting,
    /// Closes the callback as soon as it is open.
    Fleeting,
    /// Makes calls by hand, against the rules of the callback.
    Unruly(Unruly),
    /// Plays a trick, once the session is open.
    Tricky(Trick),
    /// Has so many disks, or so much in use of one disk, of two bytes each.
    Crowded(Crowd),
}

/// What there is too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crowd {
    Disks(usize),
    Holders(usize),
}

impl Crowd {
    pub fn state(self) -> GuestState {
        let disks = match self {
            Self::Disks(count) => vec![v1::Disk::default(); count],
            Self::Holders(count) => {
                let holders = vec![v1::DiskHolder::default(); count];
                vec![v1::Disk { holders, ..v1::Disk::default() }]
            }
        };
        GuestState { disks, ..GuestState::default() }
    }
}

/// How the socket leads to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    Unix,
    /// CONNECT comes first.
    Hybrid,
    /// CONNECT comes first and finds nobody.
    HybridClosed,
}

/// What a decent guest says of itself.
pub fn info(uuid: &str, boot_id: &str) -> GuestInfo {
    GuestInfo {
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        boot_id: boot_id.into(),
        dmi_uuid: uuid.into(),
        host_name: "web-1.example".into(),
        operating_system: Some(OperatingSystem {
            id: "debian".into(),
            name: "Debian GNU/Linux".into(),
            pretty_name: "Debian GNU/Linux 12 (bookworm)".into(),
            version_id: "12".into(),
        }),
        kernel_release: "6.1.0-30-cloud-amd64".into(),
        machine: "x86_64".into(),
        agent_version: "0.1.0".into(),
        capabilities: vec!["events".into(), "qga".into(), "callback".into()],
        heartbeat_interval_seconds: 1,
    }
}
