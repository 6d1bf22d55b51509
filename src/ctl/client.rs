//! Connection to `guestlet-host`.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::net::UnixStream;

use super::Error;
use crate::transport::{Stream, http2};
use crate::wire::files::MAX_MESSAGE;
use crate::wire::proto::v1::accounts_client::AccountsClient;
use crate::wire::proto::v1::admin_client::AdminClient;
use crate::wire::proto::v1::console_client::ConsoleClient;
use crate::wire::proto::v1::exec_client::ExecClient;
use crate::wire::proto::v1::file_systems_client::FileSystemsClient;
use crate::wire::proto::v1::files_client::FilesClient;
use crate::wire::proto::v1::forward_client::ForwardClient;
use crate::wire::proto::v1::freeze_client::FreezeClient;
use crate::wire::proto::v1::journal_client::JournalClient;
use crate::wire::proto::v1::machine_client::MachineClient;
use crate::wire::proto::v1::metrics_client::MetricsClient;
use crate::wire::proto::v1::network_client::NetworkClient;
use crate::wire::proto::v1::power_client::PowerClient;
use crate::wire::proto::v1::qga_client::QgaClient;
use crate::wire::proto::v1::{ListVirtualMachinesRequest, VirtualMachine};

/// Client of the daemon.
pub type Client = AdminClient<http2::Client>;

/// Connection to the daemon; clones share it.
#[derive(Debug, Clone)]
pub struct Daemon(http2::Client);

impl Daemon {
    /// Returns a client for `guestlet.v1.Admin`.
    pub fn admin(&self) -> Client {
        AdminClient::with_origin(self.0.clone(), origin()).max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns a client for freezes.
    pub fn freeze(&self) -> FreezeClient<http2::Client> {
        FreezeClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for file systems.
    pub fn file_systems(&self) -> FileSystemsClient<http2::Client> {
        FileSystemsClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for users, passwords and keys.
    pub fn accounts(&self) -> AccountsClient<http2::Client> {
        AccountsClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for clock, processors and memory.
    pub fn machine(&self) -> MachineClient<http2::Client> {
        MachineClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for interfaces and routes.
    pub fn network(&self) -> NetworkClient<http2::Client> {
        NetworkClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for journals.
    pub fn journal(&self) -> JournalClient<http2::Client> {
        JournalClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for the measurements of guests.
    pub fn metrics(&self) -> MetricsClient<http2::Client> {
        MetricsClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for shutdown, restart and suspension.
    pub fn power(&self) -> PowerClient<http2::Client> {
        PowerClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for programs.
    pub fn exec(&self) -> ExecClient<http2::Client> {
        ExecClient::with_origin(self.0.clone(), origin()).max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns a client for copies of files.
    pub fn files(&self) -> FilesClient<http2::Client> {
        FilesClient::with_origin(self.0.clone(), origin()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// Returns a client for connections to servers in guests.
    pub fn forward(&self) -> ForwardClient<http2::Client> {
        ForwardClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for consoles.
    pub fn console(&self) -> ConsoleClient<http2::Client> {
        ConsoleClient::with_origin(self.0.clone(), origin())
    }

    /// Returns a client for QGA commands.
    pub fn qga(&self) -> QgaClient<http2::Client> {
        QgaClient::with_origin(self.0.clone(), origin())
    }
}

fn origin() -> http::Uri {
    http::Uri::from_static(http2::ORIGIN)
}

/// Limit of the bytes of one answer: the list of all VMs of a large host.
const MAX_ANSWER: usize = 256 * 1024 * 1024;
/// Time for reading the data that was received before the connection ended.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// Timeout for the daemon's answer.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// Connects to the daemon and runs `work` with it.
///
/// # Errors
/// Fails if the daemon is not running, or `work` fails.
pub async fn with<T>(
    socket: PathBuf,
    work: impl AsyncFnOnce(Daemon) -> Result<T, Error>,
) -> Result<T, Error> {
    over(dial(socket).await?, work).await
}

/// Connects to the daemon.
///
/// # Errors
/// Fails if the daemon is not running, or access to it is denied.
pub async fn dial(socket: PathBuf) -> Result<UnixStream, Error> {
    UnixStream::connect(&socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NoSocket(socket),
        io::ErrorKind::ConnectionRefused => Error::NobodyAnswers(socket),
        io::ErrorKind::PermissionDenied => Error::Forbidden(socket),
        _ => Error::Open(socket, error),
    })
}

/// Runs `work` with the daemon at the other end of `stream`.
///
/// # Errors
/// Fails if the connection ends before, or `work` fails.
pub async fn over<T>(
    stream: impl Stream,
    work: impl AsyncFnOnce(Daemon) -> Result<T, Error>,
) -> Result<T, Error> {
    let (client, mut connection) = http2::connect_for_streams(stream).await.map_err(|_| Error::Closed)?;
    let mut work = pin!(work(Daemon(client)));
    tokio::select! {
        biased;
        done = &mut work => return done,
        _ = connection.ended() => {}
    }
    tokio::time::timeout(LEFTOVERS, work).await.unwrap_or(Err(Error::Closed))
}

/// Returns all VMs that the daemon knows.
///
/// # Errors
/// The errors of [`answer`].
pub async fn vms(client: &mut Client, with_state: bool) -> Result<Vec<VirtualMachine>, Error> {
    list(client, ListVirtualMachinesRequest { with_state, ..Default::default() }).await
}

/// Lists VMs, with the details that are requested.
///
/// # Errors
/// The errors of [`answer`].
pub async fn list(
    client: &mut Client,
    request: ListVirtualMachinesRequest,
) -> Result<Vec<VirtualMachine>, Error> {
    let list = answer(client.list_virtual_machines(request), "").await?;
    Ok(list.virtual_machines)
}

/// Waits for the answer to a call, with a timeout.
///
/// # Errors
/// Fails as the call does, or if the daemon does not answer in time.
pub async fn answer<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    name: &str,
) -> Result<T, Error> {
    answer_within(call, name, ANSWER_DEADLINE).await
}

/// Waits for the answer to a call that may take longer than one for [`answer`].
///
/// # Errors
/// Fails as the call does, or if the daemon does not answer in time.
pub async fn answer_within<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    name: &str,
    deadline: Duration,
) -> Result<T, Error> {
    match tokio::time::timeout(deadline, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Error::of_call(status, name)),
        Err(_) => Err(Error::Silent),
    }
}
