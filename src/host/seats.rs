//! How many connections users may have at a time, so that none of them takes all places of a socket.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Connections of one user.
const OF_ONE: u32 = 8;
/// Connections of all users together; the other places are for those who may do everything.
const OF_ALL: u32 = 48;

/// The connections of each user.
#[derive(Debug, Clone, Default)]
pub struct Seats(Arc<Mutex<BTreeMap<u32, u32>>>);

/// One connection, which counts until this is dropped.
#[derive(Debug)]
pub struct Seat {
    seats: Seats,
    uid: u32,
}

impl Seats {
    /// A place for one more connection of this user, if there is one.
    pub fn take(&self, uid: u32) -> Option<Seat> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<u32>() >= OF_ALL {
            return None;
        }
        let of_one = taken.entry(uid).or_default();
        if *of_one >= OF_ONE {
            return None;
        }
        *of_one += 1;
        Some(Seat { seats: self.clone(), uid })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = taken.get(&self.uid).map_or(0, |count| count.saturating_sub(1));
        if left == 0 {
            taken.remove(&self.uid);
        } else {
            taken.insert(self.uid, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_takes_some_places_and_all_users_not_all() {
        let seats = Seats::default();
        let mut taken: Vec<_> = (0..OF_ONE).map(|_| seats.take(1).unwrap()).collect();
        assert!(seats.take(1).is_none());
        taken.push(seats.take(2).unwrap());
        taken.remove(0);
        taken.push(seats.take(1).unwrap());
        taken.extend((3..100).map_while(|uid| seats.take(uid)));
        assert_eq!(taken.len(), usize::try_from(OF_ALL).unwrap());
        drop(taken);
        assert!(seats.0.lock().unwrap().is_empty());
    }
}
