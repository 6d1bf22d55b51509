//! Why something is not copied.

use tonic::{Code, Status};

use crate::ctl::Error;
use crate::ctl::door::Door;
use crate::ctl::outage;
use crate::wire::exec::SAID_BY_GUEST;
use crate::wire::proto::v1::FileFailed;

/// Why.
#[derive(Debug)]
pub enum Trouble {
    /// One thing; others may go on.
    Failed(FileFailed),
    /// The connection, which may come back.
    Lost(Error),
    /// It was refused with an error that is final, unless the host half has only just started.
    Refused(Error),
    /// Everything.
    Fatal(Error),
    /// Both ends are to be opened anew, to leave what is under way.
    Again,
}

impl Trouble {
    /// Nothing more comes from an end.
    pub fn closed() -> Self {
        Self::Lost(Error::Closed)
    }

    /// Everything fails, with these words.
    pub fn fatal(words: impl Into<String>) -> Self {
        Self::Fatal(Error::Program(words.into()))
    }

    /// A connection could not be made.
    pub fn of_dial(error: Error) -> Self {
        match error {
            // It is bound before it is opened to others.
            error @ Error::Forbidden(_) => Self::Refused(error),
            Error::Cluster(error) if !error.may_pass() => Self::Refused(error.into()),
            error => Self::Lost(error),
        }
    }

    /// A call was refused, or has ended, of the guest of a VM of this name.
    pub fn of_call(status: Status, name: &str, door: &Door) -> Self {
        if std::error::Error::source(&status).is_some() {
            return Self::Lost(Error::Closed);
        }
        let by_guest = status.metadata().contains_key(SAID_BY_GUEST);
        if outage::may_pass(status.code(), by_guest) {
            return Self::Lost(Error::Call(status));
        }
        if by_guest {
            // An agent without this service does not say what is to be done.
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
