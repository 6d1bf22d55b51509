//! What all clients together may take: memory for their large messages and large answers, and commands that go on
//! although nobody waits for them any more.
//!
//! A client by itself is bounded by the size of a message, of an answer, and by how many of its commands are under way;
//! many of them, or one that comes again and again, would still add up to more than a guest has. What is small needs no
//! room: whatever others do, a client can ping.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::qga::error::Error;
use crate::wire::qga::MAX_MESSAGE;

/// Bytes of large messages. One that comes and one that is worked on, of two clients, fit in any case.
const MESSAGES: usize = 4 * MAX_MESSAGE;
/// Bytes of large answers that are not sent yet: the largest one fits.
const ANSWERS: usize = 32 << 20;
/// Bytes of a message or an answer that need no room; a permit is as much.
const SMALL: usize = 1 << 20;
/// Commands that have not ended and that nobody waits for, of one name and of all. Each may hold a thread, of which there
/// are 512.
const LEFT: (usize, usize) = (16, 128);

/// The room that there is.
#[derive(Debug)]
pub struct Room {
    messages: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    left: Arc<Mutex<Left>>,
}

/// How many commands of each name are left.
type Left = BTreeMap<&'static str, usize>;

impl Default for Room {
    /// All of it is free.
    fn default() -> Self {
        Self {
            messages: Arc::new(Semaphore::new(MESSAGES / SMALL)),
            answers: Arc::new(Semaphore::new(ANSWERS / SMALL)),
            left: Arc::default(),
        }
    }
}

/// What one message or answer takes of it; given back when this is dropped.
#[derive(Debug, Default)]
pub struct Share(Option<OwnedSemaphorePermit>);

/// A command that goes on and that nobody waits for; dropped when it has ended.
#[derive(Debug)]
pub struct Leaving {
    left: Arc<Mutex<Left>>,
    command: &'static str,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut left = lock(&self.left);
        if let Some(count) = left.get_mut(self.command) {
            *count -= 1;
        }
        left.retain(|_, count| *count > 0);
    }
}

fn lock(left: &Mutex<Left>) -> MutexGuard<'_, Left> {
    left.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Room {
    /// Makes the share of a message as large as the message is by now.
    ///
    /// # Errors
    /// If others take too much; the share is as it was.
    pub fn fit(&self, share: &mut Share, bytes: usize) -> Result<(), Error> {
        let needed = bytes / SMALL;
        let held = share.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if needed == 0 {
            share.0 = None;
        } else if needed < held {
            drop(share.0.as_mut().and_then(|permit| permit.split(held - needed)));
        } else if needed > held {
            let more = u32::try_from(needed - held).ok();
            let more = more.and_then(|more| Arc::clone(&self.messages).try_acquire_many_owned(more).ok());
            let more = more.ok_or_else(|| {
                Error::generic(
                    "clients send too much at the same time; this message is dropped: send it later",
                )
            })?;
            match &mut share.0 {
                Some(permit) => permit.merge(more),
                None => share.0 = Some(more),
            }
        }
        Ok(())
    }

    /// The share of a message of that size.
    ///
    /// # Errors
    /// If others take too much.
    pub fn take(&self, bytes: usize) -> Result<Share, Error> {
        let mut share = Share::default();
        self.fit(&mut share, bytes)?;
        Ok(share)
    }

    /// The share of a large answer that holds so many bytes until it is sent.
    ///
    /// # Errors
    /// If the answers of others, who do not read them, take too much.
    pub fn answer(&self, bytes: usize) -> Result<Share, Error> {
        let permits = u32::try_from(bytes.div_ceil(SMALL)).ok();
        let taken =
            permits.and_then(|permits| Arc::clone(&self.answers).try_acquire_many_owned(permits).ok());
        let taken = taken.ok_or_else(|| {
            Error::generic(format!(
                "clients have not read {} MiB of their answers, and another large one is not made: ask again later",
                ANSWERS >> 20
            ))
        })?;
        Ok(Share(Some(taken)))
    }

    /// Whether a command of that name may begin to wait for something.
    ///
    /// # Errors
    /// If too many that were given up have not ended: what they wait for hangs.
    pub fn may_wait(&self, command: &str) -> Result<(), Error> {
        let (most, most_of_all) = LEFT;
        let left = lock(&self.left);
        if left.get(command).copied().unwrap_or_default() < most && left.values().sum::<usize>() < most_of_all
        {
            return Ok(());
        }
        Err(Error::generic(format!(
            "too many commands that nobody waits for any more have not ended, such as {}; what they wait for, such as a \
             disk, does not answer",
            left.keys().next().unwrap_or(&"this one")
        )))
    }

    /// Nobody waits any more for a command of that name, which goes on.
    pub fn leave(&self, command: &'static str) -> Leaving {
        *lock(&self.left).entry(command).or_default() += 1;
        Leaving { left: Arc::clone(&self.left), command }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_grow_and_shrink_and_come_back() {
        let room = Room::default();
        let free = || room.messages.available_permits();
        let all = free();
        let mut share = room.take(SMALL - 1).unwrap();
        assert_eq!(free(), all);
        for (bytes, left) in [(SMALL, all - 1), (MAX_MESSAGE, all - 64), (3 * SMALL, all - 3), (100, all)] {
            room.fit(&mut share, bytes).unwrap();
            assert_eq!(free(), left, "{bytes}");
        }
        let whole: Vec<_> = (0..4).map(|_| room.take(MAX_MESSAGE).unwrap()).collect();
        assert_eq!(free(), 0);
        assert!(room.fit(&mut share, SMALL).unwrap_err().desc.contains("send it later"));
        room.fit(&mut share, SMALL - 1).unwrap();
        drop(whole);
        assert_eq!(free(), all);
    }

    #[test]
    fn the_largest_answer_fits_and_another_one_waits() {
        let room = Room::default();
        let largest = room.answer(ANSWERS).unwrap();
        assert!(room.answer(1).unwrap_err().desc.contains("ask again later"));
        drop(largest);
        let _one = room.answer(ANSWERS / 2).unwrap();
        room.answer(ANSWERS / 2).unwrap();
    }

    #[test]
    fn what_hangs_is_bounded_by_its_name_and_by_all() {
        let room = Room::default();
        let names: Vec<_> = crate::qga::table::COMMANDS.iter().map(|command| command.name).collect();
        let mut left: Vec<_> = (0..LEFT.0).map(|_| room.leave(names[0])).collect();
        assert!(room.may_wait(names[0]).unwrap_err().desc.contains(names[0]));
        room.may_wait(names[1]).unwrap();
        left.pop();
        room.may_wait(names[0]).unwrap();
        let all = LEFT.1 - left.len();
        left.extend((0..all).map(|count| room.leave(names[1 + count % (names.len() - 1)])));
        assert!(room.may_wait("guest-nothing").is_err());
        drop(left);
        room.may_wait(names[0]).unwrap();
        assert!(lock(&room.left).is_empty());
    }
}
