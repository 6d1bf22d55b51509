//! One conversation with an agent, from the dial to its end.
//!
//! ```text
//!  dial ──stream──▶ GetInfo ──▶ UUID ──as expected──▶ WatchEvents ──AgentReady──▶ open ──event──▶ open
//!    │                 │          │                     │    │                     │ ╲
//!    └─────────────────┴──lost────│─────────────────────│────┴─────────────────────┴──╲──▶ lost
//!                                 └─another──▶ refused ◀┴─held by another host half─────┘ more than allowed
//! ```
//!
//! Every step has a deadline, every message a bound. The future owns the connection, and beside it that of the
//! [`callback`] channel: dropping it closes both streams at once.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::codec::Streaming;
use tonic::{Code, Status};

use super::callback;
use super::contact::Contact;
use super::metered;
use super::order::{Disorder, Order};
use super::rate::Allowance;
use super::session::{Machine, Notes, Report};
use super::state::Excess;
use super::text;
use super::topology;
use crate::transport::{dial, http2};
use crate::wire::proto::v1::guest_client::GuestClient;
use crate::wire::proto::v1::{self, PowerState};

/// How long an agent may take to answer a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Heartbeats of an agent that does not say how often they come.
const USUAL_HEARTBEAT: Duration = Duration::from_secs(10);
/// How long an answer that was received before the stream's end may take to be read.
const LEFTOVERS: Duration = Duration::from_secs(1);
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
    /// No event for too long.
    #[error("no word from the agent for {} s", .0.as_secs_f32())]
    Silent(Duration),
}

/// The guest is not the one expected, or not fit to talk to.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The CID or socket leads to another VM, or to a clone.
    #[error("the guest's DMI UUID is {found:?}, expected {expected:?}; is the way to dial it right?")]
    OtherGuest {
        /// What it read from DMI, cleaned.
        found: String,
        /// What the backend says.
        expected: String,
    },
    /// Whose guest it is cannot be told.
    #[error(
        "the guest tells no DMI UUID, expected {0:?}; if its VM has no DMI, say so in the settings: dmi-uuid = \"none\""
    )]
    NoDmi(String),
    /// It has what its VM has not.
    #[error("the guest's DMI UUID is {0:?}, and its VM has none; is the way to dial it right?")]
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
    #[error("the guest calls its host too often")]
    Calls,
    /// It breaks the callback channel again and again.
    #[error("the guest breaks the callback channel again and again: {0}")]
    Callback(String),
    /// Its state is larger than allowed.
    #[error(transparent)]
    Excess(#[from] Excess),
    /// Another host half has it; in the guest's words, cleaned.
    #[error("{0}")]
    Held(String),
}

impl Refusal {
    /// It may be over soon, and asking costs little.
    pub fn passes(&self) -> bool {
        matches!(self, Self::Held(_))
    }

    /// Where its events stand says nothing any more: the next conversation begins with its whole state.
    pub fn spoils_the_order(&self) -> bool {
        matches!(self, Self::Disorder(_) | Self::Excess(_) | Self::Message(_))
    }
}

/// What the agent answers to.
pub type Caller = GuestClient<http2::Client>;

/// Talks until the conversation ends. What happens goes to `notes`, `order` knows where to resume, and
/// `machine` says whether the VM is paused: then its silence means nothing.
///
/// # Errors
/// Always, with what ended it.
pub async fn talk(
    contact: &Contact,
    order: &mut Order,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
) -> Result<Infallible, End> {
    let began = Instant::now();
    let (stream, gate) = contact.control().await.map_err(Loss::from)?;
    let (client, mut connection) =
        Box::pin(soon(async { Ok(http2::connect(stream).await.map_err(Loss::Broken)?) })).await?;
    let end = {
        let mut calls = Box::pin(calls(client, contact, order, notes, machine, began));
        tokio::select! {
            biased;
            end = &mut calls => end,
            ended = connection.ended() => {
                let left = tokio::time::timeout(LEFTOVERS, calls).await;
                match (left.unwrap_or(Err(Loss::Closed.into())), ended) {
                    (Err(End::Lost(Loss::Closed)), Err(error)) => Err(Loss::Broken(error).into()),
                    (left, _) => left,
                }
            }
        }
    };
    gate.shut().map_or(end, |excess| Err(Refusal::from(excess).into()))
}

