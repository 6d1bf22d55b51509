//! One conversation with an agent, from the dial to its end.
//!
//! ```text
//!  dial ──stream──▶ GetInfo ──▶ UUID ──as expected──▶ WatchEvents ──AgentReady──▶ open ──event──▶ open
//!    │                 │          │                     │    │                     │ ╲
//!    └─────────────────┴──lost────│─────────────────────│────┴─────────────────────┴──╲──▶ lost
//!                                 └─another──▶ refused ◀┴─held by another host half─────┘ more than allowed
//! ```
//!
//! Every step has a deadline, every message a bound. The future owns the connection, on which the guest asks, too
//! ([`callback`]): dropping it closes the stream at once.

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

/// How a guest's events are asked for.
const WATCH_EVENTS: &str = "/guestlet.v1.Guest/WatchEvents";
/// How long an agent may take to answer a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Heartbeats of an agent that does not say how often they come.
const USUAL_HEARTBEAT: Duration = Duration::from_secs(10);
/// How long an answer that was received before the stream's end may take to be read.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// What a session knows from one conversation to the next.
#[derive(Debug, Default)]
pub struct Memory {
    /// Where the events are to be resumed.
    pub order: Order,
    /// What the guest speaks.
    pub speech: Speech,
}

/// Talks until the conversation ends. What happens goes to `notes`, and `machine` says whether the VM is paused: then its
/// silence means nothing.
///
/// # Errors
/// Always, with what ended it.
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
        // It may have been given keys since.
        *speech = Speech::Secured;
    }
    gate.shut().map_or(end, |excess| Err(Refusal::from(excess).into()))
}

/// Whether the agent has only gone: TLS says more of a stream that ends without its farewell than people need to know.
fn is_end(error: &http2::ClientError) -> bool {
    error.get_io().is_some_and(|error| error.kind() == ErrorKind::UnexpectedEof)
}

/// Makes the calls of a conversation, and answers those of the guest. What lasts as long as the conversation is kept small here, since
/// there is one with each guest: what passes is boxed.
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

/// A conversation that is open.
struct Opened {
    /// After the first one.
    events: Streaming<Bytes>,
    patience: Duration,
    /// It can be told where it runs.
    is_told: bool,
    has_callback: bool,
    /// It can be given health checks.
    has_checks: bool,
}

/// Opens a conversation, and tells that it is.
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

/// Learns who the guest is, and opens its events.
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

/// Opens the events, as their bytes: one that is larger than allowed is not to be decoded.
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

/// Whether this is the guest that is expected: what is not told proves nothing.
///
/// # Errors
/// If it is not.
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

/// The next event; the wait begins anew whenever something becomes known of the VM.
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
