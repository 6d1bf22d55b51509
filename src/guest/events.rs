//! What happens in this guest, told to everyone who listens.

use std::time::Duration;

use tokio::sync::broadcast;

use crate::guest::power::Mode;

/// Events that a listener may be behind before it loses some.
const CAPACITY: usize = 64;

/// Time between two ticks: the heartbeat of the API, and the watchdog of the service manager.
pub const TICK: Duration = Duration::from_secs(10);

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The agent's one periodic tick.
    Tick,
    /// The agent is ending.
    Stopping,
    /// The init system accepted a shutdown.
    ShutdownRequested(Mode),
}

/// Where events are told and heard.
#[derive(Debug)]
pub struct Hub(broadcast::Sender<Event>);

impl Default for Hub {
    fn default() -> Self {
        Self(broadcast::Sender::new(CAPACITY))
    }
}

impl Hub {
    /// Tells every listener; without any, nothing happens.
    pub fn tell(&self, event: Event) {
        // An error only says that nobody listens.
        let _ = self.0.send(event);
    }

    /// All events from now on.
    pub fn listen(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }
}
