//! Services that agents offer as well as this host half, as the admin API implements them: each call is admitted,
//! then forwarded to the agent.

use std::pin::Pin;

use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::Api;
use crate::host::handed_on::HandedOn;
use crate::host::{console, exec, files, forward, machine, receipts};
use crate::transport::Both;
use crate::wire::files::MAX_MESSAGE;
use crate::wire::proto::v1::accounts_server::{Accounts, AccountsServer};
use crate::wire::proto::v1::console_server::{Console, ConsoleServer};
use crate::wire::proto::v1::exec_server::{Exec, ExecServer};
use crate::wire::proto::v1::file_systems_server::{FileSystems, FileSystemsServer};
use crate::wire::proto::v1::files_server::{Files, FilesServer};
use crate::wire::proto::v1::forward_server::{Forward, ForwardServer};
use crate::wire::proto::v1::freeze_server::{Freeze, FreezeServer};
use crate::wire::proto::v1::journal_server::{Journal, JournalServer};
use crate::wire::proto::v1::machine_server::{Machine, MachineServer};
use crate::wire::proto::v1::metrics_server::{Metrics, MetricsServer};
use crate::wire::proto::v1::network_server::{Network, NetworkServer};
use crate::wire::proto::v1::power_server::{Power, PowerServer};
use crate::wire::proto::v1::qga_server::{Qga, QgaServer};
use crate::wire::proto::v1::{
    self, ExecuteQgaRequest, ExecuteQgaResponse, FreezeFileSystemsRequest, FreezeFileSystemsResponse,
    FreezeState, FromProgram, GetFreezeRequest, ListFileSystemsRequest, ListFileSystemsResponse,
    ListProgramsRequest, ListProgramsResponse, ShutdownRequest, ShutdownResponse, SignalProgramRequest,
    SignalProgramResponse, SuspendResponse, SuspendToBothRequest, SuspendToDiskRequest,
    SuspendToMemoryRequest, ThawFileSystemsRequest, ThawFileSystemsResponse, ToConsole, ToProgram,
    TrimFileSystemsRequest, TrimFileSystemsResponse,
};

/// Bytes of one request.
const MAX_REQUEST: usize = 64 * 1024;
/// Bytes of a QGA command.
const MAX_COMMAND: usize = (1 << 20) + 1024;

/// Type of these services combined with `before`.
pub type Services<B> = Both<
    ExecServer<Api>,
    Both<
        QgaServer<Api>,
        Both<FreezeServer<Api>, Both<FileSystemsServer<Api>, Rest<Both<ConsoleServer<Api>, B>>>>,
    >,
>;

/// Remaining part of the type.
type Rest<B> = Both<
    PowerServer<Api>,
    Both<
        NetworkServer<Api>,
        Both<
            MachineServer<Api>,
            Both<AccountsServer<Api>, Both<JournalServer<Api>, Both<MetricsServer<Api>, Streams<B>>>>,
        >,
    >,
>;

/// Services besides [`Exec`] whose calls are long-lived.
type Streams<B> = Both<ForwardServer<Api>, Both<FilesServer<Api>, B>>;

/// Combines these services with `before`.
pub fn beside<B>(api: &Api, before: B) -> Services<B> {
    let accounts = AccountsServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let hardware = MachineServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let network = NetworkServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let power = PowerServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let file_systems = FileSystemsServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let freeze = FreezeServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let qga = QgaServer::new(api.clone()).max_decoding_message_size(MAX_COMMAND);
    let exec = ExecServer::new(api.clone()).max_decoding_message_size(exec::MAX_REQUEST);
    let forward = ForwardServer::new(api.clone()).max_decoding_message_size(forward::MAX_MESSAGE);
    let journal = JournalServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let console = ConsoleServer::new(api.clone()).max_decoding_message_size(console::MAX_REQUEST);
    let files = FilesServer::new(api.clone()).max_decoding_message_size(MAX_MESSAGE);
    let metrics = MetricsServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let before = Both(metrics, Both(forward, Both(files, Both(console, before))));
    let before = Both(journal, before);
    let rest = Both(power, Both(network, Both(hardware, Both(accounts, before))));
    Both(exec, Both(qga, Both(freeze, Both(file_systems, rest))))
}

impl Api {
    async fn hand_on<R: HandedOn>(&self, request: Request<R>) -> Result<Response<R::Answer>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = machine::hand_on(&self.desks, &self.fleet, &call.behalf, asked).await;
        call.end(done)
    }
}

#[tonic::async_trait]
impl Metrics for Api {
    async fn collect_metrics(
        &self,
        request: Request<v1::CollectMetricsRequest>,
    ) -> Result<Response<v1::CollectMetricsResponse>, Status> {
        let name = request.get_ref().name.clone();
        let answer = self.hand_on(request).await?;
        self.half.recent.take(&name, answer.get_ref());
        Ok(answer)
    }
}

