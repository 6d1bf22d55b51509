//! Reasons why something is not copied.

use tonic::{Code, Status};

use crate::ctl::Error;
use crate::ctl::door::Door;
use crate::ctl::outage;
use crate::wire::exec::SAID_BY_GUEST;
use crate::wire::proto::v1::FileFailed;

/// Reasons why something is not copied, by their extent.
#[derive(Debug)]
pub enum Trouble {
    /// One file failed; others may continue.
    Failed(FileFailed),
    /// The connection was lost, and may come back.
    Lost(Error),
    /// A request was refused with a final error, unless the host half has only just started.
    Refused(Error),
    /// The whole copy failed.
    Fatal(Error),
    /// Both ends have to be opened again, to abandon what is under way.
    Again,
}

impl Trouble {
    /// Returns the error for an end that sends no more answers.
    pub fn closed() -> Self {
        Self::Lost(Error::Closed)
    }

    /// Returns the error that ends the whole copy, with this message.
    pub fn fatal(words: impl Into<String>) -> Self {
        Self::Fatal(Error::Program(words.into()))
    }

    /// Returns the error for a connection that could not be made.
    pub fn of_dial(error: Error) -> Self {
        match error {
            // The socket is bound before its mode gives others access, so this may be temporary.
            error @ Error::Forbidden(_) => Self::Refused(error),
            Error::Cluster(error) if !error.may_pass() => Self::Refused(error.into()),
            error => Self::Lost(error),
        }
    }

    /// Returns the error for a call that was refused or has ended, for the guest of a VM of this name.
    pub fn of_call(status: Status, name: &str, door: &Door) -> Self {
        if std::error::Error::source(&status).is_some() {
            return Self::Lost(Error::Closed);
        }
        let by_guest = status.metadata().contains_key(SAID_BY_GUEST);
        if outage::may_pass(status.code(), by_guest) {
            return Self::Lost(Error::Call(status));
        }
        if by_guest {
            // An agent without this service does not report what to do about it.
            let is_old = status.code() == Code::Unimplemented;
            let words = || {
                format!(
                    "the agent in the guest of {name:?} is too old for this; update guestlet in the guest"
                )
            };
            return Self::Fatal(if is_old { Error::Program(words()) } else { Error::Call(status) });
        }
        if status.code() == Code::NotFound {
            let error = Error::UnknownVm(name.to_owned());
            return if door.follows() { Self::Lost(error) } else { Self::Refused(error) };
        }
        Self::Fatal(Error::Call(status))
    }
}
