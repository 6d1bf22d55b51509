//! `guestlet.v1.Machine`: clock, processors and memory, for the host half, by the verbs that QGA clients have.

use std::time::{Duration, UNIX_EPOCH};

use tonic::{Code, Request, Response, Status};

use crate::guest::memory_blocks::Outcome;
use crate::guest::{Guest, clock, memory_blocks, processors};
use crate::rpc::guard;
use crate::rpc::guest::may_work;
use crate::sys::{blocking, error_chain};
use crate::wire::proto::v1;
use crate::wire::proto::v1::machine_server::{self, MachineServer};
use crate::wire::switches;

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> MachineServer<Self> {
        MachineServer::new(self)
    }
}

fn internal(error: &dyn std::error::Error) -> Status {
    Status::internal(error_chain::words(error))
}

fn not_set(error: &clock::Error) -> Status {
    let code = match error {
        clock::Error::OutOfRange => Code::InvalidArgument,
        _ => Code::FailedPrecondition,
    };
    Status::new(code, error_chain::words(error))
}

/// Converts the requested switches to pairs of number and state.
fn wanted(switches: &[v1::Switch]) -> Vec<(u64, bool)> {
    switches.iter().map(|switch| (switch.id, switch.online)).collect()
}

#[tonic::async_trait]
impl machine_server::Machine for Service {
    async fn get_time(&self, _: Request<v1::GetTimeRequest>) -> Result<Response<v1::TimeOfDay>, Status> {
        may_work()?;
        // /etc/localtime may be on a disk that hangs.
        let zone = blocking::run(clock::zone).await.map_err(|error| internal(&error))?;
        let nanoseconds = u64::try_from(clock::now()).unwrap_or_default();
        let time = UNIX_EPOCH + Duration::from_nanos(nanoseconds);
        Ok(Response::new(v1::TimeOfDay {
            time: Some(time.into()),
            zone: zone.abbreviation,
            offset_seconds: zone.offset,
        }))
    }

    async fn set_time(
        &self,
        request: Request<v1::SetTimeRequest>,
    ) -> Result<Response<v1::SetTimeResponse>, Status> {
        may_work()?;
        let set = match request.get_ref().time {
            None => {
                guard::concerns(&request, || "from the hardware clock".to_owned());
                clock::set_from_hardware(&self.0).await
            }
            Some(time) => {
                guard::concerns(&request, || format!("{}.{:09} s", time.seconds, time.nanos));
                let whole = u64::try_from(time.seconds).map(Duration::from_secs);
                let nanos = u32::try_from(time.nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
                let (Ok(whole), Some(nanos)) = (whole, nanos) else {
                    return Err(not_set(&clock::Error::OutOfRange));
                };
                clock::set(&self.0, whole.saturating_add(Duration::from_nanos(nanos.into()))).await
            }
        };
        set.map_err(|error| not_set(&error))?;
        Ok(Response::new(v1::SetTimeResponse {}))
    }

    async fn list_processors(
        &self,
        _: Request<v1::ListProcessorsRequest>,
    ) -> Result<Response<v1::ListProcessorsResponse>, Status> {
        may_work()?;
        let found = processors::list(&self.0).await.map_err(|error| internal(&error))?;
        let processor = |one: processors::Processor| v1::Processor {
            id: one.id,
            online: one.online,
            can_offline: one.can_offline,
        };
        let processors = found.into_iter().map(processor).collect();
        Ok(Response::new(v1::ListProcessorsResponse { processors }))
    }

    async fn set_processors(
        &self,
        request: Request<v1::SetProcessorsRequest>,
    ) -> Result<Response<v1::SetProcessorsResponse>, Status> {
        let asked = &request.get_ref().processors;
        guard::concerns(&request, || switches::words(asked));
        may_work()?;
        let done = processors::set(&self.0, wanted(asked)).await;
        let done = done.map_err(|error| Status::failed_precondition(error_chain::words(&error)))?;
        Ok(Response::new(v1::SetProcessorsResponse { done: u32::try_from(done).unwrap_or(u32::MAX) }))
    }

    async fn list_memory_blocks(
        &self,
        _: Request<v1::ListMemoryBlocksRequest>,
    ) -> Result<Response<v1::ListMemoryBlocksResponse>, Status> {
        may_work()?;
        let found = memory_blocks::list(&self.0).await.map_err(|error| internal(&error))?;
        let block_bytes = match found.as_slice() {
            [] => 0,
            _ => memory_blocks::size(&self.0.root).map_err(|error| internal(&error))?,
        };
        let block = |one: memory_blocks::Block| v1::MemoryBlock {
            id: one.index,
            online: one.online,
            can_offline: one.can_offline,
        };
        let blocks = found.into_iter().map(block).collect();
        Ok(Response::new(v1::ListMemoryBlocksResponse { block_bytes, blocks }))
    }

    async fn set_memory_blocks(
        &self,
        request: Request<v1::SetMemoryBlocksRequest>,
    ) -> Result<Response<v1::SetMemoryBlocksResponse>, Status> {
        let asked = &request.get_ref().blocks;
        guard::concerns(&request, || switches::words(asked));
        may_work()?;
        let became = memory_blocks::set(&self.0, wanted(asked)).await;
        let block = |(id, outcome): (u64, Outcome)| v1::SwitchedBlock {
            id,
            problem: match outcome {
                Outcome::Done => String::new(),
                Outcome::Unknown(_) => "there is no such memory block".to_owned(),
                Outcome::Unsupported(error) => format!("it cannot be switched: {error}"),
                Outcome::Failed(error) => error.to_string(),
            },
        };
        let blocks = became.into_iter().map(block).collect();
        Ok(Response::new(v1::SetMemoryBlocksResponse { blocks }))
    }
}
