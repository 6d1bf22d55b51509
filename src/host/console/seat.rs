//! Seats at the consoles: each VM's console has one client, which another client may evict by force.
//!
//! ```text
//!  free ──take──▶ taken ──dropped──▶ free
//!                   │ take, by force ──▶ notified (its relay lets go) ──dropped──▶ free ──▶ taken by the other
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::host::caller::Caller;

/// Limits on the open consoles: of all users, and of users other than root.
const MOST: usize = 32;
const MOST_OF_OTHERS: usize = 24;
/// Time for an evicted client to release the console.
const LETTING_GO: Duration = Duration::from_secs(5);
/// Attempts to take a seat by force. An attempt fails if a third client takes the freed seat first.
const TRIES: usize = 3;

/// Reason why a client gets no seat.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refusal {
    /// Another client has the console.
    #[error("the console is in use by {who}, for {} s; --force takes it over, and ends that client", since.as_secs())]
    InUse {
        /// Caller that has it.
        who: String,
        /// Time since it took the console.
        since: Duration,
    },
    /// Root has the console, and another user must not evict it.
    #[error("the console is in use by {who}, and only root may take it over from root")]
    OfRoot {
        /// Caller that has it.
        who: String,
    },
    /// The limit of open consoles is reached.
    #[error("{0} consoles are open on this host, which is the limit; close one of them")]
    TooMany(usize),
    /// The evicted client does not release the console, or other clients are always faster.
    #[error("the client that has the console has not released it; try again")]
    Kept,
}

/// Seats of all VMs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Seats(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    taken: BTreeMap<String, Holder>,
    /// Number of seats taken so far; the next seat gets the next number.
    number: u64,
}

#[derive(Debug)]
struct Holder {
    number: u64,
    who: String,
    is_root: bool,
    since: SystemTime,
    /// Caller that evicts this holder; `None` until then.
    ended_by: watch::Sender<Option<String>>,
    /// Cancelled once the holder has released the console.
    free: CancellationToken,
}

/// Seat at the console of a VM; dropping it frees the console.
#[derive(Debug)]
pub struct Seat {
    seats: Seats,
    name: String,
    number: u64,
    ended_by: watch::Receiver<Option<String>>,
    /// Caller that was evicted for this seat; empty if there was none.
    pub taken_from: String,
}

impl Seat {
    /// Completes with the caller that evicts this seat, once there is one.
    pub async fn ended_by(&mut self) -> String {
        match self.ended_by.wait_for(Option::is_some).await.map(|by| by.clone()) {
            Ok(Some(by)) => by,
            // The table lives as long as this does.
            _ => std::future::pending().await,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut table = self.seats.table();
        if table.taken.get(&self.name).is_some_and(|holder| holder.number == self.number)
            && let Some(holder) = table.taken.remove(&self.name)
        {
            holder.free.cancel();
        }
    }
}

impl Seats {
    /// Takes the seat at the console of the VM with this name, for this caller, at this time.
    ///
    /// # Errors
    /// If another client has it, unless it is evicted `by_force` and releases the console in time.
    pub async fn take(
        &self,
        name: &str,
        caller: &Caller,
        by_force: bool,
        now: SystemTime,
    ) -> Result<Seat, Refusal> {
        let mut taken_from = String::new();
        for _ in 0..TRIES {
            let free = match self.try_take(name, caller, by_force, now)? {
                Attempt::Taken(mut seat) => {
                    seat.taken_from = taken_from;
                    return Ok(*seat);
                }
                Attempt::Ended { who, free } => {
                    taken_from = who;
                    free
                }
            };
            tokio::time::timeout(LETTING_GO, free.cancelled()).await.map_err(|_| Refusal::Kept)?;
        }
        Err(Refusal::Kept)
    }

