//! How much memory the large messages of all clients may take together, from their first bytes until they are done.
//!
//! A client by itself is bounded by the size of a message; many of them would still add up to more than a guest has.
//! Small messages need no room: whatever others send, a client can ping.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::qga::error::Error;
use crate::wire::qga::MAX_MESSAGE;

/// Bytes of large messages. One that comes and one that is worked on, of two clients, fit in any case.
const TOTAL: usize = 4 * MAX_MESSAGE;
/// Bytes of a message that need no room.
const SMALL: usize = 1 << 20;

/// The room for large messages.
#[derive(Debug)]
pub struct Room(Arc<Semaphore>);

impl Default for Room {
    /// All of it is free. A permit is as much as `SMALL`.
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(TOTAL / SMALL)))
    }
}

/// What one message takes of it; given back when this is dropped.
#[derive(Debug, Default)]
pub struct Share(Option<OwnedSemaphorePermit>);

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
            let more = more.and_then(|more| Arc::clone(&self.0).try_acquire_many_owned(more).ok());
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_grow_and_shrink_and_come_back() {
        let room = Room::default();
        let free = || room.0.available_permits();
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
}
