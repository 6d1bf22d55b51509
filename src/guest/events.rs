//! Events of this guest: numbered, remembered for a while, and sent to every watcher.
//!
//! A watcher that comes back within the same run of the agent gets the events that it missed. One that was away
//! for too long, or is too slow, gets the whole [`GuestState`] instead. No watcher can slow down another one.
//!
//! ```text
//! monitors, verbs ──tell──▶ Hub: [ring of the newest events] [state] ──▶ Watcher (a position in the ring)
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

pub use crate::events::Kind;
use crate::events::state::{Kept, Unbounded};
use crate::wire::proto::v1::GuestState;

/// Number of events that are remembered.
const REMEMBERED: usize = 256;

/// Time between two ticks: the heartbeat of the API, and the watchdog of the service manager.
pub const TICK: Duration = Duration::from_secs(10);

/// Event with its number and time.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// Sequence number: 1, 2, 3, … in this run of the agent.
    pub sequence: u64,
    /// Time of the event, by the guest's clock.
    pub time: SystemTime,
    /// Event with its details.
    pub event: Kind,
}

/// Position in the sequence of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// Identifier of the run of the agent.
    pub run_id: String,
    /// Number of the last event seen.
    pub sequence: u64,
}

/// Position of a watcher when it begins, or begins again.
#[derive(Debug, Clone, PartialEq)]
pub struct Opening {
    /// Position after which events follow.
    pub position: Position,
    /// Number of lost events between the requested position and this one; the state includes their effects.
    pub missed: u64,
    /// State of the guest; `None` if every event since the requested position follows.
    pub state: Option<Arc<GuestState>>,
}

/// Message to a watcher.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// Next event in order.
    Event(Arc<Recorded>),
    /// No event for the time of a tick; carries the number of the newest event.
    Tick(u64),
    /// The watcher was too slow: events were lost, and it continues from here.
    Restart(Opening),
}

/// Hub that records events and sends them to watchers.
#[derive(Debug)]
pub struct Hub {
    log: Mutex<Log>,
    run_id: String,
    /// Counter that increases with every event and tick, to wake watchers.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Log {
    state: Kept,
    newest: u64,
    ticks: u64,
    events: VecDeque<Arc<Recorded>>,
}

impl Log {
    fn state(&self) -> Arc<GuestState> {
        self.state.state.clone().unwrap_or_default()
    }
}

impl Default for Hub {
    fn default() -> Self {
        Self::new(String::new())
    }
}

impl Hub {
    /// Creates a hub for the run of the agent with the identifier `run_id`.
    pub fn new(run_id: String) -> Self {
        Self { log: Mutex::default(), run_id, changes: watch::Sender::new(0) }
    }