    fn try_take(
        &self,
        name: &str,
        caller: &Caller,
        by_force: bool,
        now: SystemTime,
    ) -> Result<Attempt, Refusal> {
        let is_root = matches!(caller, Caller::User { uid: 0, .. });
        let mut table = self.table();
        if let Some(holder) = table.taken.get(name) {
            let who = holder.who.clone();
            if !by_force {
                let since = now.duration_since(holder.since).unwrap_or_default();
                return Err(Refusal::InUse { who, since });
            }
            if holder.is_root && !is_root {
                return Err(Refusal::OfRoot { who });
            }
            holder.ended_by.send_if_modified(|by| {
                let is_first = by.is_none();
                by.get_or_insert_with(|| caller.to_string());
                is_first
            });
            return Ok(Attempt::Ended { who, free: holder.free.clone() });
        }
        let others = table.taken.values().filter(|holder| !holder.is_root).count();
        if table.taken.len() >= MOST {
            return Err(Refusal::TooMany(MOST));
        }
        if !is_root && others >= MOST_OF_OTHERS {
            return Err(Refusal::TooMany(others));
        }
        table.number += 1;
        let (number, (ended_by, told)) = (table.number, watch::channel(None));
        let who = caller.to_string();
        let holder = Holder { number, who, is_root, since: now, ended_by, free: CancellationToken::new() };
        table.taken.insert(name.to_owned(), holder);
        let (name, taken_from) = (name.to_owned(), String::new());
        Ok(Attempt::Taken(Box::new(Seat { seats: self.clone(), name, number, ended_by: told, taken_from })))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic under the lock cannot leave the table half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of one attempt to take a seat.
enum Attempt {
    Taken(Box<Seat>),
    /// The current holder was notified to release the console.
    Ended {
        who: String,
        free: CancellationToken,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Caller {
        Caller::User { uid, name: None }
    }

    #[tokio::test(start_paused = true)]
    async fn one_has_it_until_another_takes_it_by_force() {
        let (seats, now) = (Seats::default(), SystemTime::UNIX_EPOCH);
        let mut first = seats.take("a", &user(1), false, now).await.unwrap();
        let later = now + Duration::from_secs(7);
        let in_use = Refusal::InUse { who: "uid:1".into(), since: Duration::from_secs(7) };
        assert_eq!(seats.take("a", &user(0), false, later).await.unwrap_err(), in_use);
        drop(seats.take("b", &user(2), false, now).await.unwrap());

        let other = user(2);
        let (second, by) = tokio::join!(seats.take("a", &other, true, later), async {
            let by = first.ended_by().await;
            drop(first);
            by
        });
        let second = second.unwrap();
        assert_eq!((by.as_str(), second.taken_from.as_str()), ("uid:2", "uid:1"));

        // One that does not let go keeps it.
        assert_eq!(seats.take("a", &user(0), true, later).await.unwrap_err(), Refusal::Kept);
        drop(second);
        let roots = seats.take("a", &user(0), true, later).await.unwrap();
        assert_eq!(roots.taken_from, "");
        let of_root = Refusal::OfRoot { who: "uid:0".into() };
        assert_eq!(seats.take("a", &user(1), true, later).await.unwrap_err(), of_root);
    }

    #[tokio::test]
    async fn others_cannot_take_all_of_them() {
        let (seats, now) = (Seats::default(), SystemTime::UNIX_EPOCH);
        let mut taken = Vec::new();
        for number in 0..MOST_OF_OTHERS {
            taken.push(seats.take(&number.to_string(), &user(1), false, now).await.unwrap());
        }
        let refused = seats.take("x", &user(2), false, now).await.unwrap_err();
        assert_eq!(refused, Refusal::TooMany(MOST_OF_OTHERS));
        for number in MOST_OF_OTHERS..MOST {
            taken.push(seats.take(&number.to_string(), &user(0), false, now).await.unwrap());
        }
        assert_eq!(seats.take("x", &user(0), false, now).await.unwrap_err(), Refusal::TooMany(MOST));
        drop(taken);
        seats.take("x", &user(2), false, now).await.unwrap();
    }
}
