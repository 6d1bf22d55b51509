//! Limits for all clients together: memory for large messages and large answers, and commands that are still under
//! way although no client waits for them any longer (abandoned commands).
//!
//! A single client is limited by the maximum size of a message and of an answer, and by the number of its commands
//! that are under way. Many clients, or one that connects again and again, could still exceed the resources of the
//! guest. Small messages are not counted, so that a client can always ping, whatever the others do.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::qga::error::Error;
use crate::wire::qga::MAX_MESSAGE;

/// Maximum number of bytes of large messages: enough for one that arrives and one that is processed, of two
/// clients.
const MESSAGES: usize = 4 * MAX_MESSAGE;
/// Maximum number of bytes of large answers that are not sent yet: enough for the largest one.
const ANSWERS: usize = 32 << 20;
/// Size up to which messages and answers are not counted, in bytes; also the size of one permit.
const SMALL: usize = 1 << 20;
/// Maximum number of abandoned commands under way, with one name and in total. Each may occupy a thread, of which
/// there are 512.
const LEFT: (usize, usize) = (16, 128);

/// Limits, with their present use.
#[derive(Debug)]
pub struct Room {
    messages: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    left: Arc<Mutex<Left>>,
}

/// Number of abandoned commands by name.
type Left = BTreeMap<&'static str, usize>;

impl Default for Room {
    /// Creates limits of which nothing is used.
    fn default() -> Self {
        Self {
            messages: Arc::new(Semaphore::new(MESSAGES / SMALL)),
            answers: Arc::new(Semaphore::new(ANSWERS / SMALL)),
            left: Arc::default(),
        }
    }
}

/// Memory that one message or answer has reserved; released when this is dropped.
#[derive(Debug, Default)]
pub struct Share(Option<OwnedSemaphorePermit>);

/// Abandoned command that is still under way; counted until this is dropped, when it has ended.
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
    /// Adjusts the memory reserved for a message to its present size.
    ///
    /// # Errors
    /// If the messages of others take too much; the reservation is then unchanged.
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

    /// Reserves memory for a message of this size.
    ///
    /// # Errors
    /// If the messages of others take too much.
    pub fn take(&self, bytes: usize) -> Result<Share, Error> {
        let mut share = Share::default();
        self.fit(&mut share, bytes)?;
        Ok(share)
    }

    /// Reserves memory for a large answer, which takes this many bytes until it is sent.
    ///
    /// # Errors
    /// If the answers of other clients, which do not read them, take too much.
    pub fn answer(&self, bytes: usize) -> Result<Share, Error> {
        let permits = u32::try_from(bytes.div_ceil(SMALL)).ok();
        let taken =
            permits.and_then(|permits| Arc::clone(&self.answers).try_acquire_many_owned(permits).ok());
        let taken = taken.ok_or_else(|| {
            Error::generic(format!(
                "clients have not read {} MiB of their answers, so another large one is \
                 refused; try again later",
                ANSWERS >> 20
            ))
        })?;
        Ok(Share(Some(taken)))
    }

    /// Checks that a command with that name, which has to wait for something, may begin.
    ///
    /// # Errors
    /// If too many abandoned commands have not ended: whatever they wait for hangs.
    pub fn may_wait(&self, command: &str) -> Result<(), Error> {
        let (most, most_of_all) = LEFT;
        let left = lock(&self.left);
        if left.get(command).copied().unwrap_or_default() < most && left.values().sum::<usize>() < most_of_all
        {
            return Ok(());
        }
        Err(Error::generic(format!(
            "too many abandoned commands have not ended, such as {}; what they wait for, such as a disk, \
             does not answer",
            left.keys().next().unwrap_or(&"this one")
        )))
    }

    /// Counts a command with that name as abandoned.
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
        assert!(room.answer(1).unwrap_err().desc.contains("try again later"));
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
