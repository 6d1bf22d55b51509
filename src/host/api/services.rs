//! The services that agents and this host half have in common, as the admin API answers them: each call is admitted, and handed
//! on.

use std::pin::Pin;

use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::Api;
use crate::host::handed_on::HandedOn;
use crate::host::{exec, machine};
use crate::transport::Both;
use crate::wire::proto::v1::exec_server::{Exec, ExecServer};
use crate::wire::proto::v1::file_systems_server::{FileSystems, FileSystemsServer};
use crate::wire::proto::v1::freeze_server::{Freeze, FreezeServer};
use crate::wire::proto::v1::power_server::{Power, PowerServer};
use crate::wire::proto::v1::qga_server::{Qga, QgaServer};
use crate::wire::proto::v1::{
    ExecuteQgaRequest, ExecuteQgaResponse, FreezeFileSystemsRequest, FreezeFileSystemsResponse, FreezeState,
    FromProgram, GetFreezeRequest, ListFileSystemsRequest, ListFileSystemsResponse, ListProgramsRequest,
    ListProgramsResponse, ShutdownRequest, ShutdownResponse, SignalProgramRequest, SignalProgramResponse,
    SuspendResponse, SuspendToBothRequest, SuspendToDiskRequest, SuspendToMemoryRequest,
    ThawFileSystemsRequest, ThawFileSystemsResponse, ToProgram, TrimFileSystemsRequest,
    TrimFileSystemsResponse,
};

/// Bytes of one request.
const MAX_REQUEST: usize = 64 * 1024;
/// The same of a command of QGA.
const MAX_COMMAND: usize = (1 << 20) + 1024;

/// These services, and `before`, as HTTP/2 serves them.
pub type Services<B> = Both<
    ExecServer<Api>,
    Both<QgaServer<Api>, Both<FreezeServer<Api>, Both<FileSystemsServer<Api>, Both<PowerServer<Api>, B>>>>,
>;

/// These services beside `before`.
pub fn beside<B>(api: &Api, before: B) -> Services<B> {
    let power = PowerServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let file_systems = FileSystemsServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let freeze = FreezeServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let qga = QgaServer::new(api.clone()).max_decoding_message_size(MAX_COMMAND);
    let exec = ExecServer::new(api.clone()).max_decoding_message_size(exec::MAX_REQUEST);
    Both(exec, Both(qga, Both(freeze, Both(file_systems, Both(power, before)))))
}

impl Api {
    async fn hand_on<R: HandedOn>(&self, request: Request<R>) -> Result<Response<R::Answer>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = machine::hand_on(&self.desks, &self.fleet, &call.behalf, asked).await;
        call.end(done)
    }
}

/// A service, each of whose methods hands its request on.
macro_rules! services {
    ($($service:ident { $($method:ident($request:ty) -> $answer:ty;)* })*) => {$(
        #[tonic::async_trait]
        impl $service for Api {
            $(async fn $method(&self, request: Request<$request>) -> Result<Response<$answer>, Status> {
                self.hand_on(request).await
            })*
        }
    )*};
}

services! {
    Freeze {
        freeze_file_systems(FreezeFileSystemsRequest) -> FreezeFileSystemsResponse;
        thaw_file_systems(ThawFileSystemsRequest) -> ThawFileSystemsResponse;
        get_freeze(GetFreezeRequest) -> FreezeState;
    }
    FileSystems {
        list_file_systems(ListFileSystemsRequest) -> ListFileSystemsResponse;
        trim_file_systems(TrimFileSystemsRequest) -> TrimFileSystemsResponse;
    }
    Power {
        shutdown(ShutdownRequest) -> ShutdownResponse;
        suspend_to_memory(SuspendToMemoryRequest) -> SuspendResponse;
        suspend_to_disk(SuspendToDiskRequest) -> SuspendResponse;
        suspend_to_both(SuspendToBothRequest) -> SuspendResponse;
    }
    Qga { execute_qga(ExecuteQgaRequest) -> ExecuteQgaResponse; }
}

/// What comes from a program.
type Answers = Pin<Box<dyn Stream<Item = Result<FromProgram, Status>> + Send>>;

#[tonic::async_trait]
impl Exec for Api {
    type RunProgramStream = Answers;

    async fn run_program(
        &self,
        request: Request<Streaming<ToProgram>>,
    ) -> Result<Response<Self::RunProgramStream>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = exec::opening(&mut messages).await?;
        let (mut call, first) =
            self.admission.admit(Request::from_parts(metadata, extensions, first)).await?;
        match exec::run(&self.desks, &self.fleet, &call.behalf, first, messages).await {
            Err(status) => call.end(Err(status)),
            Ok(relay) => Ok(Response::new(Box::pin(relay.into_stream(call.entry.take())))),
        }
    }

    async fn list_programs(
        &self,
        request: Request<ListProgramsRequest>,
    ) -> Result<Response<ListProgramsResponse>, Status> {
        self.hand_on(request).await
    }

    async fn signal_program(
        &self,
        request: Request<SignalProgramRequest>,
    ) -> Result<Response<SignalProgramResponse>, Status> {
        self.hand_on(request).await
    }
}
