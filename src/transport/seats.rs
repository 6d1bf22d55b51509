//! Limits on the concurrent connections, or long-lived calls, of each client, so that no client takes all
//! places.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The connections of each, such as a user; clones share them.
#[derive(Debug, Clone)]
pub struct Seats<K: Ord> {
    of_one: u32,
    of_all: u32,
    taken: Arc<Mutex<BTreeMap<K, u32>>>,
}

/// One connection, which counts until this is dropped.
#[derive(Debug)]
pub struct Seat<K: Ord> {
    seats: Seats<K>,
    who: K,
}

impl<K: Ord> Seats<K> {
    /// Creates limits for one client and for all clients together.
    pub fn new(of_one: u32, of_all: u32) -> Self {
        Self { of_one, of_all, taken: Arc::default() }
    }
}

impl<K: Ord + Clone> Seats<K> {
    /// Takes a place for one more connection of this client; `None` if all are taken.
    pub fn take(&self, who: K) -> Option<Seat<K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<u32>() >= self.of_all {
            return None;
        }
        let of_one = taken.entry(who.clone()).or_default();
        if *of_one >= self.of_one {
            return None;
        }
        *of_one += 1;
        Some(Seat { seats: self.clone(), who })
    }
}

impl<K: Ord> Drop for Seat<K> {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_ONE: u32 = 8;
    const OF_ALL: u32 = 48;

    #[test]
    fn one_user_takes_some_places_and_all_users_not_all() {
        let seats = Seats::new(OF_ONE, OF_ALL);
        let mut taken: Vec<_> = (0..OF_ONE).map(|_| seats.take(1).unwrap()).collect();
        assert!(seats.take(1).is_none());
        taken.push(seats.take(2).unwrap());
        taken.remove(0);
        taken.push(seats.take(1).unwrap());
        taken.extend((3..100).map_while(|uid| seats.take(uid)));
        assert_eq!(taken.len(), usize::try_from(OF_ALL).unwrap());
        drop(taken);
        assert!(seats.taken.lock().unwrap().is_empty());
    }

    #[test]
    fn what_is_left_is_for_others() {
        let seats = Seats::new(8, 16);
        let take = |who: &str| (0..16).map_while(|_| seats.take(who.to_owned())).collect::<Vec<_>>();
        let (first, second) = (take("a"), take("b"));
        assert_eq!((first.len(), second.len(), take("c").len()), (8, 8, 0));
        drop(first);
        assert_eq!(take("c").len(), 8);
        drop(second);
        assert!(seats.taken.lock().unwrap().is_empty());
    }
}
