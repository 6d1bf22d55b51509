//! Conversation with an agent, from the dial to its end.
//!
//! ```text
//!  dial ──stream──▶ GetInfo ──▶ UUID ──as expected──▶ WatchEvents ──AgentReady──▶ open ──event──▶ open
//!    │                 │          │                     │    │                     │ ╲
//!    └─────────────────┴──lost────│─────────────────────│────┴─────────────────────┴──╲──▶ lost
//!                                 └─another──▶ refused ◀┴─held by another host half─────┘ more than allowed
//! ```
//!
//! Every step has a deadline and every message a limit. The future owns the connection, which carries the guest's
//! calls as well ([`callback`]): dropping it closes the stream at once.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::client::Grpc;
use tonic::codec::Streaming;

use super::callback;
use super::contact::{Contact, Proved, Reached, Speech};
use super::conversation::{Caller, Channel, End, Loss, Refusal};
use super::health_checks;
use super::intake::Heard;
use super::order::Order;
use super::rate::Allowance;
use super::report::{Machine, Notes, Report};
use super::rotation;
use super::text;
use super::topology;
use super::trust::{self, How};
use crate::transport::http2;
use crate::wire::codec::Raw;
use crate::wire::proto::v1::{self, PowerState};

/// Method path for the stream of a guest's events.
const WATCH_EVENTS: &str = "/guestlet.v1.Guest/WatchEvents";
/// Timeout of an agent for a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Heartbeat interval of an agent that does not announce one.
const USUAL_HEARTBEAT: Duration = Duration::from_secs(10);
/// Time for reading an answer that was received before the end of the stream.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// State that a session keeps from one conversation to the next.
#[derive(Debug, Default)]
pub struct Memory {
    /// Position at which the events resume.
    pub order: Order,
    /// Speech of the guest, TLS or plain.
    pub speech: Speech,
}

/// Talks until the conversation ends. Reports go to `notes`; `machine` shows whether the VM is paused, in which
/// case silence is no sign of a loss.
///
/// # Errors
/// Always: the reason for the end.
pub async fn talk(
    contact: &Contact,
    memory: &mut Memory,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
) -> Result<Infallible, End> {
    let began = Instant::now();
    let Memory { order, speech } = memory;
    let Reached { stream, gate, guest } = Box::pin(contact.reach(speech)).await?;
    let is_plain = guest == Proved::Nothing;
    let (client, mut connection) =
        Box::pin(soon(async { Ok(http2::connect(stream).await.map_err(Loss::Broken)?) })).await?;
    let end = {
        let mut calls = Box::pin(calls(&client, contact, &guest, order, notes, machine, began));
        tokio::select! {
            biased;
            end = &mut calls => end,
            ended = connection.ended() => {
                let left = tokio::time::timeout(LEFTOVERS, calls).await;
                match (left.unwrap_or(Err(Loss::Closed.into())), ended) {
                    (Err(End::Lost(Loss::Closed)), Err(error)) if !is_end(&error) => {
                        Err(Loss::Broken(error).into())
                    }
                    (left, _) => left,
                }
            }
        }
    };
    if is_plain && !notes.is_open() {
        // The guest may have been given keys since.
        *speech = Speech::Secured;
    }
    gate.shut().map_or(end, |excess| Err(Refusal::from(excess).into()))
}

/// Returns whether the agent has only closed the connection. TLS reports a stream that ends without `close_notify`
/// as an error, which would be confusing in messages.
fn is_end(error: &http2::ClientError) -> bool {
    error.get_io().is_some_and(|error| error.kind() == ErrorKind::UnexpectedEof)
}

/// Makes the calls of a conversation, and answers those of the guest. There is one such future for each guest, so
/// it is kept small: short-lived parts are boxed.
async fn calls(
    client: &http2::Client,
    contact: &Contact,
    guest: &Proved,
    order: &mut Order,
    notes: &mut Notes,
    machine: watch::Receiver<Machine>,
    began: Instant,
) -> Result<Infallible, End> {
    let channel = Channel::new(client.clone(), contact.vm.limits.message_bytes);
    let caller = channel.guest();
    let Opened { mut events, patience, is_told, has_callback, has_checks } =
        Box::pin(open(client, channel, contact, guest, order, notes, began)).await?;
    let teller = notes.teller();
    let rotation = Box::pin(rotation::keep(&caller, contact, guest.key().is_some()));
    let topology = Box::pin(topology::keep(&caller, contact, is_told, &teller));
    let checks = health_checks::keep(client, contact, has_checks);
    let callback = Box::pin(callback::keep(client, contact, has_callback, &teller));
    tokio::select! {
        end = listen(&mut events, patience, contact, order, notes, machine) => end,
        refusal = callback => Err(refusal.into()),
        never = topology => match never {},
        never = checks => match never {},
        () = rotation => Err(Loss::Renewed.into()),
    }
}

/// Open conversation.
struct Opened {
    /// Events after the first one.
    events: Streaming<Bytes>,
    patience: Duration,
    /// True if the agent accepts the topology of its VM.
    is_told: bool,
    has_callback: bool,
    /// True if the agent makes health checks.
    has_checks: bool,
}