    /// Records the event and notifies every watcher.
    pub fn tell(&self, event: impl Into<Kind>) {
        let event = event.into();
        {
            let mut log = self.log();
            let time = SystemTime::now();
            // Without bounds no event can be refused.
            let _ = log.state.apply(&event, Some(time.into()), &Unbounded);
            log.newest += 1;
            let recorded = Recorded { sequence: log.newest, time, event };
            if log.events.len() == REMEMBERED {
                log.events.pop_front();
            }
            log.events.push_back(Arc::new(recorded));
        }
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Completes at the agent's next tick: for retries that need no wakeup of their own.
    pub async fn next_tick(self: &Arc<Self>) {
        let (_, mut watcher) = self.watch(None);
        while !matches!(watcher.next().await, News::Tick(_)) {}
    }

    /// Sends a tick to every watcher without a pending event, as a sign of life.
    pub fn tick(&self) {
        self.log().ticks += 1;
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Returns the present state of the guest, and the newest event that it includes.
    pub fn state(&self) -> (Position, Arc<GuestState>) {
        let log = self.log();
        (self.position(log.newest), log.state())
    }

    /// Begins to watch all events after `after`, or from now on.
    pub fn watch(self: &Arc<Self>, after: Option<&Position>) -> (Opening, Watcher) {
        let changes = self.changes.subscribe();
        let log = self.log();
        let known = after.filter(|after| after.run_id == self.run_id && after.sequence <= log.newest);
        let opening = match known {
            Some(after) if log.newest - after.sequence <= log.events.len() as u64 => {
                Opening { position: after.clone(), missed: 0, state: None }
            }
            Some(after) => self.restart(&log, after.sequence),
            None => self.restart(&log, log.newest),
        };
        let watcher =
            Watcher { hub: Arc::clone(self), changes, seen: opening.position.sequence, ticks: log.ticks };
        (opening, watcher)
    }

    fn restart(&self, log: &Log, seen: u64) -> Opening {
        Opening { position: self.position(log.newest), missed: log.newest - seen, state: Some(log.state()) }
    }

    fn position(&self, sequence: u64) -> Position {
        Position { run_id: self.run_id.clone(), sequence }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // No step under the lock can leave the log half changed, so a poisoned lock is safe to use.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watcher with its position in the sequence of events.
#[derive(Debug)]
pub struct Watcher {
    hub: Arc<Hub>,
    changes: watch::Receiver<u64>,
    seen: u64,
    ticks: u64,
}

impl Watcher {
    /// Returns the next message. Dropping the future loses nothing.
    pub async fn next(&mut self) -> News {
        loop {
            self.changes.mark_unchanged();
            if let Some(news) = self.at_hand() {
                return news;
            }
            // Cannot fail: the sender is in the hub, which this watcher keeps alive.
            let _ = self.changes.changed().await;
        }
    }

    fn at_hand(&mut self) -> Option<News> {
        let log = self.hub.log();
        if log.newest > self.seen {
            let behind = log.newest - self.seen;
            let place = (log.events.len() as u64).checked_sub(behind);
            self.ticks = log.ticks;
            let event = place.and_then(|place| log.events.get(usize::try_from(place).ok()?));
            if let Some(event) = event {
                self.seen += 1;
                return Some(News::Event(Arc::clone(event)));
            }
            let opening = self.hub.restart(&log, self.seen);
            self.seen = log.newest;
            return Some(News::Restart(opening));
        }
        (std::mem::replace(&mut self.ticks, log.ticks) != log.ticks).then_some(News::Tick(log.newest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{ClockJumped, FileSystemMounted, MountedFileSystem};

    fn jump(milliseconds: i64) -> ClockJumped {
        ClockJumped { milliseconds }
    }

    async fn jumps(watcher: &mut Watcher, count: usize) -> Vec<(u64, i64)> {
        let mut heard = Vec::new();
        for _ in 0..count {
            match watcher.next().await {
                News::Event(recorded) => match recorded.event {
                    Kind::ClockJumped(ClockJumped { milliseconds }) => {
                        heard.push((recorded.sequence, milliseconds));
                    }
                    ref other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            }
        }
        heard
    }

    #[tokio::test]
    async fn a_watcher_hears_everything_in_order_and_ticks_only_in_between() {
        let hub = Arc::new(Hub::new("run".to_owned()));
        hub.tell(jump(0));
        let (opening, mut watcher) = hub.watch(None);
        assert_eq!((opening.position.sequence, opening.missed), (1, 0));
        hub.tell(jump(1));
        hub.tick();
        hub.tell(jump(2));
        assert_eq!(jumps(&mut watcher, 2).await, [(2, 1), (3, 2)]);
        hub.tick();
        assert_eq!(watcher.next().await, News::Tick(3));
    }

    #[tokio::test]
    async fn who_comes_back_in_time_gets_what_it_missed() {
        let hub = Arc::new(Hub::new("run".to_owned()));
        for number in 1..=10 {
            hub.tell(jump(number));
        }
        let after = Position { run_id: "run".to_owned(), sequence: 7 };
        let (opening, mut watcher) = hub.watch(Some(&after));
        assert_eq!(opening, Opening { position: after, missed: 0, state: None });
        assert_eq!(jumps(&mut watcher, 3).await, [(8, 8), (9, 9), (10, 10)]);
    }

    #[tokio::test]
    async fn who_comes_back_late_or_from_another_run_gets_the_state() {
        let hub = Arc::new(Hub::new("run".to_owned()));
        for number in 0..1000 {
            hub.tell(jump(number));
        }
        for (run_id, sequence, missed) in [("run", 5, 995), ("other", 5, 0), ("run", 5000, 0)] {
            let after = Position { run_id: run_id.to_owned(), sequence };
            let (opening, _) = hub.watch(Some(&after));
            assert_eq!((opening.position.sequence, opening.missed), (1000, missed), "{run_id} {sequence}");
            assert!(opening.state.is_some());
        }
    }

    #[tokio::test]
    async fn who_is_too_slow_begins_anew_with_the_state() {
        let hub = Arc::new(Hub::new("run".to_owned()));
        let (_, mut watcher) = hub.watch(None);
        let file_system = MountedFileSystem {
            mount_point: "/data".into(),
            source: "/dev/vdb".into(),
            r#type: "xfs".into(),
        };
        hub.tell(FileSystemMounted { file_system: Some(file_system.clone()) });
        for number in 0..300 {
            hub.tell(jump(number));
        }
        match watcher.next().await {
            News::Restart(opening) => {
                assert_eq!((opening.missed, opening.position.sequence), (301, 301));
                assert_eq!(opening.state.unwrap().file_systems, [file_system]);
            }
            other => panic!("{other:?}"),
        }
        hub.tell(jump(-1));
        assert_eq!(jumps(&mut watcher, 1).await, [(302, -1)]);
    }
}
