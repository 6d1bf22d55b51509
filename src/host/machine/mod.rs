//! Calls of people that this host half only passes to the agent in a guest: each on behalf of its caller, with a
//! timeout, and with a limit for each guest. The agent decides whether to carry out a call; the access rules
//! decide whether it is passed on at all.
//!
//! ```text
//! guestctl ──▶ api ──admitted──▶ desk of the VM ──▶ agent, on behalf of the caller ──▶ answer, cleaned
//!                                  │ too many: RESOURCE_EXHAUSTED    │ too late: DEADLINE_EXCEEDED
//! ```
//!
//! To add a call: its row in `calls`, and its method in the services of the api.

mod calls;
mod clean;
mod desk;
mod streams;

use prost::Message;
use tonic::{Code, Status};

use super::caller::{Behalf, Caller};
use super::calls::Agent;
use super::fleet::{Handle, Reach};
use super::handed_on::HandedOn;
use super::text;

pub use desk::{Beside, Desks};
pub use streams::Stream;

/// Passes a request to the agent, and returns its answer.
///
/// # Errors
/// The agent's errors; `NOT_FOUND`, `FAILED_PRECONDITION`, `UNAVAILABLE`, `UNIMPLEMENTED` if it cannot be called,
/// `RESOURCE_EXHAUSTED` if too many calls wait for it, `DEADLINE_EXCEEDED` if it takes too long. After the last
/// one, and after `UNAVAILABLE`, the request may have been carried out.
pub async fn hand_on<R: HandedOn>(
    desks: &Desks,
    fleet: &Handle,
    behalf: &Behalf,
    mut request: R,
) -> Result<R::Answer, Status> {
    let (name, turn) = (request.take_name(), request.turn());
    let agent = agent_with(fleet, &name, R::CAPABILITY).await?;
    let limits = fleet.limits(name.clone()).await?.ok_or_else(unknown)?;
    let desk = desks.of(&name, &limits);
    let work = async {
        let place = desk.place(turn, behalf.caller()).await?;
        let answer = agent.on_behalf_of(behalf.clone()).hand_on(request).await;
        let answer = answer.map_err(|status| said(&status))?.into_inner();
        desk.count(answer.encoded_len()).await;
        drop(place);
        R::clean(answer)
    };
    tokio::time::timeout(R::WITHIN, work).await.unwrap_or_else(|_| {
        let seconds = R::WITHIN.as_secs();
        Err(Status::deadline_exceeded(format!(
            "the guest of {name:?} has not answered within {seconds} s; it is not known whether it did what was requested"
        )))
    })
}

/// Reserves one more stream of this kind to a VM's guest, which must have a session.
///
/// # Errors
/// If the guest cannot be called, or has too many streams.
pub async fn place_for_stream(
    desks: &Desks,
    fleet: &Handle,
    name: &str,
    caller: &Caller,
    beside: Beside,
) -> Result<Stream, Status> {
    if agent_with(fleet, name, beside.capability()).await?.is_elsewhere() {
        return Err(Status::unimplemented(beside.elsewhere()));
    }
    let limits = fleet.limits(name.to_owned()).await?.ok_or_else(unknown)?;
    desks.of(name, &limits).beside(beside).place(caller)
}

fn unknown() -> Status {
    Status::not_found("there is no such VM")
}

/// Reports whether the agent of a VM has a session and this capability.
///
/// # Errors
/// When the fleet has ended, or knows no such VM.
pub async fn is_able(fleet: &Handle, name: &str, capability: &str) -> Result<bool, Status> {
    let reach = fleet.caller(name.to_owned()).await?.ok_or_else(unknown)?;
    Ok(
        matches!(reach, Reach::Session { capabilities, .. } if capabilities.iter().any(|one| one == capability)),
    )
}

/// Returns the error for an agent that is too old for a call.
pub fn too_old(name: &str) -> Status {
    Status::unimplemented(format!(
        "the agent in the guest of {name:?} is too old for this; update guestlet in the guest"
    ))
}

async fn agent_with(fleet: &Handle, name: &str, capability: &str) -> Result<Agent, Status> {
    match fleet.caller(name.to_owned()).await?.ok_or_else(unknown)? {
        Reach::Session { agent, capabilities } if capabilities.iter().any(|one| one == capability) => {
            Ok(agent)
        }
        // Another program has its session, and knows the capabilities of the agent.
        Reach::Session { agent, .. } if agent.is_elsewhere() => Ok(agent),
        Reach::Session { .. } => Err(too_old(name)),
        Reach::Paused => Err(Status::failed_precondition("the VM is paused: its guest cannot answer")),
        Reach::Untold => Err(Status::unavailable("the node of this guest cannot be reached now")),
        Reach::NoSession => {
            let known = fleet.get(name.to_owned()).await?;
            let reason = known.map(|known| known.view.reason.clone()).filter(|reason| !reason.is_empty());
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            Err(Status::failed_precondition(format!("there is no session with this guest now{reason}")))
        }
    }
}

/// Cleans an error of an agent. If the session has ended, replaces it by one that says so.
fn said(status: &Status) -> Status {
    if std::error::Error::source(status).is_some() && status.code() != Code::OutOfRange {
        return Status::unavailable(
            "the session with the guest ended; it is not known whether it did what was requested",
        );
    }
    let words = text::clean_words(status.message());
    match status.code() {
        // A guest must not be able to make it look as if the VM did not exist.
        Code::NotFound => Status::failed_precondition(words),
        code => Status::new(code, words),
    }
}
