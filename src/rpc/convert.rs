//! The guest's events and state as messages.

use std::net::IpAddr;
use std::time::SystemTime;

use crate::guest::events::{Event, News, Opening, Position, Recorded};
use crate::guest::network::hardware_address;
use crate::guest::state::{FileSystem, Link, State, UserSession};
use crate::wire::proto::v1;
use crate::wire::proto::v1::event::Kind;

/// What a watcher is told, as a message.
pub fn news(news: News) -> v1::Event {
    match news {
        News::Event(recorded) => event(&recorded),
        News::Tick(sequence) => message(sequence, SystemTime::now(), Kind::Heartbeat(v1::Heartbeat {})),
        News::Restart(opening) => ready(opening),
    }
}

/// The message that says where a stream begins.
pub fn ready(opening: Opening) -> v1::Event {
    let ready = v1::AgentReady {
        run_id: opening.position.run_id,
        resumed: opening.state.is_none(),
        missed: opening.missed,
        state: opening.state.as_ref().map(state),
    };
    message(opening.position.sequence, SystemTime::now(), Kind::AgentReady(ready))
}

fn message(sequence: u64, time: SystemTime, kind: Kind) -> v1::Event {
    v1::Event { sequence, time: Some(time.into()), kind: Some(kind) }
}

fn event(recorded: &Recorded) -> v1::Event {
    let kind = match &recorded.event {
        Event::Started { first_since_boot } => {
            Kind::AgentStarted(v1::AgentStarted { first_since_boot: *first_since_boot })
        }
        Event::Stopping => Kind::AgentStopping(v1::AgentStopping {}),
        Event::ShutdownRequested(mode) => {
            Kind::ShutdownRequested(v1::ShutdownRequested { mode: mode.to_string() })
        }
        Event::ShutdownBegun => Kind::ShutdownBegun(v1::ShutdownBegun {}),
        Event::LinksChanged(links) => {
            Kind::InterfacesChanged(v1::InterfacesChanged { interfaces: links.iter().map(link).collect() })
        }
        Event::Mounted(mounted) => {
            Kind::FileSystemMounted(v1::FileSystemMounted { file_system: Some(file_system(mounted)) })
        }
        Event::Unmounted(unmounted) => {
            Kind::FileSystemUnmounted(v1::FileSystemUnmounted { file_system: Some(file_system(unmounted)) })
        }
        Event::LoggedIn(session) => {
            Kind::UserLoggedIn(v1::UserLoggedIn { session: Some(user_session(session)) })
        }
        Event::LoggedOut(session) => {
            Kind::UserLoggedOut(v1::UserLoggedOut { session: Some(user_session(session)) })
        }
        Event::ClockJumped { milliseconds } => {
            Kind::ClockJumped(v1::ClockJumped { milliseconds: *milliseconds })
        }
        Event::Suspending => Kind::Suspending(v1::Suspending {}),
        Event::Resumed => Kind::Resumed(v1::Resumed {}),
        Event::Frozen { file_systems, holder, deadline } => Kind::Frozen(v1::Frozen {
            file_systems: u32::try_from(*file_systems).unwrap_or(u32::MAX),
            holder: holder.clone(),
            deadline_seconds: u32::try_from(deadline.as_secs()).unwrap_or(u32::MAX),
        }),
        Event::Thawed { by_itself } => Kind::Thawed(v1::Thawed { by_itself: *by_itself }),
    };
    message(recorded.sequence, recorded.time, kind)
}

/// The whole state as a message.
pub fn state(state: &State) -> v1::GuestState {
    v1::GuestState {
        interfaces: state.links.iter().map(link).collect(),
        file_systems: state.file_systems.iter().map(file_system).collect(),
        users: state.users.iter().map(user_session).collect(),
    }
}

/// A place in the sequence of events as a message.
pub fn position(position: Position) -> v1::Position {
    v1::Position { run_id: position.run_id, sequence: position.sequence }
}

fn link(link: &Link) -> v1::NetworkInterface {
    let address = |(ip, prefix): &(IpAddr, u32)| format!("{ip}/{prefix}");
    v1::NetworkInterface {
        name: link.name.clone(),
        hardware_address: link.hardware_address.map(hardware_address).unwrap_or_default(),
        running: link.running,
        addresses: link.addresses.iter().map(address).collect(),
    }
}

fn file_system(file_system: &FileSystem) -> v1::MountedFileSystem {
    v1::MountedFileSystem {
        mount_point: file_system.mount_point.clone(),
        source: file_system.source.clone(),
        r#type: file_system.kind.clone(),
    }
}

fn user_session(session: &UserSession) -> v1::UserSession {
    v1::UserSession {
        id: session.id.clone(),
        user: session.user.clone(),
        terminal: session.terminal.clone(),
        remote_host: session.remote_host.clone(),
    }
}
