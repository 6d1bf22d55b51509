//! kubelet and the sidecars of a guest's cluster, played from outside: clients of the agent's CSI sockets, which
//! systemd-socket-proxyd in the guest makes reachable through vsock.
//!
//! As kubelet does, each call has a connection of its own.

use std::os::unix::net::UnixStream;

use guestlet::transport::http2::{self, Client, ORIGIN};
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::identity_client::IdentityClient;
use guestlet::wire::proto::csi::node_client::NodeClient;
use guestlet::wire::proto::registration::registration_client::RegistrationClient;
use http::Uri;
use tonic::{Response, Status};

use super::vm::Vm;

/// kubelet's folder in the guest, and the driver's name.
pub const KUBELET: &str = "/var/lib/kubelet";
pub const DRIVER: &str = "driver.harvesterhci.io";

/// A socket of the agent's.
#[derive(Debug, Clone, Copy)]
enum Socket {
    Node = 7001,
    Controller = 7002,
    Registration = 7003,
}

impl Socket {
    fn path(self) -> String {
        match self {
            Self::Node => format!("{KUBELET}/plugins/{DRIVER}/csi.sock"),
            Self::Controller => format!("{KUBELET}/plugins/{DRIVER}/controller/csi.sock"),
            Self::Registration => format!("{KUBELET}/plugins_registry/{DRIVER}-reg.sock"),
        }
    }
}

/// Those of one guest.
#[derive(Debug, Clone, Copy)]
pub struct Csi<'v>(&'v Vm);

impl<'v> Csi<'v> {
    /// Makes the sockets of a real guest reachable, now and after its next boots.
    ///
    /// # Errors
    /// If the guest refuses.
    pub fn of(vm: &'v Vm) -> anyhow::Result<Self> {
        for socket in [Socket::Node, Socket::Controller, Socket::Registration] {
            let (name, port) = (format!("proxy-{socket:?}").to_lowercase(), socket as u32);
            let unit = format!("[Socket]\nListenStream=vsock::{port}\n[Install]\nWantedBy=sockets.target\n");
            vm.write(&format!("/etc/systemd/system/{name}.socket"), unit.as_bytes())?;
            let unit = format!("[Service]\nExecStart=/lib/systemd/systemd-socket-proxyd {}\n", socket.path());
            vm.write(&format!("/etc/systemd/system/{name}.service"), unit.as_bytes())?;
            vm.run(&format!("systemctl enable --now {name}.socket"))?;
        }
        vm.run(&format!("mkdir -p {KUBELET}"))?;
        Ok(Self(vm))
    }

    /// A call of `csi.v1.Identity`, on the socket of the sidecars.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn identity<T>(
        self,
        call: impl AsyncFnOnce(IdentityClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Controller, async |client| {
            call(IdentityClient::with_origin(client, origin())).await
        })
    }

    /// A call of `csi.v1.Controller`, as the sidecars make them.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn controller<T>(
        self,
        call: impl AsyncFnOnce(ControllerClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Controller, async |client| {
            call(ControllerClient::with_origin(client, origin())).await
        })
    }

    /// A call of `csi.v1.Node`, as kubelet makes them.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn node<T>(self, call: impl AsyncFnOnce(NodeClient<Client>) -> Answer<T>) -> Result<T, Status> {
        self.call(Socket::Node, async |client| call(NodeClient::with_origin(client, origin())).await)
    }

    /// A call of kubelet's plugin registration.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn registration<T>(
        self,
        call: impl AsyncFnOnce(RegistrationClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Registration, async |client| {
            call(RegistrationClient::with_origin(client, origin())).await
        })
    }

    fn call<T>(self, socket: Socket, call: impl AsyncFnOnce(Client) -> Answer<T>) -> Result<T, Status> {
        let unavailable = |error: &dyn std::fmt::Display| Status::unavailable(error.to_string());
        let stream = self.0.dial(socket as u32).map_err(|error| unavailable(&error))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| unavailable(&error))?;
        runtime.block_on(async {
            let stream = asynchronous(stream).map_err(|error| unavailable(&error))?;
            let (client, mut connection) =
                http2::connect(stream).await.map_err(|error| unavailable(&error))?;
            tokio::select! {
                answer = call(client) => answer.map(Response::into_inner),
                ended = connection.ended() => Err(unavailable(&format!("the connection ended: {ended:?}"))),
            }
        })
    }
}

/// What a call gives.
pub type Answer<T> = Result<Response<T>, Status>;

fn origin() -> Uri {
    Uri::from_static(ORIGIN)
}

fn asynchronous(stream: UnixStream) -> std::io::Result<tokio::net::UnixStream> {
    stream.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(stream)
}
