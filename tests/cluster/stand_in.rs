//! What runs in the containers of the manifests' Deployment in place of the sidecars: this test program, started once more. As
//! the real ones do, it waits until the driver says that it is ready, does the sidecar's work while it holds the sidecar's
//! Lease, and ends when it loses that or the driver's socket. In place of livenessprobe it answers kubelet over HTTP.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use guestlet::transport::http2::{self, Client, Connection};
use guestlet::wire::proto::csi::ProbeRequest;
use guestlet::wire::proto::csi::identity_client::IdentityClient;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixStream};

use crate::api::Api;
use crate::messages::ContainerConfig;
use crate::sidecars::{Role, work};

pub const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";

// The container, as the process that is started for it is told of it.
const IMAGE: &str = "GUESTLET_TEST_IMAGE";
const ARGUMENTS: &str = "GUESTLET_TEST_ARGUMENTS";
const ADDRESS: &str = "GUESTLET_TEST_ADDRESS";
const POD: &str = "GUESTLET_TEST_POD";
const CREDENTIALS: &str = "GUESTLET_TEST_CREDENTIALS";

// What the sidecars have if they are told nothing else.
const LEASE: Duration = Duration::from_secs(15);
const RENEW_WITHIN: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(5);
const PROBE: Duration = Duration::from_secs(1);

/// The name of a sidecar's image, without its registry and its version.
fn name(image: &str) -> &str {
    let last = image.rsplit('/').next().unwrap_or_default();
    last.split(':').next().unwrap_or_default()
}

/// Whether a container of this image is to be stood in for.
pub fn is_meant(image: &str) -> bool {
    name(image) == "livenessprobe" || role(image).is_some()
}

fn role(image: &str) -> Option<Role> {
    Role::ALL.into_iter().find(|role| role.image() == name(image))
}

/// Has a command, at whose end a program is still to be named, run this one for a container. What the container has at a path
/// is to be at [`inside`] of it.
pub fn complete(command: &mut Command, config: &ContainerConfig, address: Ipv4Addr, credentials: &Path) {
    let image = config.image.as_ref().map(|image| image.image.as_str()).unwrap_or_default();
    command
        .arg(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env(IMAGE, image)
        .env(ARGUMENTS, config.arguments.join(" "))
        .env(ADDRESS, address.to_string())
        .env(POD, config.labels.get("io.kubernetes.pod.name").map_or("", String::as_str))
        .env(CREDENTIALS, credentials);
}

/// Where a container that is stood in for has what it expects at `path`.
pub fn inside(path: &str) -> String {
    format!("/mnt/{}", path.trim_start_matches('/'))
}

/// In a process that was started for a container: does its work, and ends. Else nothing.
pub fn play_if_meant() {
    let Ok(image) = std::env::var(IMAGE) else { return };
    crate::lab::wait(async {
        match role(&image) {
            Some(role) => sidecar(role).await,
            None => liveness().await,
        }
    });
    // kubelet starts it again.
    std::process::exit(1);
}

fn told(variable: &str) -> String {
    std::env::var(variable).unwrap()
}

/// The value of one of the container's arguments.
fn argument(name: &str) -> String {
    let arguments = told(ARGUMENTS);
    let mut values =
        arguments.split(' ').filter_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
    values.next().unwrap_or_else(|| panic!("{name} is not among {arguments}")).to_owned()
}

/// The driver's socket.
fn socket() -> PathBuf {
    inside(&argument("--csi-address")).into()
}

/// The connection to the driver, for as long as somebody has its client.
type Dialled = (IdentityClient<Client>, Connection);

/// What the driver says of itself, and the connection by which it was asked.
async fn probe() -> Option<(bool, Dialled)> {
    let asked = async {
        let stream = UnixStream::connect(socket()).await.ok()?;
        let (client, mut connection) = http2::connect(stream).await.ok()?;
        let mut client = IdentityClient::with_origin(client, http::Uri::from_static(http2::ORIGIN));
        tokio::select! {
            answer = client.probe(ProbeRequest {}) => {
                let is_ready = answer.ok()?.into_inner().ready != Some(false);
                Some((is_ready, (client, connection)))
            }
            _ = connection.ended() => None,
        }
    };
    tokio::time::timeout(PROBE, asked).await.ok()?
}

async fn sidecar(role: Role) {
    let (_client, mut connection) = loop {
        if let Some((true, dialled)) = probe().await {
            break dialled;
        }
        tokio::time::sleep(PROBE).await;
    };
    assert!(told(ARGUMENTS).split(' ').any(|argument| argument == "--leader-election"));
    let api = Api::read(told(CREDENTIALS).as_ref(), "sidecars");
    let mut lease = Lease::new(api.clone(), role);
    let roles = [role];
    let works = async {
        while !lease.is_held().await {
            tokio::time::sleep(RETRY).await;
        }
        tokio::select! {
            () = work(api, socket(), &roles) => {}
            () = lease.lost() => {}
        }
    };
    tokio::select! {
        () = works => {}
        _ = connection.ended() => {}
    }
}

/// As client-go does it: a Lease that its holder has not renewed for as long as it lasts is anybody's.
struct Lease {
    api: Api,
    name: &'static str,
    seen: Value,
    seen_at: Instant,
}

impl Lease {
    fn new(api: Api, role: Role) -> Self {
        Self { api, name: role.lease(), seen: Value::Null, seen_at: Instant::now() }
    }

    /// Takes it, or renews it, if it may.
    async fn is_held(&mut self) -> bool {
        let path = format!("{LEASES}/{}", self.name);
        let (me, now) = (told(POD), serde_json::to_value(MicroTime(Timestamp::now())).unwrap());
        let mut spec = json!({ "holderIdentity": me, "leaseDurationSeconds": LEASE.as_secs(), "acquireTime": now, "renewTime": now });
        let Some(mut lease) = self.api.get(&path).await else {
            self.api.ensure(LEASES, &json!({ "metadata": { "name": self.name }, "spec": spec })).await;
            // Whoever was first is known the next time.
            return false;
        };
        if lease["spec"] != self.seen {
            (self.seen, self.seen_at) = (lease["spec"].clone(), Instant::now());
        }
        if lease["spec"]["holderIdentity"] == me.as_str() {
            spec["acquireTime"] = lease["spec"]["acquireTime"].take();
        } else if self.seen_at.elapsed() < LEASE {
            return false;
        }
        lease["spec"] = spec;
        self.api.replace(&path, &lease).await.is_some()
    }

    /// Renews it for as long as it can.
    async fn lost(mut self) {
        let mut renewed = Instant::now();
        while renewed.elapsed() < RENEW_WITHIN {
            tokio::time::sleep(RETRY).await;
            if self.is_held().await {
                renewed = Instant::now();
            }
        }
    }
}

/// Says over HTTP whether the driver is ready.
async fn liveness() {
    let port = argument("--http-endpoint");
    let listener = TcpListener::bind(format!("{}{port}", told(ADDRESS))).await.unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap_or_default();
            let is_meant = request[..length].starts_with(b"GET /healthz ");
            let is_ready = is_meant && matches!(probe().await, Some((true, _)));
            let status = if is_ready { "200 OK" } else { "500 Internal Server Error" };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        });
    }
}
