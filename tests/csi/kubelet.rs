//! A kubelet of the tests, and its sidecars: dials for each call, as the real one does.

use std::path::Path;

use guestlet::transport::http2::{self, Client, ORIGIN};
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::identity_client::IdentityClient;
use guestlet::wire::proto::csi::node_client::NodeClient;
use guestlet::wire::proto::registration::registration_client::RegistrationClient;
use guestlet::wire::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use http::Uri;
use tokio::net::UnixStream;

async fn dial(socket: &Path) -> Client {
    let stream = UnixStream::connect(socket).await.unwrap();
    let (client, mut connection) = http2::connect(stream).await.unwrap();
    tokio::spawn(async move { drop(connection.ended().await) });
    client
}

pub async fn node(socket: &Path) -> NodeClient<Client> {
    NodeClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

pub async fn controller(socket: &Path) -> ControllerClient<Client> {
    ControllerClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

pub async fn identity(socket: &Path) -> IdentityClient<Client> {
    IdentityClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

/// Asks a plugin who it is, and says that it was registered.
pub async fn register(socket: &Path) -> PluginInfo {
    let mut client = RegistrationClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN));
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    client.notify_registration_status(status).await.unwrap();
    info
}