/// Implements services all of whose methods forward their requests to the agent.
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
    Accounts {
        list_users(v1::ListUsersRequest) -> v1::ListUsersResponse;
        set_password(v1::SetPasswordRequest) -> v1::SetPasswordResponse;
        list_authorized_keys(v1::ListAuthorizedKeysRequest) -> v1::ListAuthorizedKeysResponse;
        add_authorized_keys(v1::AddAuthorizedKeysRequest) -> v1::AddAuthorizedKeysResponse;
        remove_authorized_keys(v1::RemoveAuthorizedKeysRequest) -> v1::RemoveAuthorizedKeysResponse;
    }
    Machine {
        get_time(v1::GetTimeRequest) -> v1::TimeOfDay;
        set_time(v1::SetTimeRequest) -> v1::SetTimeResponse;
        list_processors(v1::ListProcessorsRequest) -> v1::ListProcessorsResponse;
        set_processors(v1::SetProcessorsRequest) -> v1::SetProcessorsResponse;
        list_memory_blocks(v1::ListMemoryBlocksRequest) -> v1::ListMemoryBlocksResponse;
        set_memory_blocks(v1::SetMemoryBlocksRequest) -> v1::SetMemoryBlocksResponse;
    }
    Network {
        list_interfaces(v1::ListInterfacesRequest) -> v1::ListInterfacesResponse;
        list_routes(v1::ListRoutesRequest) -> v1::ListRoutesResponse;
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
    Journal { read_journal(v1::ReadJournalRequest) -> v1::ReadJournalResponse; }
    Qga { execute_qga(ExecuteQgaRequest) -> ExecuteQgaResponse; }
}

#[tonic::async_trait]
impl Freeze for Api {
    async fn freeze_file_systems(
        &self,
        request: Request<FreezeFileSystemsRequest>,
    ) -> Result<Response<FreezeFileSystemsResponse>, Status> {
        self.hand_on(request).await
    }

    async fn thaw_file_systems(
        &self,
        request: Request<ThawFileSystemsRequest>,
    ) -> Result<Response<ThawFileSystemsResponse>, Status> {
        self.hand_on(request).await
    }

    async fn get_freeze(&self, request: Request<GetFreezeRequest>) -> Result<Response<FreezeState>, Status> {
        self.hand_on(request).await
    }

    async fn list_receipts(
        &self,
        request: Request<v1::ListReceiptsRequest>,
    ) -> Result<Response<v1::ListReceiptsResponse>, Status> {
        self.hand_on(request).await
    }

    async fn get_receipt(
        &self,
        request: Request<v1::GetReceiptRequest>,
    ) -> Result<Response<v1::GetReceiptResponse>, Status> {
        let (name, id) = (request.get_ref().name.clone(), request.get_ref().id.clone());
        let answer = self.hand_on(request).await?;
        receipts::judged(&self.trust, &self.fleet, name, &id, answer.into_inner()).await.map(Response::new)
    }
}

/// Messages of a program that runs in a guest.
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

/// Messages of the targets of forwarded connections.
type FromTargets = Pin<Box<dyn Stream<Item = Result<v1::FromTarget, Status>> + Send>>;

#[tonic::async_trait]
impl Forward for Api {
    type ForwardConnectionsStream = FromTargets;

    async fn forward_connections(
        &self,
        request: Request<Streaming<v1::ToTarget>>,
    ) -> Result<Response<Self::ForwardConnectionsStream>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = forward::opening(&mut messages).await?;
        let (call, open) = self.admission.admit(Request::from_parts(metadata, extensions, first)).await?;
        let begun = forward::run(&self.desks, &self.fleet, &call.behalf, open, messages).await;
        // The audit record ends as soon as forwarding has begun, because the connections may last for days.
        call.end(begun.map(|relay| Box::pin(relay.into_stream()) as FromTargets))
    }
}

#[tonic::async_trait]
impl Console for Api {
    type OpenConsoleStream = console::Answers;

    async fn open_console(
        &self,
        request: Request<Streaming<ToConsole>>,
    ) -> Result<Response<Self::OpenConsoleStream>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = console::opening(&mut messages).await?;
        let (call, first) = self.admission.admit(Request::from_parts(metadata, extensions, first)).await?;
        self.consoles.open(&self.fleet, call, first, messages).await.map(Response::new)
    }
}

#[tonic::async_trait]
impl Files for Api {
    type ReadFilesStream = Pin<Box<dyn Stream<Item = Result<v1::FromReader, Status>> + Send>>;
    type WriteFilesStream = Pin<Box<dyn Stream<Item = Result<v1::FromWriter, Status>> + Send>>;

    async fn read_files(
        &self,
        request: Request<Streaming<v1::ToReader>>,
    ) -> Result<Response<Self::ReadFilesStream>, Status> {
        self.copy(request).await
    }

    async fn write_files(
        &self,
        request: Request<Streaming<v1::ToWriter>>,
    ) -> Result<Response<Self::WriteFilesStream>, Status> {
        self.copy(request).await
    }
}

impl Api {
    async fn copy<S: files::Says>(
        &self,
        request: Request<Streaming<S>>,
    ) -> Result<Response<Pin<Box<dyn Stream<Item = Result<S::Answer, Status>> + Send>>>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = files::opening(&mut messages).await?;
        let (mut call, first) =
            self.admission.admit(Request::from_parts(metadata, extensions, first)).await?;
        match files::run(&self.desks, &self.fleet, &call.behalf, first, messages).await {
            Err(status) => call.end(Err(status)),
            Ok(relay) => Ok(Response::new(Box::pin(relay.into_stream(call.entry.take())))),
        }
    }
}
