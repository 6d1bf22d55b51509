//! `guestlet.v1.Freeze`: freezes for the host half, by the same freezer that QGA clients have.

use std::collections::BTreeSet;

use tonic::{Code, Request, Response, Status};

use crate::guest::Guest;
use crate::guest::freeze::{self, By};
use crate::policy::Asker;
use crate::receipt::Caller;
use crate::rpc::{guard, receipts};
use crate::sys::error_chain;
use crate::wire::proto::v1;
use crate::wire::proto::v1::freeze_server::{self, FreezeServer};

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> FreezeServer<Self> {
        FreezeServer::new(self)
    }
}

/// Converts to whole seconds, rounded down, so that no caller is promised more time than remains.
fn seconds(left: std::time::Duration) -> u32 {
    u32::try_from(left.as_secs()).unwrap_or(u32::MAX)
}

fn failed(error: &freeze::Error) -> Status {
    use freeze::Error;
    let code = match error {
        Error::NotMounted(_) => Code::InvalidArgument,
        Error::Cancelled | Error::Spoiled(_) => Code::Aborted,
        Error::Stopping => Code::Unavailable,
        Error::Mounts(_) | Error::Thread(_) | Error::AfterThaw(_) | Error::Stuck(_) => Code::Internal,
        Error::Busy(_)
        | Error::Hook { .. }
        | Error::Application(_)
        | Error::FileSystem { .. }
        | Error::Marker { .. }
        | Error::TooLong { .. } => Code::FailedPrecondition,
    };
    Status::new(code, error_chain::words(error))
}

#[tonic::async_trait]
impl freeze_server::Freeze for Service {
    async fn freeze_file_systems(
        &self,
        request: Request<v1::FreezeFileSystemsRequest>,
    ) -> Result<Response<v1::FreezeFileSystemsResponse>, Status> {
        let holder = request.extensions().get::<Asker>().map(ToString::to_string).unwrap_or_default();
        let caller = Caller::new(&holder, "guestlet");
        let mount_points = request.get_ref().mount_points.clone();
        guard::concerns(&request, || mount_points.join(" "));
        let which = Some(mount_points).filter(|mount_points| !mount_points.is_empty());
        let frozen = freeze::freeze(&self.0, which, &caller).await.map_err(|error| failed(&error))?;
        let answer = match self.0.freezer.status() {
            _ if frozen == 0 => v1::FreezeFileSystemsResponse::default(),
            freeze::Status::Busy { file_systems, left: Some(left), .. } => {
                v1::FreezeFileSystemsResponse { mount_points: file_systems, seconds_left: seconds(left) }
            }
            _ => {
                return Err(Status::aborted(
                    "the file systems were thawed by somebody else just after they were frozen",
                ));
            }
        };
        Ok(Response::new(answer))
    }

    async fn thaw_file_systems(
        &self,
        request: Request<v1::ThawFileSystemsRequest>,
    ) -> Result<Response<v1::ThawFileSystemsResponse>, Status> {
        let cut = request.get_ref().cut.as_ref().map(receipts::cut);
        let wanted: BTreeSet<_> = request.get_ref().mount_points.iter().collect();
        if !wanted.is_empty()
            && let freeze::Status::Busy { holder, file_systems, .. } = self.0.freezer.status()
            && wanted != file_systems.iter().collect()
        {
            return Err(Status::failed_precondition(format!(
                "other file systems are frozen, for {holder}: {}; a thaw applies to all of them",
                file_systems.join(" ")
            )));
        }
        let done = freeze::thaw_after(&self.0, By::Client, cut).await.map_err(|error| failed(&error))?;
        let mut answer = v1::ThawFileSystemsResponse {
            thawed: u32::try_from(done.file_systems).unwrap_or(u32::MAX),
            ..v1::ThawFileSystemsResponse::default()
        };
        if let Some(told) = done.receipt {
            answer.receipt = told.id;
            told.level.clone_into(&mut answer.level);
            answer.reasons = told.reasons;
        }
        Ok(Response::new(answer))
    }

    async fn list_receipts(
        &self,
        request: Request<v1::ListReceiptsRequest>,
    ) -> Result<Response<v1::ListReceiptsResponse>, Status> {
        receipts::list(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn get_receipt(
        &self,
        request: Request<v1::GetReceiptRequest>,
    ) -> Result<Response<v1::GetReceiptResponse>, Status> {
        receipts::get(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn get_freeze(
        &self,
        _: Request<v1::GetFreezeRequest>,
    ) -> Result<Response<v1::FreezeState>, Status> {
        Ok(Response::new(match self.0.freezer.status() {
            freeze::Status::Thawed { spoiled } => {
                v1::FreezeState { spoiled: spoiled.unwrap_or_default(), ..v1::FreezeState::default() }
            }
            freeze::Status::Busy { holder, since, stage, file_systems, left } => v1::FreezeState {
                stage,
                holder,
                since: Some(since.into()),
                mount_points: file_systems,
                seconds_left: left.map(seconds),
                spoiled: String::new(),
            },
        }))
    }
}
