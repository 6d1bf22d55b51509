//! What the controller asks of this node: the agents of its guests.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::host::backends::kubevirt::node::{Instance, Roster};
use crate::host::caller::Behalf;
use crate::host::calls::{Answer, Calls};
use crate::host::disks::release::{CAPABILITY, MEETING, NO_SESSION, PAUSED, too_old};
use crate::host::fleet::{Handle, Reach};
use crate::host::text;
use crate::wire::proto::v1::guests_server;
use crate::wire::proto::v1::{
    Disk, FindDiskOfGuestRequest, FindDiskResponse, OnBehalf, ReleaseDiskOfGuestRequest, ReleaseDiskResponse,
    RunningVirtualMachine,
};

/// Answers the controller.
#[derive(Debug, Clone)]
pub struct Guests {
    /// Has the sessions.
    pub fleet: Handle,
    /// Says which VirtualMachineInstances they are with.
    pub roster: Arc<Roster>,
}

impl Guests {
    /// For calls of the agent in a VM, if that is the one that is meant.
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
        // A session may just be about to come, as when this program has just started.
        let reach = self.fleet.meet(&name, MEETING).await;
        let reach = reach.map_err(|stopped| Status::unavailable(stopped.to_string()))?;
        // The session is with the VM that was checked, or with the one that has come in its place.
        if !self.roster.get(&name).is_some_and(|one| is_it(&one)) {
            return Err(Status::unavailable(format!("the VM {name} has just gone from this node")));
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
            // This alone says that there is nobody who could be asked.
            Some(Reach::NoSession) => Err(Status::not_found(NO_SESSION)),
            Some(Reach::Untold) | None => Err(Status::unavailable(format!("the VM {name} has just gone"))),
        }
    }
}

/// What an agent said; of one that has gone, that nothing was said.
fn told<T>(answer: Answer<T>) -> Answer<T> {
    answer.map_err(|status| match std::error::Error::source(&status) {
        // What has become of the call is not known.
        Some(_) => Status::unavailable("the session with the agent ended"),
        None => Status::new(status.code(), text::clean_words(status.message())),
    })
}

/// A disk by its name alone, which is all that is wanted: whatever else a guest says of it must not fill the stream that all
/// guests of the node share.
fn named(disk: &Disk) -> Disk {
    Disk { name: text::clean(&disk.name), ..Disk::default() }
}

#[tonic::async_trait]
impl guests_server::Guests for Guests {
    async fn find_disk(&self, request: Request<FindDiskOfGuestRequest>) -> Answer<FindDiskResponse> {
        let FindDiskOfGuestRequest { vm, behalf, request } = request.into_inner();
        let mut calls = self.calls(vm, behalf).await?;
        let found = told(calls.find_disk(request.unwrap_or_default()).await)?.into_inner();
        Ok(Response::new(FindDiskResponse { disk: found.disk.as_ref().map(named) }))
    }

    async fn release_disk(&self, request: Request<ReleaseDiskOfGuestRequest>) -> Answer<ReleaseDiskResponse> {
        let ReleaseDiskOfGuestRequest { vm, behalf, request } = request.into_inner();
        let mut calls = self.calls(vm, behalf).await?;
        let ReleaseDiskResponse { disk, removed } =
            told(calls.release_disk(request.unwrap_or_default()).await)?.into_inner();
        Ok(Response::new(ReleaseDiskResponse { disk: disk.as_ref().map(named), removed }))
    }
}
