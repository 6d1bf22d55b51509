//! A host half of the tests: dials the agent's control socket.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use guestlet::transport::callback::{self, Ended};
use guestlet::transport::http2::{self, Client, ORIGIN};
use guestlet::wire::proto::v1::guest_client::GuestClient;
use guestlet::wire::proto::v1::host_server::{self, HostServer};
use guestlet::wire::proto::v1::{
    CallbackBounds, Event, HostHalf, PingRequest, PingResponse, Position, WatchEventsRequest, WhoAmIRequest,
    WhoAmIResponse,
};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::agent::PATIENCE;

/// One control connection; it closes when this is dropped.
pub struct Control {
    pub client: GuestClient<Client>,
    connection: JoinHandle<()>,
}

impl Drop for Control {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

pub fn half(instance: &str) -> HostHalf {
    HostHalf { instance_id: instance.to_owned(), host_name: format!("host-of-{instance}") }
}

impl Control {
    pub async fn dial(folder: &Path) -> Self {
        let stream = UnixStream::connect(folder.join("control.sock")).await.unwrap();
        let (client, mut connection) = http2::connect(stream).await.unwrap();
        let client = GuestClient::with_origin(client, http::Uri::from_static(ORIGIN));
        let connection = tokio::spawn(async move { drop(connection.ended().await) });
        Self { client, connection }
    }

    pub async fn watch(&self, instance: &str, after: Option<Position>) -> Result<Streaming<Event>, Status> {
        let request = WatchEventsRequest { host: Some(half(instance)), after };
        let mut client = self.client.clone();
        let answer = tokio::time::timeout(PATIENCE, client.watch_events(request));
        answer.await.expect("an answer in time").map(Response::into_inner)
    }
}

pub async fn next(events: &mut Streaming<Event>) -> Event {
    tokio::time::timeout(PATIENCE, events.message()).await.expect("in time").unwrap().expect("an event")
}

/// A callback that a host half serves on a connection of its own; it closes when this is dropped.
pub struct Callback(JoinHandle<Result<(), Ended>>);

impl Drop for Callback {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone)]
struct Host {
    instance: String,
    vm_uid: String,
    /// It takes requests and never answers.
    hangs: CancellationToken,
}

/// What it calls the guest.
const VM: &str = "6f1c6a4e-8f0a-4a57-9a52-0d6d5d4c2b11";

/// How many volumes the guest is told that it may have.
pub static MOST_VOLUMES: AtomicU32 = AtomicU32::new(16);

#[tonic::async_trait]
impl host_server::Host for Host {
    async fn who_am_i(&self, _: Request<WhoAmIRequest>) -> Result<Response<WhoAmIResponse>, Status> {
        Ok(Response::new(WhoAmIResponse {
            host: Some(half(&self.instance)),
            vm_name: "web-1".to_owned(),
            namespace: "shop".to_owned(),
            vm_uid: self.vm_uid.clone(),
            cluster: "blue".to_owned(),
            provider_id: format!("guestlet://{}", self.vm_uid),
            max_volumes: MOST_VOLUMES.load(Ordering::Relaxed),
        }))
    }

    async fn ping(&self, _: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        if self.hangs.is_cancelled() {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(PingResponse::default()))
    }
}

/// What the host half says of the guest.
pub fn host(instance: &str, hangs: CancellationToken) -> HostServer<impl host_server::Host> {
    host_of(VM, instance, hangs)
}

/// The same of the guest that it calls `vm_uid`.
pub fn host_of(vm_uid: &str, instance: &str, hangs: CancellationToken) -> HostServer<impl host_server::Host> {
    HostServer::new(Host { instance: instance.to_owned(), vm_uid: vm_uid.to_owned(), hangs })
}

impl Callback {
    /// Dials, and serves until `hangs` is cancelled: from then on calls are taken and never answered.
    pub async fn dial(folder: &Path, instance: &str, hangs: CancellationToken) -> Self {
        Self::serve(folder, instance, host(instance, hangs)).await
    }

    /// Dials as the host half `instance`, and serves that.
    pub async fn serve(folder: &Path, instance: &str, service: impl http2::Service<Body>) -> Self {
        let control = Control::dial(folder).await;
        let bounds = CallbackBounds {
            host_instance_id: instance.to_owned(),
            open_calls: 32,
            request_bytes: 64 * 1024,
        };
        Self(tokio::spawn(async move {
            let mut client = control.client.clone();
            callback::serve(bounds, service, async |messages| {
                client.callback(messages).await.map(Response::into_inner)
            })
            .await
        }))
    }

    /// Waits until the agent has closed it; why.
    pub async fn ended(&mut self) -> Code {
        let ended = tokio::time::timeout(PATIENCE, &mut self.0).await.expect("the callback is still open");
        match ended.unwrap() {
            Ok(()) => Code::Ok,
            Err(Ended::Status(status)) => status.code(),
            Err(Ended::Breach(breach)) => panic!("{breach}"),
        }
    }
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
