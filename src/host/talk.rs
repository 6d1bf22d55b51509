//! One conversation with an agent, from the dial to its end.
//!
//! ```text
//!  dial ──stream──▶ GetInfo ──▶ UUID ──same, or none──▶ WatchEvents ──AgentReady──▶ open ──event──▶ open
//!    │                 │          │                          │                       │
//!    └─────────────────┴──lost────│──────────────────────────┴───────────────────────┴──▶ lost
//!                                 └──another──▶ refused ◀──more events than allowed──┘
//! ```
//!
//! Every step has a deadline, every message a bound. The future owns the connection: dropping it closes the
//! stream at once.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::codec::Streaming;
use tonic::{Code, Status};

use super::rate::Allowance;
use super::session::{Machine, Notes, Report};
use super::text;
use crate::transport::dial::{self, Dial};
use crate::transport::http2;
use crate::wire::proto::v1::guest_client::GuestClient;
use crate::wire::proto::v1::{self, PowerState, event};

/// How long a stream may take to come about. The guest's kernel answers, not its agent; while a guest boots, a
/// request may be lost, and this is the time lost with it.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);
/// How long an agent may take to answer a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of one message of an agent.
const MAX_MESSAGE: usize = 64 * 1024;
/// Heartbeats of an agent that does not say how often they come.
const USUAL_HEARTBEAT: Duration = Duration::from_secs(10);
/// How long an answer that was received before the stream's end may take to be read.
const LEFTOVERS: Duration = Duration::from_secs(1);

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
    Broken(#[source] hyper::Error),
    /// The stream ended.
    #[error("the agent closed the connection")]
    Closed,
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
    /// The first event was not `AgentReady`.
    #[error("the agent's events do not begin with AgentReady")]
    Disorder,
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
    /// It sends more events than allowed.
    #[error("the guest sends too many events")]
    Flood,
}

/// Talks until the conversation ends. What happens goes to `notes`, and `machine` says whether the VM is
/// paused: then its silence means nothing.
///
/// # Errors
/// Always, with what ended it.
pub async fn talk(
    dialer: &dyn Dial,
    uuid: &str,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
) -> Result<std::convert::Infallible, End> {
    let stream = dial::within(dialer, DIAL_DEADLINE).await.map_err(Loss::from)?;
    let (client, mut connection) = soon(async { http2::connect(stream).await.map_err(Loss::Broken) }).await?;
    let mut calls = std::pin::pin!(calls(client, uuid, notes, machine));
    let ended = tokio::select! {
        biased;
        outcome = &mut calls => return outcome,
        ended = connection.ended() => ended,
    };
    let left = tokio::time::timeout(LEFTOVERS, calls).await.unwrap_or(Err(Loss::Closed.into()));
    match (left, ended) {
        (Err(End::Lost(Loss::Closed)), Err(error)) => Err(Loss::Broken(error).into()),
        (left, _) => left,
    }
}

async fn calls(
    client: http2::Client,
    uuid: &str,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
) -> Result<std::convert::Infallible, End> {
    let mut client = GuestClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(MAX_MESSAGE);
    let info = soon(async { Ok(client.get_info(v1::GetInfoRequest {}).await?.into_inner()) }).await?;
    let info = text::clean_info(info);
    if !info.dmi_uuid.is_empty() && info.dmi_uuid != uuid {
        return Err(Refusal::OtherGuest { found: info.dmi_uuid, expected: uuid.to_owned() }.into());
    }
    let (mut events, first) = soon(async {
        let mut events = client.watch_events(v1::WatchEventsRequest {}).await?.into_inner();
        let first = events.message().await?.ok_or(Loss::Closed)?;
        Ok((events, first))
    })
    .await?;
    if !matches!(first.kind, Some(event::Kind::AgentReady(_))) {
        return Err(Loss::Disorder.into());
    }
    let patience = patience(info.heartbeat_interval_seconds);
    notes.opened(info).await;
    listen(&mut events, first, patience, notes, machine).await
}

async fn listen(
    events: &mut Streaming<v1::Event>,
    first: v1::Event,
    patience: Duration,
    notes: &mut Notes,
    mut machine: watch::Receiver<Machine>,
) -> Result<std::convert::Infallible, End> {
    let mut allowance = Allowance::new(Instant::now());
    let mut event = first;
    loop {
        if !allowance.take(Instant::now()) {
            return Err(Refusal::Flood.into());
        }
        notes.send(Report::Heard(text::clean_event(event))).await;
        event = next(events, patience, &mut machine).await?;
    }
}

/// The next event; the wait begins anew whenever something becomes known of the VM.
async fn next(
    events: &mut Streaming<v1::Event>,
    patience: Duration,
    machine: &mut watch::Receiver<Machine>,
) -> Result<v1::Event, Loss> {
    loop {
        let paused = machine.borrow_and_update().power == PowerState::Paused;
        tokio::select! {
            event = events.message() => return event?.ok_or(Loss::Closed),
            Ok(()) = machine.changed() => {}
            () = tokio::time::sleep(patience), if !paused => return Err(Loss::Silent(patience)),
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

async fn soon<T>(answer: impl Future<Output = Result<T, Loss>>) -> Result<T, Loss> {
    tokio::time::timeout(CALL_DEADLINE, answer).await.unwrap_or(Err(Loss::Unanswered))
}

impl From<Status> for Loss {
    /// A status without a source came from the agent; with one, from the connection below.
    fn from(status: Status) -> Self {
        if std::error::Error::source(&status).is_some() {
            return Self::Closed;
        }
        Self::Call { code: status.code(), message: text::clean(status.message()) }
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
