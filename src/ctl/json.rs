//! What programs read. Keys are part of the interface: add, never change.

use prost_types::Timestamp;
use serde::Serialize;

use super::words;
use crate::wire::proto::v1::{self, event, virtual_machine_event::Kind};

/// One VM.
#[derive(Debug, Serialize)]
pub struct Vm {
    name: String,
    uuid: String,
    cluster: String,
    power: &'static str,
    session: &'static str,
    reason: String,
    dial: String,
    since: Option<String>,
    last_heard: Option<String>,
    sessions: u64,
    guest: Option<Guest>,
}

/// What a guest says of itself.
#[derive(Debug, Serialize)]
pub struct Guest {
    machine_id: String,
    boot_id: String,
    dmi_uuid: String,
    host_name: String,
    os: Os,
    kernel_release: String,
    machine: String,
    agent_version: String,
    capabilities: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Os {
    id: String,
    name: String,
    pretty_name: String,
    version_id: String,
}

/// Something that happened.
#[derive(Debug, Serialize)]
pub struct Event {
    time: Option<String>,
    name: String,
    #[serde(rename = "event")]
    what: &'static str,
    #[serde(flatten)]
    details: Details,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Details {
    None {},
    Power { power: &'static str },
    Opened { after_milliseconds: u64, rebooted: bool, guest: Option<Box<Guest>> },
    Closed { reason: String },
    Guest(FromGuest),
}

#[derive(Debug, Serialize)]
struct FromGuest {
    sequence: u64,
    guest_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
}

fn rfc3339(time: Timestamp) -> String {
    time.to_string()
}

impl From<v1::VirtualMachine> for Vm {
    fn from(vm: v1::VirtualMachine) -> Self {
        Self {
            power: words::power(vm.power()),
            session: words::session(vm.session()),
            name: vm.name,
            uuid: vm.uuid,
            cluster: vm.cluster,
            reason: vm.reason,
            dial: vm.dial,
            since: vm.since.map(rfc3339),
            last_heard: vm.last_heard.map(rfc3339),
            sessions: vm.sessions,
            guest: vm.guest.map(Guest::from),
        }
    }
}

impl From<v1::GuestInfo> for Guest {
    fn from(info: v1::GuestInfo) -> Self {
        let os = info.operating_system.unwrap_or_default();
        Self {
            machine_id: info.machine_id,
            boot_id: info.boot_id,
            dmi_uuid: info.dmi_uuid,
            host_name: info.host_name,
            os: Os { id: os.id, name: os.name, pretty_name: os.pretty_name, version_id: os.version_id },
            kernel_release: info.kernel_release,
            machine: info.machine,
            agent_version: info.agent_version,
            capabilities: info.capabilities,
        }
    }
}

impl From<v1::VirtualMachineEvent> for Event {
    fn from(happened: v1::VirtualMachineEvent) -> Self {
        let (what, details) = match happened.kind {
            Some(Kind::PowerChanged(change)) => {
                ("power-changed", Details::Power { power: words::power(change.power()) })
            }
            Some(Kind::GuestReset(_)) => ("guest-reset", Details::None {}),
            Some(Kind::SessionOpened(opened)) => (
                "session-opened",
                Details::Opened {
                    after_milliseconds: opened.after_milliseconds,
                    rebooted: opened.rebooted,
                    guest: opened.guest.map(|info| Box::new(info.into())),
                },
            ),
            Some(Kind::SessionClosed(closed)) => {
                ("session-closed", Details::Closed { reason: closed.reason })
            }
            Some(Kind::GuestEvent(event)) => from_guest(event),
            None => ("unknown", Details::None {}),
        };
        Self { time: happened.time.map(rfc3339), name: happened.name, what, details }
    }
}

fn from_guest(event: v1::Event) -> (&'static str, Details) {
    let (name, mode) = match event.kind {
        Some(event::Kind::AgentReady(_)) => ("agent-ready", None),
        Some(event::Kind::Heartbeat(_)) => ("heartbeat", None),
        Some(event::Kind::AgentStopping(_)) => ("agent-stopping", None),
        Some(event::Kind::ShutdownRequested(request)) => ("shutdown-requested", Some(request.mode)),
        None => ("unknown", None),
    };
    let guest_time = event.time.map(rfc3339);
    (name, Details::Guest(FromGuest { sequence: event.sequence, guest_time, mode }))
}
