//! Which guests may run beside each other. Tests run at the same time on a machine with few processors: most do not
//! mind, and each of their guests has one processor; what measures, or has a guest with several busy processors, has
//! the machine to itself.
//!
//! Whoever starts a guest has a turn ([`beside`]), and so has all else that the same thread starts as long as it lasts.
//! A test that takes [`alone`] first waits for the end of the others' turns, and nobody new begins meanwhile.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// Who runs: tests are told apart by their threads.
struct Running {
    /// How many turns a thread has.
    beside: Option<HashMap<ThreadId, usize>>,
    alone: Option<ThreadId>,
    /// How many threads wait for [`alone`].
    waiting: usize,
}

impl Running {
    fn has_turn(&self, thread: ThreadId) -> bool {
        self.alone == Some(thread) || self.beside.as_ref().is_some_and(|all| all.contains_key(&thread))
    }

    fn others(&self, thread: ThreadId) -> bool {
        self.beside.iter().flatten().any(|(other, _)| *other != thread)
    }
}

struct Turns {
    running: Mutex<Running>,
    changed: Condvar,
}

static TURNS: Turns = Turns::new();

/// A turn of the thread that took it. Dropping it, anywhere, ends it.
#[must_use = "it lasts as long as this"]
pub struct Beside(&'static Turns, ThreadId);

/// The machine is one thread's. Dropping it gives the others their turns.
#[must_use = "it lasts as long as this"]
pub struct Alone(&'static Turns);

/// Waits until no other thread is, or wants to be, alone; at once if this thread has a turn already. To be taken
/// before any lock under which a guest may be started.
pub fn beside() -> Beside {
    TURNS.beside()
}

/// Waits until no other thread has a turn. A test takes it before it starts anything.
pub fn alone() -> Alone {
    TURNS.alone()
}

impl Turns {
    const fn new() -> Self {
        let running = Running { beside: None, alone: None, waiting: 0 };
        Self { running: Mutex::new(running), changed: Condvar::new() }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed<'r>(&self, running: MutexGuard<'r, Running>) -> MutexGuard<'r, Running> {
        self.changed.wait(running).unwrap_or_else(PoisonError::into_inner)
    }

    fn beside(&'static self) -> Beside {
        let thread = thread::current().id();
        let mut running = self.running();
        while !running.has_turn(thread) && (running.alone.is_some() || running.waiting > 0) {
            running = self.changed(running);
        }
        *running.beside.get_or_insert_default().entry(thread).or_default() += 1;
        Beside(self, thread)
    }

    fn alone(&'static self) -> Alone {
        let thread = thread::current().id();
        let mut running = self.running();
        assert!(!running.has_turn(thread), "a test is alone from its start on");
        running.waiting += 1;
        while running.alone.is_some() || running.others(thread) {
            running = self.changed(running);
        }
        running.waiting -= 1;
        running.alone = Some(thread);
        Alone(self)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let Self(turns, thread) = self;
        let mut running = turns.running();
        let all = running.beside.get_or_insert_default();
        if let Some(count) = all.get_mut(thread) {
            *count -= 1;
            if *count == 0 {
                all.remove(thread);
            }
        }
        turns.changed.notify_all();
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.running().alone = None;
        self.0.changed.notify_all();
    }
}

impl std::fmt::Debug for Beside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Beside").field(&self.1).finish()
    }
}

#[cfg(test)]
#[allow(unused_imports, reason = "what has no test harness has no tests")]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_is_alone_has_no_guests_beside() {
        const LONG: Duration = Duration::from_millis(50);
        static TURNS: Turns = Turns::new();
        let first = TURNS.beside();
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let lonely = thread::spawn(move || {
            let _alone = TURNS.alone();
            // Its own guests are no hindrance.
            let _own = [TURNS.beside(), TURNS.beside()];
            tell.send(()).unwrap();
            ended.recv().unwrap();
        });
        assert_eq!(told.recv_timeout(LONG), Err(RecvTimeoutError::Timeout));
        // A test that runs gets on: otherwise each would wait for the other.
        drop(TURNS.beside());
        drop(first);
        told.recv().unwrap();
        let (tell, told) = channel();
        let next = thread::spawn(move || {
            let _turn = TURNS.beside();
            tell.send(()).unwrap();
        });
        assert_eq!(told.recv_timeout(LONG), Err(RecvTimeoutError::Timeout));
        end.send(()).unwrap();
        told.recv().unwrap();
        lonely.join().unwrap();
        next.join().unwrap();
    }
}