async fn calls(
    client: http2::Client,
    contact: &Contact,
    order: &mut Order,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
    began: Instant,
) -> Result<Infallible, End> {
    let mut client = GuestClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(contact.vm.limits.message_bytes);
    // Boxed, because the session lives for long, and its beginning does not.
    let (info, mut events, first) = Box::pin(begin(&mut client, contact, order)).await?;
    let first = text::clean_event(first);
    order.take(&first).map_err(Refusal::from)?;
    contact.half.metrics.connect.observe(began.elapsed());
    let patience = patience(info.heartbeat_interval_seconds);
    let capabilities = info.capabilities.clone();
    notes.opened(info, client.clone()).await;
    let topology = Box::pin(topology::keep(client, contact, &capabilities, notes.teller()));
    let callback = Box::pin(callback::keep(contact, notes.teller()));
    tokio::select! {
        end = listen(&mut events, first, patience, contact, order, notes, machine) => end,
        refusal = callback => Err(refusal.into()),
        never = topology => match never {},
    }
}

/// Learns who the guest is, and opens its events.
async fn begin(
    client: &mut Caller,
    contact: &Contact,
    order: &mut Order,
) -> Result<(v1::GuestInfo, Streaming<v1::Event>, v1::Event), End> {
    let info = soon(async { Ok(client.get_info(v1::GetInfoRequest {}).await?.into_inner()) }).await?;
    let info = text::clean_info(info);
    check_dmi(&info.dmi_uuid, &contact.vm.ids.dmi)?;
    let request = v1::WatchEventsRequest { host: Some(contact.half.host.clone()), after: order.begin() };
    let (events, first) = soon(async {
        let mut events = client.watch_events(request).await?.into_inner();
        let first = events.message().await?.ok_or(Loss::Closed)?;
        Ok((events, first))
    })
    .await?;
    Ok((info, events, first))
}

/// Whether this is the guest that is expected: what is not told proves nothing.
fn check_dmi(found: &str, expected: &str) -> Result<(), Refusal> {
    match (found, expected) {
        (found, expected) if found == expected => Ok(()),
        ("", expected) => Err(Refusal::NoDmi(expected.to_owned())),
        (found, "") => Err(Refusal::HasDmi(found.to_owned())),
        (found, expected) => {
            Err(Refusal::OtherGuest { found: found.to_owned(), expected: expected.to_owned() })
        }
    }
}

async fn listen(
    events: &mut Streaming<v1::Event>,
    first: v1::Event,
    patience: Duration,
    contact: &Contact,
    order: &mut Order,
    notes: &mut Notes,
    mut machine: watch::Receiver<Machine>,
) -> Result<Infallible, End> {
    let limits = &contact.vm.limits;
    let mut allowance =
        Allowance::new(Instant::now(), limits.event_burst.into(), limits.events_per_second.into());
    notes.send(Report::Heard(Box::new(first))).await;
    loop {
        let event = text::clean_event(next(events, patience, &mut machine).await?);
        if !allowance.take(Instant::now(), 1.0) {
            return Err(Refusal::Flood.into());
        }
        order.take(&event).map_err(Refusal::from)?;
        notes.send(Report::Heard(Box::new(event))).await;
    }
}

/// The next event; the wait begins anew whenever something becomes known of the VM.
async fn next(
    events: &mut Streaming<v1::Event>,
    patience: Duration,
    machine: &mut watch::Receiver<Machine>,
) -> Result<v1::Event, End> {
    loop {
        let paused = machine.borrow_and_update().power == PowerState::Paused;
        tokio::select! {
            event = events.message() => return Ok(event?.ok_or(Loss::Closed)?),
            Ok(()) = machine.changed() => {}
            () = tokio::time::sleep(patience), if !paused => return Err(Loss::Silent(patience).into()),
        }
    }
}

/// How long an agent may be silent.
fn patience(heartbeat_seconds: u32) -> Duration {
    let interval = match heartbeat_seconds {
        0 => USUAL_HEARTBEAT,
        seconds => Duration::from_secs(seconds.clamp(1, 60).into()),
    };
    interval.mul_f64(2.5)
}

async fn soon<T>(answer: impl Future<Output = Result<T, End>>) -> Result<T, End> {
    tokio::time::timeout(CALL_DEADLINE, answer).await.unwrap_or(Err(Loss::Unanswered.into()))
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
            code => Loss::Call { code, message }.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_the_announced_interval_within_bounds() {
        let cases = [(0, 25_000), (1, 2_500), (10, 25_000), (60, 150_000), (u32::MAX, 150_000)];
        for (seconds, milliseconds) in cases {
            assert_eq!(patience(seconds), Duration::from_millis(milliseconds), "{seconds}");
        }
    }
}
