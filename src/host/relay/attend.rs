//! Requests of the controller to this node: calls to the agents of its guests.
//!
//! The controller detaches a disk from a guest whose agent cannot be asked. This is therefore reported
//! ([`Code::NotFound`](tonic::Code::NotFound)) only if this node is certain: there is no way to an agent in the
//! guest, or none has answered for a long time.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::host::backends::kubevirt::node::{Instance, Roster};
use crate::host::caller::Behalf;
use crate::host::calls::{Answer, Calls};
use crate::host::disks::release::{CAPABILITY, MEETING, NO_SESSION, PAUSED, too_old};
use crate::host::fleet::{Handle, Reach, Stopped};
use crate::host::text;
use crate::wire::proto::v1::guests_server;
use crate::wire::proto::v1::{
    Disk, FindDiskOfGuestRequest, FindDiskResponse, OnBehalf, ReleaseDiskOfGuestRequest, ReleaseDiskResponse,
    RunningVirtualMachine, SessionState,
};

/// Time without a session after which a guest is considered to have no agent. An agent that restarts, or whose
/// guest boots, is back sooner.
const NONE_AFTER: Duration = Duration::from_secs(60);

/// Implementation of `guestlet.v1.Guests` for the controller.
#[derive(Debug, Clone)]
pub struct Guests {
    /// Fleet, which has the sessions.
    pub fleet: Handle,
    /// VirtualMachineInstances of this node.
    pub roster: Arc<Roster>,
}

impl Guests {
    /// Returns the calls to the agent in a VM, after checking that this instance of the VM runs here.
    async fn calls(
        &self,
        vm: Option<RunningVirtualMachine>,
        behalf: Option<OnBehalf>,
    ) -> Result<Calls, Status> {
        let vm = vm.ok_or_else(|| Status::invalid_argument("vm is missing"))?;
        let name = format!("{}/{}", vm.namespace, vm.name);
        let is_it = |one: &Instance| one.uid.eq_ignore_ascii_case(&vm.uid);
        if !self.roster.get(&name).is_some_and(|one| is_it(&one)) {
            let words = format!("the VM {name} ({}) does not run on this node", vm.uid);
            return Err(Status::unavailable(words));
        }
        let stopped = |stopped: Stopped| Status::unavailable(stopped.to_string());
        let known = self.fleet.get(name.clone()).await.map_err(stopped)?;
        if known.is_some_and(|known| has_no_agent(known.view.session())) {
            return Err(Status::not_found(NO_SESSION));
        }
        // A session may be about to open, for example when this program has just started.
        let reach = self.fleet.meet(&name, MEETING).await.map_err(stopped)?;
        // The session may be with another instance that has taken the place of the checked one, so the check is repeated.
        if !self.roster.get(&name).is_some_and(|one| is_it(&one)) {
            return Err(Status::unavailable(format!("the VM {name} has just left this node")));
        }
        let behalf = match behalf {
            None => None,
            Some(OnBehalf { caller, audit_id }) => Some(
                Behalf::told(caller, audit_id)
                    .ok_or_else(|| Status::invalid_argument("behalf has no caller, or no identifier"))?,
            ),
        };
        match reach {
            Some(Reach::Session { agent, capabilities })
                if capabilities.iter().any(|one| one == CAPABILITY) =>
            {
                Ok(agent.on_behalf_of_any(behalf))
            }
            Some(Reach::Session { .. }) => Err(Status::unimplemented(too_old())),
            Some(Reach::Paused) => Err(Status::failed_precondition(PAUSED)),
            Some(Reach::NoSession) => {
                let known = self.fleet.get(name.clone()).await.map_err(stopped)?;
                let known =
                    known.ok_or_else(|| Status::unavailable(format!("the VM {name} was just removed")))?;
                Err(without_session(known.view.session(), &known.view.reason, known.since.elapsed()))
            }
            Some(Reach::Untold) | None => Err(Status::unavailable(format!("the VM {name} was just removed"))),
        }
    }
}

/// Returns whether this state of the session means that there is no way to an agent in the guest.
fn has_no_agent(session: SessionState) -> bool {
    matches!(session, SessionState::NoVsock | SessionState::Gone)
}

/// Returns the status for a guest without a session, from the state, its reason, and how long it has lasted.
fn without_session(session: SessionState, reason: &str, lasts: Duration) -> Status {
    match session {
        session if has_no_agent(session) => Status::not_found(NO_SESSION),
        // There is an agent, but another host half holds the guest or the guest is not trusted. It may be using the disk.
        SessionState::Refused => {
            let words = format!("the session with the agent in this guest is refused: {reason}");
            Status::failed_precondition(words)
        }
        _ if lasts >= NONE_AFTER => Status::not_found(format!("{NO_SESSION}: {reason}")),
        _ => Status::unavailable(format!("{NO_SESSION} yet: {reason}")),
    }
}

/// Returns the answer of an agent with its error text cleaned; if the connection broke, a status that says so.
fn told<T>(answer: Answer<T>) -> Answer<T> {
    answer.map_err(|status| match std::error::Error::source(&status) {
        // The outcome of the call is unknown.
        Some(_) => Status::unavailable("the session with the agent ended"),
        None => Status::new(status.code(), text::clean_words(status.message())),
    })
}

/// Returns a disk with its name alone. The controller needs nothing else, and other data of the guest must not
/// fill the stream that all guests of the node share.
fn named(disk: &Disk) -> Disk {
    Disk { name: text::clean(&disk.name), ..Disk::default() }
}

#[tonic::async_trait]
impl guests_server::Guests for Guests {
    async fn find_disk(&self, request: Request<FindDiskOfGuestRequest>) -> Answer<FindDiskResponse> {
        let FindDiskOfGuestRequest { vm, behalf, request } = request.into_inner();
        let calls = self.calls(vm, behalf).await?;
        let found = told(calls.find_disk(request.unwrap_or_default()).await)?.into_inner();
        Ok(Response::new(FindDiskResponse { disk: found.disk.as_ref().map(named) }))
    }

    async fn release_disk(&self, request: Request<ReleaseDiskOfGuestRequest>) -> Answer<ReleaseDiskResponse> {
        let ReleaseDiskOfGuestRequest { vm, behalf, request } = request.into_inner();
        let calls = self.calls(vm, behalf).await?;
        let ReleaseDiskResponse { disk, removed } =
            told(calls.release_disk(request.unwrap_or_default()).await)?.into_inner();
        Ok(Response::new(ReleaseDiskResponse { disk: disk.as_ref().map(named), removed }))
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn only_of_a_guest_that_is_known_to_have_no_agent_it_is_said_that_there_is_none() {
        let (soon, late) = (NONE_AFTER.saturating_sub(Duration::from_millis(1)), NONE_AFTER);
        for (session, lasts, expected) in [
            (SessionState::NoVsock, Duration::ZERO, Code::NotFound),
            (SessionState::Gone, Duration::ZERO, Code::NotFound),
            (SessionState::Connecting, Duration::ZERO, Code::Unavailable),
            (SessionState::Connecting, soon, Code::Unavailable),
            (SessionState::Connecting, late, Code::NotFound),
            (SessionState::Refused, soon, Code::FailedPrecondition),
            (SessionState::Refused, late * 100, Code::FailedPrecondition),
        ] {
            let said = without_session(session, "why", lasts);
            assert_eq!(said.code(), expected, "{session:?} for {lasts:?}");
        }
        let said = without_session(SessionState::Refused, "it has another key", late);
        assert!(said.message().ends_with("is refused: it has another key"), "{said:?}");
    }
}