/// Opens a conversation, and reports that it is open.
async fn open(
    client: &http2::Client,
    channel: Channel,
    contact: &Contact,
    guest: &Proved,
    order: &mut Order,
    notes: &mut Notes,
    began: Instant,
) -> Result<Opened, End> {
    let (info, events, first) = begin(client, &mut channel.guest(), contact, guest, order).await?;
    order.take(&first.event).map_err(Refusal::from)?;
    contact.half.metrics.connect.observe(began.elapsed());
    let patience = patience(info.heartbeat_interval_seconds);
    let is_told = topology::is_able(&info.capabilities);
    let has_callback = callback::is_able(&info.capabilities);
    let has_checks = health_checks::is_able(&info.capabilities);
    notes.opened(info, channel, guest.key()).await;
    notes.send(Report::Heard(first)).await;
    Ok(Opened { events, patience, is_told, has_callback, has_checks })
}

/// Reads the guest's information, verifies its identity, and opens its event stream.
async fn begin(
    client: &http2::Client,
    caller: &mut Caller,
    contact: &Contact,
    guest: &Proved,
    order: &mut Order,
) -> Result<(v1::GuestInfo, Streaming<Bytes>, Heard), End> {
    let info = soon(async { Ok(caller.get_info(v1::GetInfoRequest {}).await?.into_inner()) }).await?;
    let info = text::clean_info(info);
    if let Some(expected) = &contact.vm.ids.dmi {
        check_dmi(&info.dmi_uuid, expected)?;
    }
    if let (Proved::First { key, token, binding }, Some(trust)) = (guest, &contact.trust) {
        let how = match token {
            None => How::FirstUse,
            Some(token) => {
                let proof = soon(async { Ok(caller.enroll(v1::EnrollRequest {}).await) }).await?;
                let problem = match proof {
                    Ok(proof) if token.is_proved(binding, &proof.get_ref().proof) => None,
                    Ok(_) => Some("its proof does not match the token".to_owned()),
                    Err(status) if std::error::Error::source(&status).is_some() => return Err(status.into()),
                    Err(status) => Some(text::clean(status.message())),
                };
                if let Some(problem) = problem {
                    trust.offered(&contact.vm, *key);
                    let vm = contact.vm.name.clone();
                    return Err(Refusal::from(trust::Refusal::Token { vm, problem }).into());
                }
                How::Token
            }
        };
        trust.pin(&contact.vm, *key, how).await.map_err(Refusal::from)?;
    }
    let request = v1::WatchEventsRequest { host: Some(contact.half.host.clone()), after: order.begin() };
    let most = contact.vm.limits.message_bytes;
    let (events, first) = soon(async {
        let mut events = watch(client, most, request).await?;
        let first = events.message().await?.ok_or(Loss::Closed)?;
        Ok((events, first))
    })
    .await?;
    let first = contact.half.intake.take(first, &contact.vm.limits).await?;
    Ok((info, events, first))
}

/// Opens the event stream, as undecoded bytes: an event that is larger than allowed must not be decoded.
async fn watch(
    client: &http2::Client,
    most: usize,
    request: v1::WatchEventsRequest,
) -> Result<Streaming<Bytes>, End> {
    let mut grpc = Grpc::with_origin(client.clone(), http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(most);
    grpc.ready().await.map_err(Loss::Broken)?;
    let request = tonic::Request::new(request);
    Ok(grpc
        .server_streaming(request, PathAndQuery::from_static(WATCH_EVENTS), Raw::default())
        .await?
        .into_inner())
}

/// Checks that the guest's DMI UUID is the expected one. A guest that reports no UUID is not accepted as a match.
///
/// # Errors
/// If it differs, or if only one of the guest and its VM has a UUID.
pub fn check_dmi(found: &str, expected: &str) -> Result<(), Refusal> {
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
    events: &mut Streaming<Bytes>,
    patience: Duration,
    contact: &Contact,
    order: &mut Order,
    notes: &mut Notes,
    mut machine: watch::Receiver<Machine>,
) -> Result<Infallible, End> {
    let limits = &contact.vm.limits;
    let mut allowance =
        Allowance::new(Instant::now(), limits.event_burst.into(), limits.events_per_second.into());
    loop {
        let bytes = next(events, patience, &mut machine).await?;
        if !allowance.take(Instant::now(), 1.0) {
            return Err(Refusal::Flood.into());
        }
        let heard = contact.half.intake.take(bytes, limits).await?;
        order.take(&heard.event).map_err(Refusal::from)?;
        notes.send(Report::Heard(heard)).await;
    }
}

/// Returns the next event. The timeout begins anew whenever the state of the VM changes.
async fn next(
    events: &mut Streaming<Bytes>,
    patience: Duration,
    machine: &mut watch::Receiver<Machine>,
) -> Result<Bytes, End> {
    loop {
        let paused = machine.borrow_and_update().power == PowerState::Paused;
        tokio::select! {
            event = events.message() => return Ok(event?.ok_or(Loss::Closed)?),
            Ok(()) = machine.changed() => {}
            () = tokio::time::sleep(patience), if !paused => return Err(Loss::Silent(patience).into()),
        }
    }
}

/// Returns how long an agent may be silent: 2.5 heartbeats.
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
