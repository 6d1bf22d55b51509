//! The guest's events and state as messages.

use std::sync::Arc;
use std::time::SystemTime;

use crate::guest::events::{Kind, News, Opening, Position};
pub use crate::guest::messages::{disk, node, topology};
use crate::guest::topology::Topology;
use crate::wire::proto::v1;

/// Maximum number of disks in a message about a state; further ones are left out. A host half accepts at most
/// 256 KiB in a message by default.
const MOST_DISKS: usize = 256;

/// Converts a notification for a watcher to a message.
pub fn news(news: News) -> v1::Event {
    match news {
        News::Event(recorded) => message(recorded.sequence, recorded.time, recorded.event.clone()),
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
        state: opening.state.map(|known| Box::new(state(known))),
    };
    message(opening.position.sequence, SystemTime::now(), Kind::AgentReady(ready))
}

fn message(sequence: u64, time: SystemTime, kind: Kind) -> v1::Event {
    v1::Event { sequence, time: Some(time.into()), kind: Some(kind) }
}

/// The whole state, as far as it may go over the wire.
pub fn state(known: Arc<v1::GuestState>) -> v1::GuestState {
    let mut state = Arc::unwrap_or_clone(known);
    state.disks.truncate(MOST_DISKS);
    state
}

/// Converts the topology that a host half reports for the guest.
pub fn told(topology: v1::Topology) -> Topology {
    let v1::Topology { region, zone, host, labels } = topology;
    Topology { region, zone, host, labels: labels.into_iter().collect() }
}

/// A place in the sequence of events as a message.
pub fn position(position: Position) -> v1::Position {
    v1::Position { run_id: position.run_id, sequence: position.sequence }
}
