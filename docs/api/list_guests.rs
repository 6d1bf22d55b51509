//! Lists the VMs of a guestlet-host, and what runs in them: `list_guests [SOCKET]`

#![allow(clippy::print_stdout, reason = "that is what it is for")]

use std::error::Error;
use std::time::Duration;

use guestlet::transport::http2::{self, ORIGIN};
use guestlet::wire::proto::v1::ListVirtualMachinesRequest;
use guestlet::wire::proto::v1::admin_client::AdminClient;
use http::Uri;
use tokio::net::UnixStream;

const SOCKET: &str = "/run/guestlet-host/api.sock";
/// All VMs of a large host.
const MAX_ANSWER: usize = 256 << 20;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1).unwrap_or_else(|| SOCKET.into());
    let (client, mut connection) = http2::connect(UnixStream::connect(socket).await?).await?;
    let mut admin =
        AdminClient::with_origin(client, Uri::from_static(ORIGIN)).max_decoding_message_size(MAX_ANSWER);
    let request = ListVirtualMachinesRequest::default();
    let known = tokio::select! {
        known = admin.list_virtual_machines(request) => known?.into_inner(),
        // Whoever waits for an answer drives the connection, too.
        _ = connection.ended() => return Err("guestlet-host has closed the connection".into()),
        // Every call has a deadline.
        () = tokio::time::sleep(Duration::from_secs(10)) => return Err("guestlet-host does not answer".into()),
    };
    for vm in known.virtual_machines {
        let session = vm.session().as_str_name().trim_start_matches("SESSION_STATE_").to_lowercase();
        // A guest that was never heard of has said nothing.
        let system = vm.guest.and_then(|guest| guest.operating_system).map(|system| system.pretty_name);
        println!("{}\t{session}\t{}", vm.name, system.as_deref().unwrap_or("-"));
    }
    Ok(())
}
