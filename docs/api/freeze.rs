//! Holds the file systems of a guest still while a command takes a snapshot of its disks: `freeze SOCKET VM COMMAND [ARGUMENT…]`
//!
//! Exits with 0 only if everything was frozen from the beginning of the command to its end: a snapshot that was taken is not to be
//! used otherwise.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "that is how it says what it does")]

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use guestlet::transport::http2::{self, ORIGIN};
use guestlet::wire::proto::v1::freeze_client::FreezeClient;
use guestlet::wire::proto::v1::{
    FreezeFileSystemsRequest, FreezeFileSystemsResponse, ThawFileSystemsRequest,
};
use http::Uri;
use tokio::net::UnixStream;
use tonic::{Code, Response, Status};

/// Hooks of the guest run before it freezes, and may take their time.
const TO_FREEZE: Duration = Duration::from_secs(600);
const TO_THAW: Duration = Duration::from_secs(90);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let (Some(socket), Some(vm), Some(program)) = (words.next(), words.next(), words.next()) else {
        return Err("freeze SOCKET VM COMMAND [ARGUMENT...]".into());
    };
    let vm = vm.to_string_lossy().into_owned();
    let request = FreezeFileSystemsRequest { name: vm.clone(), mount_points: Vec::new() };
    let freeze = async |mut client: Client| client.freeze_file_systems(request).await;
    // Where the answer is lost, the guest may be frozen, and thaws by its deadline.
    let frozen = call(&socket, TO_FREEZE, freeze).await.map_err(|status| said(&status))?;
    if frozen.mount_points.is_empty() {
        return Err("the guest has no file system that can be frozen".into());
    }
    println!("frozen: {}", frozen.mount_points.join(" "));
    // Whatever becomes of it, the guest is thawed.
    let status = tokio::process::Command::new(&program).args(words).status().await;
    let was_frozen = thaw(&socket, vm, frozen).await;
    if !was_frozen {
        return Err("the freeze has not lasted: do not use the snapshot".into());
    }
    let has_ended_well =
        status.map_err(|error| format!("cannot run {}: {error}", program.display()))?.success();
    Ok(ExitCode::from(u8::from(!has_ended_well)))
}

/// Thaws what was frozen; whether it was until now. An answer that is lost is asked for again for as long as the guest stays
/// frozen.
async fn thaw(socket: &OsString, vm: String, frozen: FreezeFileSystemsResponse) -> bool {
    let end = Instant::now() + Duration::from_secs(frozen.seconds_left.into()) + TO_THAW;
    let request =
        ThawFileSystemsRequest { name: vm, mount_points: frozen.mount_points, ..Default::default() };
    loop {
        let request = request.clone();
        match call(socket, TO_THAW, async |mut client: Client| client.thaw_file_systems(request).await).await
        {
            // One that finds nothing frozen, and knows of no freeze that was over too early, comes after a thaw whose answer was
            // lost, or after another client's: nothing proves then that the freeze has lasted.
            Ok(answer) => return answer.thawed > 0,
            Err(status) if status.code() == Code::Unavailable && Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            // ABORTED: the freeze was over before, by its deadline, a crash or a person in the guest.
            Err(status) => {
                eprintln!("freeze: {}", said(&status));
                return false;
            }
        }
    }
}

type Client = FreezeClient<http2::Client>;

/// One call on a connection of its own, within a time. UNAVAILABLE if there is none.
async fn call<T>(
    socket: &OsString,
    within: Duration,
    ask: impl AsyncFnOnce(Client) -> Result<Response<T>, Status>,
) -> Result<T, Status> {
    let gone = |_| Status::unavailable("guestlet-host does not answer");
    let stream = UnixStream::connect(socket).await.map_err(gone)?;
    let (client, mut connection) =
        http2::connect(stream).await.map_err(|error| Status::unavailable(error.to_string()))?;
    tokio::select! {
        biased;
        answer = ask(FreezeClient::with_origin(client, Uri::from_static(ORIGIN))) => answer.map(Response::into_inner),
        _ = connection.ended() => Err(Status::unavailable("guestlet-host has closed the connection")),
        () = tokio::time::sleep(within) => Err(Status::deadline_exceeded("guestlet-host does not answer in time")),
    }
}

fn said(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
