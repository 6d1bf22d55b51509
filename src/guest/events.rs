//! What happens in this guest: numbered, remembered for a while, and told to everyone who watches.
//!
//! A watcher that comes back within the same run of the agent gets what it missed; one that was away for too
//! long, or is too slow, gets the whole [`State`] instead. Nobody who watches can slow down anybody else.
//!
//! ```text
//! monitors, verbs ──tell──▶ Hub: [ring of the newest events] [state] ──▶ Watcher (a place in the ring)
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::guest::disks::identity::KnownDisk;
use crate::guest::freeze::end::End;
use crate::guest::power::Mode;
use crate::guest::state::{FileSystem, Health, Link, State, UserSession};
use crate::guest::topology::{Known, Node};

/// Events that are remembered.
const REMEMBERED: usize = 256;

/// Time between two ticks: the heartbeat of the API, and the watchdog of the service manager.
pub const TICK: Duration = Duration::from_secs(10);

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The agent began to run.
    Started {
        /// For the first time since the guest booted.
        first_since_boot: bool,
    },
    /// The agent is ending.
    Stopping,
    /// The init system accepted a shutdown that the agent was asked for.
    ShutdownRequested(Mode),
    /// The init system has begun to shut down, whoever asked.
    ShutdownBegun,
    /// Links or addresses changed; all of them as they are now.
    LinksChanged(Vec<Link>),
    /// A file system was mounted.
    Mounted(FileSystem),
    /// A file system was unmounted.
    Unmounted(FileSystem),
    /// A user logged in.
    LoggedIn(UserSession),
    /// A user's session ended.
    LoggedOut(UserSession),
    /// The clock was set.
    ClockJumped {
        /// Forward if positive.
        milliseconds: i64,
    },
    /// The guest is about to be suspended.
    Suspending,
    /// The guest goes on after that.
    Resumed,
    /// File systems are frozen.
    Frozen {
        /// How many.
        file_systems: usize,
        /// Who asked for it.
        holder: String,
        /// They are thawed after this time, whatever happens.
        deadline: Duration,
    },
    /// They are not frozen any more, or, if the freeze failed, were never all frozen.
    Thawed {
        /// Who had asked for the freeze.
        holder: String,
        /// What ended it.
        end: End,
        /// Why a snapshot of that time is not consistent, or what else is wrong; empty if all is well.
        problem: String,
        /// The id of the receipt; empty if there is none.
        receipt: String,
        /// What the snapshot is worth by it, in one word; empty without one.
        level: &'static str,
    },
    /// A disk is there, and known.
    DiskAdded(Arc<KnownDisk>),
    /// A disk is gone.
    DiskRemoved {
        /// As it was.
        disk: Arc<KnownDisk>,
        /// What it was used for, in words: mount points, swap space, what is made of it.
        in_use: Vec<String>,
    },
    /// A disk has another size.
    DiskResized {
        /// As it is now.
        disk: Arc<KnownDisk>,
        /// The size that it had, in bytes.
        before: u64,
    },
    /// Something else of a disk is other than before: its partitions, its holders, whether it can be written to.
    DiskChanged(Arc<KnownDisk>),
    /// The agent mounted a disk.
    DiskMounted {
        /// Which one.
        disk: Arc<KnownDisk>,
        /// Where.
        mount_point: String,
        /// Such as `ext4`.
        kind: String,
    },
    /// A disk does not do what it should.
    DiskFailed {
        /// Which one.
        disk: Arc<KnownDisk>,
        /// What does not work, and why, in words.
        problem: String,
    },
    /// It is known that the guest runs somewhere else.
    TopologyChanged(Arc<Known>),
    /// The host half told a topology that is not taken.
    TopologyRefused {
        /// Why, in words.
        problem: String,
    },
    /// The Node of this guest has changed, or has been deleted.
    NodeChanged(Option<Arc<Node>>),
    /// The result of the boot or the state of services has changed.
    HealthChanged(Arc<Health>),
}

