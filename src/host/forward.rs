//! Port forwarding to guests: forwards `guestlet.v1.Forward` of the admin API to the agents, over a connection
//! that is dialled for each call, beside the session.
//!
//! Messages are passed one by one and nothing is buffered. Data in transit is bounded by the flow-control windows
//! of both connections, and within each forwarded connection by the credit that its ends give each other.

use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::asked::{Asked, Object};
use super::beside::{self, BEGIN, Line, origin};
use super::caller::Behalf;
use super::fleet::Handle;
use super::machine::{self, Beside, Desks};
use super::text;
use crate::access::verb::{self, Verb};
use crate::transport::opening::first;
use crate::wire::proto::v1::forward_client::ForwardClient;
use crate::wire::proto::v1::from_target::Message as FromIt;
use crate::wire::proto::v1::to_target::Message;
use crate::wire::proto::v1::{FromTarget, OpenForward, ToTarget};

/// Limit on the bytes of one message, of a client or of an agent.
pub const MAX_MESSAGE: usize = 64 << 10;

impl Asked for OpenForward {
    fn verb(&self) -> &'static Verb {
        &verb::FORWARD
    }

    fn object(&self) -> Object<'_> {
        Object::Machine(&self.name)
    }
}

/// Receives the first message of a client.
///
/// # Errors
/// If it is not `open`, or does not arrive in time.
pub async fn opening(messages: &mut Streaming<ToTarget>) -> Result<OpenForward, Status> {
    let first = first(messages).await?;
    match first.and_then(|first| first.message) {
        Some(Message::Open(open)) => Ok(open),
        _ => Err(Status::invalid_argument("the first message must be open")),
    }
}

/// Forwards the messages of an admitted client after `open` to the agent of the VM that `open` names.
///
/// # Errors
/// If the agent cannot be reached, has too many streams, or refuses.
pub async fn run(
    desks: &Desks,
    fleet: &Handle,
    behalf: &Behalf,
    open: OpenForward,
    messages: Streaming<ToTarget>,
) -> Result<Relay, Status> {
    let place =
        machine::place_for_stream(desks, fleet, &open.name, behalf.caller(), Beside::Forwards).await?;
    let mut line = beside::dial(fleet, &open.name).await?;
    let first = ToTarget { message: Some(Message::Open(OpenForward::default())) };
    let rest = futures_util::stream::unfold(messages, |mut messages| async {
        // A client that has disconnected or violates the protocol sends nothing more.
        let message = messages.message().await.ok().flatten()?;
        Some((message, messages))
    });
    let all = futures_util::StreamExt::chain(tokio_stream::once(first), rest);
    let client = ForwardClient::with_origin(line.client.clone(), origin());
    let mut client = client.max_decoding_message_size(MAX_MESSAGE);
    let answers = line.drive(BEGIN, client.forward_connections(behalf.state(all))).await?.into_inner();
    Ok(Relay { line, answers, _place: place, is_over: false })
}

/// Relay for the agent's answers.
pub struct Relay {
    line: Line,
    answers: Streaming<FromTarget>,
    _place: machine::Stream,
    is_over: bool,
}

impl Relay {
    /// Returns the stream of messages from the targets.
    pub fn into_stream(self) -> impl Stream<Item = Result<FromTarget, Status>> {
        futures_util::stream::unfold(self, |mut this| async {
            if this.is_over {
                return None;
            }
            let answer = this.next().await.transpose();
            this.is_over = !matches!(answer, Some(Ok(_)));
            Some((answer?, this))
        })
    }

    async fn next(&mut self) -> Result<Option<FromTarget>, Status> {
        let mut answer = self.line.next(&mut self.answers).await?;
        match answer.as_mut().and_then(|answer| answer.message.as_mut()) {
            Some(FromIt::Refused(refused)) => refused.reason = text::clean_words(&refused.reason),
            Some(FromIt::Reset(reset)) => reset.reason = text::clean_words(&reset.reason),
            _ => {}
        }
        Ok(answer)
    }
}
