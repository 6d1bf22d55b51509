//! `guestctl watch [NAME]`: shows new events and recent ones, one on each line.

use crate::text;
use std::time::{Duration, SystemTime};

use tonic::Streaming;

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, io_errors, json, kinds, words};
use crate::events::happening;
use crate::text::colours::{Colours, Style};
use crate::wire::proto::v1::virtual_machine_event::Kind;
use crate::wire::proto::v1::{
    LoadBalancerChanged, PowerState, VirtualMachineEvent, VolumeAction, VolumeChanged,
    WatchVirtualMachinesRequest,
};

/// Selection of the events to show.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// VM that events are about; `None` for all.
    pub name: Option<String>,
    /// Names of the kinds of events; empty for all but heartbeats.
    pub kinds: Vec<String>,
    /// True to show heartbeats, too.
    pub heartbeats: bool,
    /// Period whose past events are shown first.
    pub since: Option<Duration>,
}

impl Filter {
    fn wants(&self, kind: &str) -> bool {
        if kind == "heartbeat" && self.heartbeats {
            return true;
        }
        if self.kinds.is_empty() { kind != "heartbeat" } else { self.kinds.iter().any(|name| name == kind) }
    }
}

/// Shows events until the daemon ends, or standard output is closed by its reader.
///
/// # Errors
/// Fails if the VM is unknown, the daemon ends, events were lost, or standard output cannot be written.
pub async fn run(client: Client, printer: &mut Printer, filter: Filter) -> Result<(), Error> {
    let name = filter.name.clone().unwrap_or_default();
    let mut events = open(client, &filter).await?;
    let mut unread = std::pin::pin!(Printer::unread());
    loop {
        let event = tokio::select! {
            event = events.message() => event.map_err(|status| Error::of_call(status, &name))?,
            () = &mut unread => return Ok(()),
        };
        show(printer, &filter, &event.ok_or(Error::Closed)?)?;
    }
}

/// Subscribes to the events of a daemon.
///
/// # Errors
/// Fails if the VM is unknown, or the daemon does not answer.
pub async fn open(mut client: Client, filter: &Filter) -> Result<Streaming<VirtualMachineEvent>, Error> {
    let name = filter.name.clone().unwrap_or_default();
    let since =
        filter.since.map(|span| SystemTime::now().checked_sub(span).unwrap_or(SystemTime::UNIX_EPOCH));
    let request = WatchVirtualMachinesRequest { name: name.clone(), since: since.map(Into::into) };
    answer(client.watch_virtual_machines(request), &name).await
}

/// Writes an event if the filter selects it.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn show(printer: &mut Printer, filter: &Filter, event: &VirtualMachineEvent) -> Result<(), Error> {
    if filter.wants(kinds::name(event)) {
        let colours = printer.colours();
        printer.line(&json::Event::from(event.clone()), || line(event, colours))?;
    }
    Ok(())
}

fn line(event: &VirtualMachineEvent, colours: Colours) -> String {
    let time = colours.paint(Style::Dim, &words::time(event.time.as_ref()));
    format!("{time}  {}  {}", colours.paint(Style::Bold, &event.name), words(event))
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
        Some(Kind::GuestSuspended(suspended)) => {
            format!("guest suspended to {}", words::suspended_to(*suspended))
        }
        Some(Kind::SessionOpened(opened)) => {
            let tenths = opened.after_milliseconds / 100;
            let boot = if opened.rebooted { " (new boot)" } else { "" };
            format!("session opened after {}.{} s{boot}", tenths / 10, tenths % 10)
        }
        Some(Kind::SessionClosed(closed)) => format!("session closed: {}", closed.reason),
        Some(Kind::VolumeChanged(changed)) => of_volume(changed),
        Some(Kind::LoadBalancerChanged(changed)) => of_load_balancer(changed),
        Some(Kind::IoError(error)) => io_errors::words(error),
        Some(Kind::GuestEvent(event)) => match &event.kind {
            Some(kind) => happening(kind).words(),
            None => "an event of a kind that this guestctl does not know".to_owned(),
        },
        None => "something of a kind that this guestctl does not know".to_owned(),
    }
}

fn of_volume(changed: &VolumeChanged) -> String {
    let what = match changed.action() {
        VolumeAction::Created => "created",
        VolumeAction::Removed => "removed",
        VolumeAction::Attached => "attached",
        VolumeAction::Detached => "detached",
        VolumeAction::Expanded => "expanded",
        VolumeAction::Reattached => "was missing, attached again",
        VolumeAction::Unspecified => "changed in a way that this guestctl does not know",
    };
    let claim = if changed.claim.is_empty() { String::new() } else { format!(" for {}", changed.claim) };
    let VolumeChanged { volume_id, name, cluster, bytes, by, .. } = changed;
    format!("volume {what}: {volume_id} ({name}{claim}, {}, cluster {cluster}), by {by}", text::size(*bytes))
}