/// An event with its number and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// 1, 2, 3, … in this run of the agent.
    pub sequence: u64,
    /// The guest's clock.
    pub time: SystemTime,
    /// What happened.
    pub event: Event,
}

/// A place in the sequence of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The run of the agent.
    pub run_id: String,
    /// The last event seen.
    pub sequence: u64,
}

/// Where a watcher stands when it begins, or begins anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// The events after this one follow.
    pub position: Position,
    /// Events between the place asked for and this one that are lost; their outcome is in the state.
    pub missed: u64,
    /// Absent when every event since the place asked for follows.
    pub state: Option<State>,
}

/// What a watcher is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The next event.
    Event(Arc<Recorded>),
    /// Nothing happened for the time of a tick; the number of the newest event.
    Tick(u64),
    /// The watcher was too slow and goes on from here.
    Restart(Opening),
}

/// Where events are told, remembered and heard.
#[derive(Debug)]
pub struct Hub {
    log: Mutex<Log>,
    run_id: String,
    /// Counts up with every event and tick.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Log {
    state: State,
    newest: u64,
    ticks: u64,
    events: VecDeque<Arc<Recorded>>,
}

impl Default for Hub {
    fn default() -> Self {
        Self::new(String::new())
    }
}

impl Hub {
    /// A hub for the run of the agent that is called `run_id`.
    pub fn new(run_id: String) -> Self {
        Self { log: Mutex::default(), run_id, changes: watch::Sender::new(0) }
    }

    /// Remembers the event, and tells every watcher.
    pub fn tell(&self, event: Event) {
        {
            let mut log = self.log();
            let time = SystemTime::now();
            log.state.apply(&event, time);
            log.newest += 1;
            let recorded = Recorded { sequence: log.newest, time, event };
            if log.events.len() == REMEMBERED {
                log.events.pop_front();
            }
            log.events.push_back(Arc::new(recorded));
        }
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// The agent's next tick: the time to try something again, without a wakeup of one's own.
    pub async fn next_tick(self: &Arc<Self>) {
        let (_, mut watcher) = self.watch(None);
        while !matches!(watcher.next().await, News::Tick(_)) {}
    }

    /// Tells every watcher that has nothing else to hear that the agent is there.
    pub fn tick(&self) {
        self.log().ticks += 1;
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// The guest as it is now, and the newest event that it includes.
    pub fn state(&self) -> (Position, State) {
        let log = self.log();
        (self.position(log.newest), log.state.clone())
    }

    /// Watches all events after `after`, or from now on.
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
        Opening {
            position: self.position(log.newest),
            missed: log.newest - seen,
            state: Some(log.state.clone()),
        }
    }

    fn position(&self, sequence: u64) -> Position {
        Position { run_id: self.run_id.clone(), sequence }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // Nothing that is done under the lock leaves the log half changed.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the sequence of events that moves on.
#[derive(Debug)]
pub struct Watcher {
    hub: Arc<Hub>,
    changes: watch::Receiver<u64>,
    seen: u64,
    ticks: u64,
}

impl Watcher {
    /// The next news. Dropping the future loses nothing.
    pub async fn next(&mut self) -> News {
        loop {
            self.changes.mark_unchanged();
            if let Some(news) = self.at_hand() {
                return news;
            }
            // The sender lives in the hub, which this watcher holds.
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

    fn jump(milliseconds: i64) -> Event {
        Event::ClockJumped { milliseconds }
    }

    async fn jumps(watcher: &mut Watcher, count: usize) -> Vec<(u64, i64)> {
        let mut heard = Vec::new();
        for _ in 0..count {
            match watcher.next().await {
                News::Event(recorded) => match recorded.event {
                    Event::ClockJumped { milliseconds } => heard.push((recorded.sequence, milliseconds)),
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
        let file_system =
            FileSystem { mount_point: "/data".into(), source: "/dev/vdb".into(), kind: "xfs".into() };
        hub.tell(Event::Mounted(file_system.clone()));
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
