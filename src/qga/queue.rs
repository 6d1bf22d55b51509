//! What a client has asked for and what has not begun.

use std::collections::VecDeque;
use std::time::Instant;

use crate::qga::reply::Line;
use crate::qga::room::Share;
use crate::qga::table::Command;

/// Messages, and their bytes, that wait for their turn; then no more is read.
const MOST: (usize, usize) = (64, 1 << 20);

/// What waits for its turn.
pub(super) struct Asked {
    /// When it came.
    pub since: Instant,
    /// What it is.
    pub what: What,
}

/// Something that waits for its turn.
pub(super) enum What {
    /// A command, if it is one that may be called.
    Message(Vec<u8>, Option<&'static Command>, Share),
    /// The answer to what was none.
    Answer(Line),
}

impl Asked {
    /// The command that it is, if it may be called.
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

/// All of it, in the order in which it came.
#[derive(Default)]
pub(super) struct Queue {
    all: VecDeque<Asked>,
    bytes: usize,
}

impl Queue {
    /// Behind all others.
    pub fn push(&mut self, asked: Asked) {
        self.bytes += asked.bytes();
        self.all.push_back(asked);
    }

    /// The next one.
    pub fn pop(&mut self) -> Option<Asked> {
        let next = self.all.pop_front()?;
        self.bytes -= next.bytes();
        Some(next)
    }

    /// The next one, which stays.
    pub fn front(&self) -> Option<&Asked> {
        self.all.front()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether no more is taken.
    pub fn is_full(&self) -> bool {
        self.all.len() >= MOST.0 || self.bytes >= MOST.1
    }

    /// Whether a command of this kind waits.
    pub fn has(&self, kind: impl Fn(&Command) -> bool) -> bool {
        self.all.iter().any(|asked| asked.command().is_some_and(&kind))
    }
}
