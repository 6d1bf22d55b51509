//! The connection to `guestlet-host`.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use tokio::net::UnixStream;

use super::Error;
use crate::transport::{Stream, http2};
use crate::wire::proto::v1::admin_client::AdminClient;
use crate::wire::proto::v1::{ListVirtualMachinesRequest, VirtualMachine};

/// Calls the daemon.
pub type Client = AdminClient<http2::Client>;

/// Bytes of one answer: the list of all VMs of a large host.
const MAX_ANSWER: usize = 256 * 1024 * 1024;
/// How long what was received before the connection's end may take to be read.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// How long the daemon may take to answer.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// Connects to the daemon and does `work` with it.
///
/// # Errors
/// If there is no daemon, or `work` fails.
pub async fn with<T>(
    socket: PathBuf,
    work: impl AsyncFnOnce(Client) -> Result<T, Error>,
) -> Result<T, Error> {
    over(dial(socket).await?, work).await
}

/// Connects to the daemon.
///
/// # Errors
/// If there is none, or it may not be asked.
pub async fn dial(socket: PathBuf) -> Result<UnixStream, Error> {
    UnixStream::connect(&socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NoSocket(socket),
        io::ErrorKind::ConnectionRefused => Error::NobodyAnswers(socket),
        io::ErrorKind::PermissionDenied => Error::Forbidden(socket),
        _ => Error::Open(socket, error),
    })
}

/// Does `work` with the daemon at the other end of `stream`.
///
/// # Errors
/// If that ends before, or `work` fails.
pub async fn over<T>(
    stream: impl Stream,
    work: impl AsyncFnOnce(Client) -> Result<T, Error>,
) -> Result<T, Error> {
    let (client, mut connection) = http2::connect(stream).await.map_err(|_| Error::Closed)?;
    let client = AdminClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(MAX_ANSWER);
    let mut work = pin!(work(client));
    tokio::select! {
        biased;
        done = &mut work => return done,
        _ = connection.ended() => {}
    }
    tokio::time::timeout(LEFTOVERS, work).await.unwrap_or(Err(Error::Closed))
}

/// All VMs that the daemon knows.
///
/// # Errors
/// As [`answer`].
pub async fn vms(client: &mut Client, with_state: bool) -> Result<Vec<VirtualMachine>, Error> {
    let list = answer(client.list_virtual_machines(ListVirtualMachinesRequest { with_state }), "").await?;
    Ok(list.virtual_machines)
}

/// Waits for the answer to a call, but not for ever.
///
/// # Errors
/// As the call, or when the daemon does not answer.
pub async fn answer<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    name: &str,
) -> Result<T, Error> {
    answer_within(call, name, ANSWER_DEADLINE).await
}

/// As [`answer`], to a call that may take longer.
///
/// # Errors
/// As the call, or when the daemon does not answer.
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