fn of_load_balancer(changed: &LoadBalancerChanged) -> String {
    let LoadBalancerChanged { cluster, namespace, service, state, addresses, message, .. } = changed;
    let addresses =
        if addresses.is_empty() { String::new() } else { format!(" at {}", addresses.join(", ")) };
    let why = if message.is_empty() { String::new() } else { format!(": {message}") };
    format!("load balancer {state}: {namespace}/{service} of the cluster {cluster}{addresses}{why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{self, event};

    #[test]
    fn filters() {
        let filter = |kinds: &[&str], heartbeats| Filter {
            kinds: kinds.iter().map(|name| (*name).to_owned()).collect(),
            heartbeats,
            ..Filter::default()
        };
        let shown = |filter: Filter| {
            ["heartbeat", "guest-reset", "resumed"]
                .into_iter()
                .filter(|kind| filter.wants(kind))
                .collect::<Vec<_>>()
        };
        assert_eq!(shown(filter(&[], false)), ["guest-reset", "resumed"]);
        assert_eq!(shown(filter(&[], true)), ["heartbeat", "guest-reset", "resumed"]);
        assert_eq!(shown(filter(&["resumed"], false)), ["resumed"]);
        assert_eq!(shown(filter(&["resumed"], true)), ["heartbeat", "resumed"]);
        assert_eq!(shown(filter(&["heartbeat"], false)), ["heartbeat"]);
    }

    #[test]
    fn lines() {
        let opened = |rebooted| {
            Kind::SessionOpened(v1::SessionOpened { guest: None, after_milliseconds: 2345, rebooted })
        };
        let guest = |kind| Kind::GuestEvent(v1::Event { kind: Some(kind), ..v1::Event::default() });
        let interface = v1::NetworkInterface {
            name: "eth0".into(),
            running: true,
            addresses: vec!["192.0.2.7/24".into()],
            ..v1::NetworkInterface::default()
        };
        let down = v1::NetworkInterface { name: "eth1".into(), ..v1::NetworkInterface::default() };
        let file_system = v1::MountedFileSystem {
            mount_point: "/data".into(),
            source: "/dev/vdb".into(),
            r#type: "xfs".into(),
        };
        let session = v1::UserSession {
            id: "3".into(),
            user: "ann".into(),
            terminal: "pts/0".into(),
            remote_host: "192.0.2.9".into(),
        };
        let disk = v1::Disk {
            name: "vdb".into(),
            bus: "virtio".into(),
            bytes: 10 << 30,
            serials: vec![v1::SerialNumber { value: "data-1".into(), source: "virtio".into() }],
            ..v1::Disk::default()
        };
        let cases = [
            (opened(true), "session opened after 2.3 s (new boot)"),
            (opened(false), "session opened after 2.3 s"),
            (Kind::PowerChanged(v1::PowerChanged { power: PowerState::Off.into() }), "power off"),
            (Kind::GuestReset(v1::GuestReset {}), "guest reset"),
            (Kind::GuestSuspended(v1::GuestSuspended { to_disk: true }), "guest suspended to disk"),
            (Kind::SessionClosed(v1::SessionClosed { reason: "why".into() }), "session closed: why"),
            (guest(event::Kind::AgentStopping(v1::AgentStopping {})), "agent stopping"),
            (
                guest(event::Kind::ShutdownRequested(v1::ShutdownRequested { mode: "halt".into() })),
                "shutdown requested: halt",
            ),
            (
                guest(event::Kind::AgentReady(v1::AgentReady { missed: 3, ..v1::AgentReady::default() })),
                "agent ready, 3 events missed",
            ),
            (
                guest(event::Kind::InterfacesChanged(v1::InterfacesChanged {
                    interfaces: vec![interface, down],
                })),
                "interfaces changed: eth0 192.0.2.7/24; eth1 (down)",
            ),
            (
                guest(event::Kind::FileSystemMounted(v1::FileSystemMounted {
                    file_system: Some(file_system),
                })),
                "file system mounted: /data (xfs from /dev/vdb)",
            ),
            (
                guest(event::Kind::UserLoggedIn(v1::UserLoggedIn { session: Some(session) })),
                "user logged in: ann on pts/0 from 192.0.2.9",
            ),
            (
                guest(event::Kind::DiskAdded(v1::DiskAdded { disk: Some(disk.clone()) })),
                "disk added: vdb (virtio, 10 GiB, serial number data-1)",
            ),
            (
                guest(event::Kind::DiskRemoved(v1::DiskRemoved {
                    disk: Some(disk.clone()),
                    in_use: vec!["/data".into(), "swap on /dev/vdb2".into()],
                })),
                "disk removed while in use: vdb (virtio, 10 GiB, serial number data-1); \
                 it was used for /data, swap on /dev/vdb2",
            ),
            (
                guest(event::Kind::DiskResized(v1::DiskResized { disk: Some(disk), bytes_before: 5 << 29 })),
                "disk resized: vdb (virtio, 10 GiB, serial number data-1); it had 2.5 GiB",
            ),
            (
                guest(event::Kind::ClockJumped(v1::ClockJumped { milliseconds: -61_007 })),
                "clock jumped back by 61.007 s",
            ),
        ];
        let time = Some(prost_types::Timestamp { seconds: 0, nanos: 0 });
        for (kind, expected) in cases {
            let event = VirtualMachineEvent { time, name: "a".into(), kind: Some(kind) };
            assert_eq!(line(&event, Colours::Left), format!("1970-01-01T00:00:00.000Z  a  {expected}"));
        }
    }
}
