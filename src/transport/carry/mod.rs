//! Forwarding of one connection of a socket, over a stream that it shares with others. Both ends of a
//! forwarded connection use this module.
//!
//! ```text
//! socket ──read, as far as there is credit──▶ Outbox ──▶ the shared stream
//! socket ◀──write──── Link (inbox) ◀──────────────────── its reader
//! ```
//!
//! Each direction ends separately. If a socket breaks, the other end is notified after all data that was read
//! from it. If the other end breaks the connection, the socket is reset after all data that had arrived for it
//! was written. [`flow`] limits the data that is kept for each connection, and the data that waits for the
//! shared stream is limited for all of its connections together.

pub mod flow;
mod messages;

use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use crate::sys::socket::Socket;
use flow::{Breach, Credit, Inbox, PART};

/// Parts of all connections of a stream that wait to be sent over it.
const WAITING: usize = 16;
/// Initial and maximum interval of the check whether the peer has received everything on a socket that is to
/// be reset.
const LOOK: Duration = Duration::from_millis(2);
const LOOK_AT_LAST: Duration = Duration::from_millis(200);

/// Message about a connection.
#[derive(Debug)]
pub enum Said {
    /// This was read. Its place is free when this is dropped.
    Data(Bytes, Room),
    /// The other end may send so many bytes more.
    Credit(u32),
    /// End of the data that is read from the socket.
    End,
    /// Broken connection, with the reason.
    Reset(String),
}

/// A place among the parts that wait.
#[derive(Debug)]
pub struct Room(#[allow(dead_code, reason = "held, not looked at")] OwnedSemaphorePermit);

/// Queue of messages for the shared stream; clones share it.
#[derive(Debug)]
pub struct Outbox<T> {
    sender: mpsc::UnboundedSender<T>,
    room: Arc<Semaphore>,
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), room: Arc::clone(&self.room) }
    }
}

impl<T> Outbox<T> {
    /// An empty one, and its other side.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<T>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self { sender, room: Arc::new(Semaphore::new(WAITING)) }, receiver)
    }

    /// Says something that takes no room.
    pub fn say(&self, what: T) {
        // If there is no receiver, the whole stream has ended.
        let _ = self.sender.send(what);
    }

    async fn room(&self) -> Option<Room> {
        Arc::clone(&self.room).acquire_owned().await.ok().map(Room)
    }
}

/// A connection as the reader of the shared stream knows it.
#[derive(Debug, Default)]
pub struct Link {
    state: Mutex<State>,
    /// Notified when there is data to write, or the state of the inbox has changed.
    comes: Notify,
    /// Notified when there is credit to send.
    may_send: Notify,
}

#[derive(Debug, Default)]
struct State {
    inbox: Inbox,
    credit: Credit,
    was_reset: bool,
    counts: Counts,
}

/// Bytes that were transferred.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that were read from the socket.
    pub read: u64,
    /// Bytes that were written to the socket.
    pub written: u64,
}

impl Link {
    /// Data has come.
    ///
    /// # Errors
    /// If it may not have been sent.
    pub fn receive(&self, bytes: &[u8]) -> Result<(), Breach> {
        self.state().inbox.receive(bytes)?;
        self.comes.notify_one();
        Ok(())
    }

    /// Credit has come.
    ///
    /// # Errors
    /// If it is too much.
    pub fn grant(&self, bytes: u32) -> Result<(), Breach> {
        self.state().credit.grant(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        self.may_send.notify_one();
        Ok(())
    }

    /// Marks that the other end has sent all of its data.
    ///
    /// # Errors
    /// If it was marked already.
    pub fn end(&self) -> Result<(), Breach> {
        self.state().inbox.end()?;
        self.comes.notify_one();
        Ok(())
    }

    /// The other end has broken the connection.
    pub fn reset(&self) {
        self.state().was_reset = true;
        self.comes.notify_one();
    }

    /// Returns whether the other end has sent all of its data.
    pub fn has_ended(&self) -> bool {
        let state = self.state();
        state.was_reset || state.inbox.has_ended()
    }

    /// Completes when the other end has broken the connection.
    async fn breaks(&self) {
        while !self.state().was_reset {
            self.comes.notified().await;
        }
    }

    /// Returns the bytes that were transferred so far.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Ignores poisoning: no operation under the lock can leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Settings for the forwarding of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Bytes that may come and wait to be written.
    pub window: usize,
    /// Time allowed for writing the data that has arrived, once the other end has broken the connection; unlimited
    /// if absent.
    pub patience: Option<Duration>,
}

/// Result of a forwarded connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Regular end in both directions.
    Well,
    /// Broken socket, with the reason that was reported to the other end.
    Broken(String),
    /// The other end broke it.
    Reset,
}

/// Result of the writing direction.
enum Writing {
    Well,
    Reset,
    Broken(io::Error),
}

/// Carries a connection on until it has ended. If its future is dropped before, the socket is closed.
pub async fn carry<T: From<(u32, Said)>>(
    number: u32,
    socket: Socket,
    link: &Link,
    outbox: &Outbox<T>,
    manner: Manner,
) -> Ended {
    let say = |said| outbox.say((number, said).into());
    let more = link.state().inbox.widen(manner.window);
    give(more, &say);
    let ended = converse(number, &socket, link, outbox, &say, manner.patience).await;
    match &ended {
        Ended::Well => {}
        Ended::Broken(reason) => say(Said::Reset(reason.clone())),
        Ended::Reset => {
            until(manner.patience.map(|patience| Instant::now() + patience), arrived(&socket)).await;
            socket.abort();
        }
    }
    ended
}

