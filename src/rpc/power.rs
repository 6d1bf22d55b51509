//! `guestlet.v1.Power`: ends, restarts or suspends this machine for the host half, by the verbs that QGA clients have.

use tonic::{Request, Response, Status};

use crate::guest::power::{self, Mode};
use crate::guest::{Guest, suspend};
use crate::rpc::guard;
use crate::rpc::guest::may_work;
use crate::sys::error_chain;
use crate::wire::proto::v1::power_server::{self, PowerServer};
use crate::wire::proto::v1::{
    ShutdownMode, ShutdownRequest, ShutdownResponse, SuspendResponse, SuspendToBothRequest,
    SuspendToDiskRequest, SuspendToMemoryRequest,
};

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> PowerServer<Self> {
        PowerServer::new(self)
    }

    async fn suspend(&self, mode: suspend::Mode) -> Result<Response<SuspendResponse>, Status> {
        may_work()?;
        let done = suspend::suspend(&self.0, mode).await;
        done.map_err(|error| Status::failed_precondition(error_chain::words(&error)))?;
        Ok(Response::new(SuspendResponse {}))
    }
}

#[tonic::async_trait]
impl power_server::Power for Service {
    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        let mode = ShutdownMode::try_from(request.get_ref().mode)
            .map_err(|_| Status::invalid_argument("this agent does not support this mode"))?;
        let mode = match mode {
            ShutdownMode::Unspecified | ShutdownMode::Powerdown => Mode::Powerdown,
            ShutdownMode::Halt => Mode::Halt,
            ShutdownMode::Reboot => Mode::Reboot,
        };
        guard::concerns(&request, || mode.to_string());
        let done = power::shutdown(&self.0, mode).await;
        done.map_err(|error| Status::failed_precondition(error_chain::words(&error)))?;
        Ok(Response::new(ShutdownResponse {}))
    }

    async fn suspend_to_memory(
        &self,
        _: Request<SuspendToMemoryRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.suspend(suspend::Mode::Ram).await
    }

    async fn suspend_to_disk(
        &self,
        _: Request<SuspendToDiskRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.suspend(suspend::Mode::Disk).await
    }

    async fn suspend_to_both(
        &self,
        _: Request<SuspendToBothRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.suspend(suspend::Mode::Hybrid).await
    }
}
