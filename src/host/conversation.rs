//! Interface of a conversation with an agent: the channel for calls, and how it ended.

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

/// Text in tonic's status for a message that is larger than allowed. Any other `OUT_OF_RANGE` comes from the
/// agent.
const TOO_LARGE: &str = "message length too large";

/// Reason why a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// Loss of the connection; retried soon.
    #[error(transparent)]
    Lost(#[from] Loss),
    /// Refusal of the guest; retried late.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Reason why the agent cannot be reached at present.
#[derive(Debug, thiserror::Error)]
pub enum Loss {
    /// The stream could not be opened.
    #[error(transparent)]
    Dial(#[from] dial::Error),
    /// The TLS handshake failed, so the identity of the guest is not known.
    #[error(transparent)]
    Handshake(handshake::Failure),
    /// The HTTP/2 connection failed.
    #[error("the connection broke")]
    Broken(#[source] http2::ClientError),
    /// The agent closed the stream.
    #[error("the agent closed the connection")]
    Closed,
    /// The agent reset a call without closing the stream.
    #[error("the agent reset the call")]
    Reset,
    /// The agent did not answer a call in time.
    #[error("the agent does not answer")]
    Unanswered,
    /// A call failed: the agent refused it, or it violated the rules of gRPC.
    #[error("the agent's answer: {message} ({code:?})")]
    Call {
        /// Status code of gRPC.
        code: Code,
        /// Message of the agent, cleaned.
        message: String,
    },
    /// The conversation began with a key of this host half that has been replaced since.
    #[error("this host half has started to use another key")]
    Renewed,
    /// No event arrived for this time.
    #[error("no message from the agent for {} s", .0.as_secs_f32())]
    Silent(Duration),
}

impl Loss {
    /// Returns the remedy for a cause that lasts as long as the VM is unchanged, so that retrying is useless; and
    /// whether the configuration is intended.
    pub fn remedy(&self) -> Option<(&str, bool)> {
        match self {
            Self::Dial(dial::Error::NoWay { remedy, is_meant, .. }) => Some((remedy, *is_meant)),
            _ => None,
        }
    }
}

/// Reason why the guest is refused: it is not the expected one, or it breaks a limit or the protocol.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The CID or socket leads to another VM, or to a clone.
    #[error(
        "the guest's DMI UUID is {found:?}, expected {expected:?}; is the agent's address in the settings right?"
    )]
    OtherGuest {
        /// UUID that the guest read from DMI, cleaned.
        found: String,
        /// UUID that the backend reports.
        expected: String,
    },
    /// The key of the guest or of this host half is not the right one.
    #[error(transparent)]
    Key(#[from] trust::Refusal),
    /// The guest reports no DMI UUID, so it cannot be matched to its VM.
    #[error(
        "the guest reports no DMI UUID, expected {0:?}; if its VM has no DMI, set dmi-uuid = \"none\" in the settings"
    )]
    NoDmi(String),
    /// The guest reports a DMI UUID although its VM has none.
    #[error(
        "the guest's DMI UUID is {0:?}, but its VM has none; is the agent's address in the settings right?"
    )]
    HasDmi(String),
    /// The guest sends more events than allowed.
    #[error("the guest sends too many events")]
    Flood,
    /// A message is larger than allowed.
    #[error("the guest's message is too large: {0}; limits.message-bytes in the settings allows more")]
    Message(String),
    /// An event is missing or out of order.
    #[error(transparent)]
    Disorder(#[from] Disorder),
    /// The guest sends more bytes or pieces than allowed, or does not read.
    #[error(transparent)]
    Sent(#[from] metered::Excess),
    /// The guest makes more calls to its host than allowed.
    #[error("the guest makes too many calls to its host")]
    Calls,
    /// The guest breaks the callback too often, or violates its protocol.
    #[error("the guest violates the protocol of the callback: {0}")]
    Callback(String),
    /// The state of the guest is larger than allowed.
    #[error(transparent)]
    Excess(#[from] Excess),
    /// Another host half holds the guest; in the guest's words, cleaned.
    #[error("{0}")]
    Held(String),
    /// The guest's settings do not allow this host half; in the guest's words, cleaned.
    #[error("{0}")]
    Denied(String),
}

impl Refusal {
    /// Returns whether the reason may soon cease, so that the guest is retried earlier. A retry costs little.
    pub fn passes(&self) -> bool {
        // For example, a guest has no keys before cloud-init has written them.
        matches!(self, Self::Held(_) | Self::Key(trust::Refusal::TokenWaits { .. }))
    }

    /// Returns whether the position in the event stream has become useless, so that the next conversation begins with
    /// the whole state.
    pub fn spoils_the_order(&self) -> bool {
        matches!(self, Self::Disorder(_) | Self::Excess(_) | Self::Message(_))
    }
}

/// Client for calls to the agent.
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

/// Channel for calls to any service of an agent, while the conversation is open.
#[derive(Debug, Clone)]
pub struct Channel {
    client: http2::Client,
    /// Limit on the bytes of one answer.
    most: usize,
}

impl Channel {
    /// Creates a channel over this client, with answers of at most `most` bytes.
    pub fn new(client: http2::Client, most: usize) -> Self {
        Self { client, most }
    }

    /// Returns a client for `guestlet.v1.Guest`.
    pub fn guest(&self) -> Caller {
        GuestClient::with_origin(self.client.clone(), origin()).max_decoding_message_size(self.most)
    }

    /// Returns a client for calls to any service.
    pub fn any(&self) -> Grpc<http2::Client> {
        Grpc::with_origin(self.client.clone(), origin()).max_decoding_message_size(self.most)
    }
}

fn origin() -> http::Uri {
    http::Uri::from_static(http2::ORIGIN)
}

impl From<Status> for End {
    /// Converts a status. One without a source came from the agent, one with a source from the connection.
    fn from(status: Status) -> Self {
        if let Some(below) = std::error::Error::source(&status) {
            let below = below.downcast_ref::<http2::ClientError>();
            let reset = below.is_some_and(|error| error.is_reset() && error.is_remote());
            return if reset { Loss::Reset.into() } else { Loss::Closed.into() };
        }
        let message = text::clean(status.message());
        match status.code() {
            // This comes from tonic's decoder, which has read the length of a message and nothing of its body.
            Code::OutOfRange if message.contains(TOO_LARGE) => Refusal::Message(message).into(),
            Code::FailedPrecondition | Code::Aborted => Refusal::Held(message).into(),
            Code::PermissionDenied => Refusal::Denied(message).into(),
            code => Loss::Call { code, message }.into(),
        }
    }
}
