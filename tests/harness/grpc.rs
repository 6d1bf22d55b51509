//! One gRPC call on a vsock port of a guest, on a connection of its own.

use std::os::unix::net::UnixStream;

use guestlet::transport::http2::{self, Client};
use tonic::{Response, Status};

use super::vm::Vm;

/// What a call gives.
pub type Answer<T> = Result<Response<T>, Status>;

/// Calls whoever listens there.
///
/// # Errors
/// As it answers; UNAVAILABLE if it cannot be reached.
pub fn call<T>(vm: &Vm, port: u32, call: impl AsyncFnOnce(Client) -> Answer<T>) -> Result<T, Status> {
    let unavailable = |error: &dyn std::fmt::Display| Status::unavailable(error.to_string());
    let stream = vm.dial(port).map_err(|error| unavailable(&error))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| unavailable(&error))?.block_on(async {
        let stream = asynchronous(stream).map_err(|error| unavailable(&error))?;
        let (client, mut connection) = http2::connect(stream).await.map_err(|error| unavailable(&error))?;
        tokio::select! {
            answer = call(client) => answer.map(Response::into_inner),
            ended = connection.ended() => Err(unavailable(&format!("the connection ended: {ended:?}"))),
        }
    })
}

fn asynchronous(stream: UnixStream) -> std::io::Result<tokio::net::UnixStream> {
    stream.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(stream)
}
