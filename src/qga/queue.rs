//! Queue of a client's requests that have not begun.

use std::collections::VecDeque;
use std::time::Instant;

use crate::qga::reply::Line;
use crate::qga::room::Share;
use crate::qga::table::Command;

/// Maximum number of queued messages, and of their bytes. When either is reached, nothing more is read from the
/// client.
const MOST: (usize, usize) = (64, 1 << 20);

/// Entry of the queue.
pub(super) struct Asked {
    /// Time of arrival.
    pub since: Instant,
    /// Message, or the answer to it.
    pub what: What,
}

/// Content of a queue entry.
pub(super) enum What {
    /// Message, with its command if that may be called, and the memory reserved for it.
    Message(Vec<u8>, Option<&'static Command>, Share),
    /// Answer to a message that was not a valid request.
    Answer(Line),
}

impl Asked {
    /// Returns the command of the message, if it may be called.
    pub fn command(&self) -> Option<&'static Command> {
        match self.what {
            What::Message(_, command, _) => command,
            What::Answer(_) => None,
        }
    }

    fn bytes(&self) -> usize {
        match &self.what {
            What::Message(message, ..) => message.len(),
            What::Answer(line) => line.text.len(),
        }
    }
}

/// Queue in the order of arrival.
#[derive(Default)]
pub(super) struct Queue {
    all: VecDeque<Asked>,
    bytes: usize,
}

impl Queue {
    /// Adds an entry at the end.
    pub fn push(&mut self, asked: Asked) {
        self.bytes += asked.bytes();
        self.all.push_back(asked);
    }

    /// Removes and returns the first entry.
    pub fn pop(&mut self) -> Option<Asked> {
        let next = self.all.pop_front()?;
        self.bytes -= next.bytes();
        Some(next)
    }

    /// Returns the first entry without removing it.
    pub fn front(&self) -> Option<&Asked> {
        self.all.front()
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether the queue is full, so that nothing more is read.
    pub fn is_full(&self) -> bool {
        self.all.len() >= MOST.0 || self.bytes >= MOST.1
    }

    /// Returns whether a command of this kind is queued.
    pub fn has(&self, kind: impl Fn(&Command) -> bool) -> bool {
        self.all.iter().any(|asked| asked.command().is_some_and(&kind))
    }
}
