//! Origin of a refusal, for operations that ask their caller about a path before they proceed.

use std::io;

/// Origin of a refusal, with its error.
#[derive(Debug)]
pub enum Refused<E> {
    /// Refusal of the caller.
    Caller(E),
    /// Error of the operating system.
    System(io::Error),
}

impl<E> From<io::Error> for Refused<E> {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}