/// Both directions, until they have ended.
async fn converse<T: From<(u32, Said)>>(
    number: u32,
    socket: &Socket,
    link: &Link,
    outbox: &Outbox<T>,
    say: &impl Fn(Said),
    patience: Option<Duration>,
) -> Ended {
    let mut reading = pin!(read(number, socket, link, outbox));
    let mut writing = pin!(write(socket, link, patience, say));
    let (mut was_read, mut written) = (false, None);
    loop {
        tokio::select! {
            read = &mut reading, if !was_read => match (read, &written) {
                (Err(error), _) => return Ended::Broken(error.to_string()),
                (Ok(()), Some(Writing::Broken(error))) => return Ended::Broken(error.to_string()),
                (Ok(()), Some(_)) => {
                    say(Said::End);
                    return Ended::Well;
                }
                (Ok(()), None) => {
                    say(Said::End);
                    was_read = true;
                }
            },
            wrote = &mut writing, if written.is_none() => match wrote {
                Writing::Reset => return Ended::Reset,
                Writing::Well if was_read => return Ended::Well,
                Writing::Broken(error) if was_read => return Ended::Broken(error.to_string()),
                // Data that the peer sent before it broke the connection is read first.
                wrote => written = Some(wrote),
            },
            // Once writing has ended, only this branch still waits for a reset.
            () = link.breaks(), if written.is_some() => return Ended::Reset,
        }
    }
}

/// Reads until the end.
async fn read<T: From<(u32, Said)>>(
    number: u32,
    socket: &Socket,
    link: &Link,
    outbox: &Outbox<T>,
) -> io::Result<()> {
    loop {
        while link.state().credit.left() == 0 {
            link.may_send.notified().await;
        }
        socket.readable().await?;
        let Some(room) = outbox.room().await else { std::future::pending().await };
        let most = link.state().credit.left().min(PART);
        let mut part = vec![0; most];
        let length = match socket.try_read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if may_try_again(&error) => continue,
            Err(error) => return Err(error),
        };
        part.truncate(length);
        if length < PART / 2 {
            part.shrink_to_fit();
        }
        let mut state = link.state();
        state.credit.spend(length);
        state.counts.read += length as u64;
        drop(state);
        outbox.say((number, Said::Data(part.into(), room)).into());
    }
}

/// Event that the writing direction waits for.
enum Waits {
    /// More data to write.
    ForMore,
    /// The peer of the socket.
    ForRoom,
    /// Nothing: it has ended so.
    Not(Writing),
}

/// Writes until the end.
async fn write(socket: &Socket, link: &Link, patience: Option<Duration>, say: &impl Fn(Said)) -> Writing {
    let mut deadline = None;
    loop {
        match write_now(socket, link, say) {
            Waits::Not(ended) => return ended,
            Waits::ForMore => link.comes.notified().await,
            Waits::ForRoom => {
                if deadline.is_none() && link.state().was_reset {
                    deadline = patience.map(|patience| Instant::now() + patience);
                }
                let room = async {
                    tokio::select! {
                        // If the socket is broken, the next write reports it.
                        _ = socket.writable() => {}
                        () = link.comes.notified() => {}
                    }
                };
                if until(deadline, room).await.is_none() {
                    return Writing::Reset;
                }
            }
        }
    }
}

/// Writes as much as the socket accepts without blocking.
fn write_now(socket: &Socket, link: &Link, say: &impl Fn(Said)) -> Waits {
    let mut state = link.state();
    while !state.inbox.is_empty() {
        match socket.try_write(&state.inbox.waiting()) {
            Ok(length) => {
                state.counts.written += length as u64;
                if let Some(credit) = state.inbox.hand_on(length) {
                    give(credit, say);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Waits::ForRoom,
            Err(error) => {
                state.inbox.throw_away();
                return Waits::Not(if state.was_reset { Writing::Reset } else { Writing::Broken(error) });
            }
        }
    }
    if state.was_reset {
        return Waits::Not(Writing::Reset);
    }
    if !state.inbox.is_done() {
        return Waits::ForMore;
    }
    Waits::Not(socket.end_writing().map_or_else(Writing::Broken, |()| Writing::Well))
}

/// Tells the other end that it has more credit.
fn give(credit: usize, say: &impl Fn(Said)) {
    if let Some(credit) = u32::try_from(credit).ok().filter(|credit| *credit > 0) {
        say(Said::Credit(credit));
    }
}

/// Waits until the peer of a socket has received everything that was written, or has disconnected.
async fn arrived(socket: &Socket) {
    let mut pause = LOOK;
    while socket.unsent() > 0 && socket.is_connected() {
        tokio::time::sleep(pause).await;
        pause = LOOK_AT_LAST.min(pause * 2);
    }
}

/// Returns the result of `work`, or `None` if the deadline passes first.
async fn until<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(work.await),
        Some(deadline) => tokio::time::timeout_at(deadline, work).await.ok(),
    }
}

fn may_try_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests;
