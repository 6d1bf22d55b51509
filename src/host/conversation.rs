//! What a conversation with an agent is to others: what calls it, and how it ends.

use std::time::Duration;

use tonic::client::Grpc;
use tonic::{Code, Status};

use super::intake::Unwanted;
use super::metered;
use super::order::Disorder;
use super::text;
use super::trust;
use crate::events::state::Excess;
use crate::transport::{dial, http2};
use crate::trust::host as handshake;
use crate::wire::proto::v1::guest_client::GuestClient;

/// What tonic says of a message that is larger than allowed.
const TOO_LARGE: &str = "message length too large";

/// How a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// Try again soon.
    #[error(transparent)]
    Lost(#[from] Loss),
    /// Try again late.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// The agent cannot be talked to now.
#[derive(Debug, thiserror::Error)]
pub enum Loss {
    /// There is no stream.
    #[error(transparent)]
    Dial(#[from] dial::Error),
    /// It could not be found out who is there.
    #[error(transparent)]
    Handshake(handshake::Failure),
    /// HTTP/2 failed.
    #[error("the connection broke")]
    Broken(#[source] http2::ClientError),
    /// The stream ended.
    #[error("the agent closed the connection")]
    Closed,
    /// It ended a call, and not the stream.
    #[error("the agent reset the call")]
    Reset,
    /// No answer to a call.
    #[error("the agent does not answer")]
    Unanswered,
    /// The agent, or gRPC's rules, refused a call.
    #[error("the agent's answer: {message} ({code:?})")]
    Call {
        /// gRPC's class.
        code: Code,
        /// The agent's words, cleaned.
        message: String,
    },
    /// It began with a key that is not used any more.
    #[error("this host half has started to use another key")]
    Renewed,
    /// No event for too long.
    #[error("no message from the agent for {} s", .0.as_secs_f32())]
    Silent(Duration),
}

impl Loss {
    /// What to do, in words for people, if it is the same as long as the VM is as it is: there is no use in trying again. And
    /// whether it is meant so.
    pub fn remedy(&self) -> Option<(&str, bool)> {
        match self {
            Self::Dial(dial::Error::NoWay { remedy, is_meant, .. }) => Some((remedy, *is_meant)),
            _ => None,
        }
    }
}

/// The guest is not the one expected, or not fit to talk to.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The CID or socket leads to another VM, or to a clone.
    #[error(
        "the guest's DMI UUID is {found:?}, expected {expected:?}; is the agent's address in the settings right?"
    )]
    OtherGuest {
        /// What it read from DMI, cleaned.
        found: String,
        /// What the backend says.
        expected: String,
    },
    /// Its key, or this host half's, is not the right one.
    #[error(transparent)]
    Key(#[from] trust::Refusal),
    /// Whose guest it is cannot be told.
    #[error(
        "the guest reports no DMI UUID, expected {0:?}; if its VM has no DMI, set dmi-uuid = \"none\" in the settings"
    )]
    NoDmi(String),
    /// It has what its VM has not.
    #[error(
        "the guest's DMI UUID is {0:?}, but its VM has none; is the agent's address in the settings right?"
    )]
    HasDmi(String),
    /// It sends more events than allowed.
    #[error("the guest sends too many events")]
    Flood,
    /// A message is larger than allowed.
    #[error("the guest's message is too large: {0}; limits.message-bytes in the settings allows more")]
    Message(String),
    /// An event is missing, or at the wrong place.
    #[error(transparent)]
    Disorder(#[from] Disorder),
    /// It sends more than allowed, whatever it is.
    #[error(transparent)]
    Sent(#[from] metered::Excess),
    /// It calls the host more often than allowed.
    #[error("the guest makes too many calls to its host")]
    Calls,
    /// It breaks the callback, or its rules.
    #[error("the guest violates the protocol of the callback: {0}")]
    Callback(String),
    /// Its state is larger than allowed.
    #[error(transparent)]
    Excess(#[from] Excess),
    /// Another host half has it; in the guest's words, cleaned.
    #[error("{0}")]
    Held(String),
    /// The guest's settings do not let this host half; in the guest's words, cleaned.
    #[error("{0}")]
    Denied(String),
}

impl Refusal {
    /// It may be over soon, and asking costs little.
    pub fn passes(&self) -> bool {
        // A guest has no keys before cloud-init has written them.
        matches!(self, Self::Held(_) | Self::Key(trust::Refusal::TokenWaits { .. }))
    }

    /// Where its events stand says nothing any more: the next conversation begins with its whole state.
    pub fn spoils_the_order(&self) -> bool {
        matches!(self, Self::Disorder(_) | Self::Excess(_) | Self::Message(_))
    }
}

/// What the agent answers to.
pub type Caller = GuestClient<http2::Client>;

impl From<Unwanted> for End {
    fn from(unwanted: Unwanted) -> Self {
        match unwanted {
            Unwanted::Excess(excess) => Refusal::from(excess).into(),
            heavy @ Unwanted::Heavy { .. } => Refusal::Message(heavy.to_string()).into(),
            Unwanted::Malformed(words) => Status::internal(words).into(),
        }
    }
}

/// For calls of an agent, of any of its services, while the conversation is open.
#[derive(Debug, Clone)]
pub struct Channel {
    client: http2::Client,
    /// Bytes of one answer.
    most: usize,
}

impl Channel {
    /// Calls that go to this client, and take answers of `most` bytes.
    pub fn new(client: http2::Client, most: usize) -> Self {
        Self { client, most }
    }

    /// For calls of `guestlet.v1.Guest`.
    pub fn guest(&self) -> Caller {
        GuestClient::with_origin(self.client.clone(), origin()).max_decoding_message_size(self.most)
    }

    /// For calls of any service.
    pub fn any(&self) -> Grpc<http2::Client> {
        Grpc::with_origin(self.client.clone(), origin()).max_decoding_message_size(self.most)
    }
}

fn origin() -> http::Uri {
    http::Uri::from_static(http2::ORIGIN)
}

impl From<Status> for End {
    /// A status without a source came from the agent; with one, from the connection below.
    fn from(status: Status) -> Self {
        if let Some(below) = std::error::Error::source(&status) {
            let below = below.downcast_ref::<http2::ClientError>();
            let reset = below.is_some_and(|error| error.is_reset() && error.is_remote());
            return if reset { Loss::Reset.into() } else { Loss::Closed.into() };
        }
        let message = text::clean(status.message());
        match status.code() {
            // Of tonic's decoder, which has read the length of a message and none of the rest.
            Code::OutOfRange if message.contains(TOO_LARGE) => Refusal::Message(message).into(),
            Code::FailedPrecondition | Code::Aborted => Refusal::Held(message).into(),
            Code::PermissionDenied => Refusal::Denied(message).into(),
            code => Loss::Call { code, message }.into(),
        }
    }
}
