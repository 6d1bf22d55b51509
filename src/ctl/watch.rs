//! `guestctl watch [NAME]`: what happens from now on, one line for each event.

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, json, words};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{Event, PowerState, VirtualMachineEvent, WatchVirtualMachinesRequest, event};

/// Shows events until the daemon ends.
///
/// # Errors
/// If the VM is unknown, the daemon ends, events were lost, or standard output cannot be written.
pub async fn run(
    mut client: Client,
    printer: &mut Printer,
    name: Option<String>,
    heartbeats: bool,
) -> Result<(), Error> {
    let name = name.unwrap_or_default();
    let request = WatchVirtualMachinesRequest { name: name.clone() };
    let mut events = answer(client.watch_virtual_machines(request), &name).await?;
    loop {
        let event = events.message().await.map_err(|status| Error::of_call(status, &name))?;
        let event = event.ok_or(Error::Closed)?;
        if heartbeats || !is_heartbeat(&event) {
            printer.line(&json::Event::from(event.clone()), || line(&event))?;
        }
    }
}

fn is_heartbeat(event: &VirtualMachineEvent) -> bool {
    matches!(&event.kind, Some(Kind::GuestEvent(Event { kind: Some(event::Kind::Heartbeat(_)), .. })))
}

fn line(event: &VirtualMachineEvent) -> String {
    format!("{}  {}  {}", words::time(event.time.as_ref()), event.name, words(event))
}

fn words(event: &VirtualMachineEvent) -> String {
    match &event.kind {
        Some(Kind::PowerChanged(change)) => match change.power() {
            PowerState::Unspecified => "power unknown".to_owned(),
            PowerState::Running => "power on".to_owned(),
            PowerState::Paused => "paused".to_owned(),
            PowerState::Off => "power off".to_owned(),
        },
        Some(Kind::GuestReset(_)) => "guest reset".to_owned(),
        Some(Kind::SessionOpened(opened)) => {
            let tenths = opened.after_milliseconds / 100;
            let boot = if opened.rebooted { " (new boot)" } else { "" };
            format!("session opened after {}.{} s{boot}", tenths / 10, tenths % 10)
        }
        Some(Kind::SessionClosed(closed)) => format!("session closed: {}", closed.reason),
        Some(Kind::GuestEvent(event)) => match &event.kind {
            Some(event::Kind::AgentReady(_)) => "agent ready".to_owned(),
            Some(event::Kind::Heartbeat(_)) => "heartbeat".to_owned(),
            Some(event::Kind::AgentStopping(_)) => "agent stopping".to_owned(),
            Some(event::Kind::ShutdownRequested(request)) => format!("shutdown requested: {}", request.mode),
            None => "an event that this guestctl does not know".to_owned(),
        },
        None => "something that this guestctl does not know".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1;

    #[test]
    fn lines() {
        let opened = |rebooted| {
            Kind::SessionOpened(v1::SessionOpened { guest: None, after_milliseconds: 2345, rebooted })
        };
        let guest = |kind| Kind::GuestEvent(Event { kind: Some(kind), ..Event::default() });
        let cases = [
            (opened(true), "session opened after 2.3 s (new boot)"),
            (opened(false), "session opened after 2.3 s"),
            (Kind::PowerChanged(v1::PowerChanged { power: PowerState::Off.into() }), "power off"),
            (Kind::GuestReset(v1::GuestReset {}), "guest reset"),
            (Kind::SessionClosed(v1::SessionClosed { reason: "why".into() }), "session closed: why"),
            (guest(event::Kind::AgentStopping(v1::AgentStopping {})), "agent stopping"),
            (
                guest(event::Kind::ShutdownRequested(v1::ShutdownRequested { mode: "halt".into() })),
                "shutdown requested: halt",
            ),
        ];
        let time = Some(prost_types::Timestamp { seconds: 0, nanos: 0 });
        for (kind, expected) in cases {
            let event = VirtualMachineEvent { time, name: "a".into(), kind: Some(kind) };
            assert_eq!(line(&event), format!("1970-01-01T00:00:00.000Z  a  {expected}"));
        }
    }
}
