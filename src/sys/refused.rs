//! Who did not let something be done: for what asks its caller about a path before it goes on.

use std::io;

/// Who it was.
#[derive(Debug)]
pub enum Refused<E> {
    /// The caller.
    Caller(E),
    /// The system.
    System(io::Error),
}

impl<E> From<io::Error> for Refused<E> {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}
