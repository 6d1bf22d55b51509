//! Makes the agent's channels of its settings and of the sockets that the service manager passes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio_util::sync::CancellationToken;

use crate::agent::clients;
use crate::config::agent::{ApiChannel, QgaChannel, VsockPeer};
use crate::qga;
use crate::qga::session::End;
use crate::transport::listen::Listener;
use crate::transport::virtio_serial::Port;
use crate::transport::vsock::Guard;
use crate::transport::{unix, vsock};

/// The sockets that the service manager passed; which is which is told by their vsock ports.
pub struct Passed(Vec<OwnedFd>);

impl Passed {
    /// Takes charge of them.
    pub fn new(sockets: Vec<OwnedFd>) -> Self {
        Self(sockets)
    }

    fn take(&mut self, port: u32) -> Option<OwnedFd> {
        let place = self.0.iter().position(|socket| vsock::port(socket) == Some(port))?;
        Some(self.0.swap_remove(place))
    }

    /// Says which were of no use.
    pub fn finish(self) {
        for socket in self.0 {
            let what =
                vsock::port(&socket).map_or("none of vsock".to_owned(), |port| format!("vsock port {port}"));
            tracing::warn!("a socket that the service manager passed is not used: {what}");
        }
    }
}

/// A channel of the guestlet API: its listener, and where that is, in words.
///
/// Without vsock there is none, which is said and no fault: it may be meant so.
pub fn api(
    name: &str,
    channel: ApiChannel,
    peer: VsockPeer,
    passed: &mut Passed,
) -> anyhow::Result<(Listener, String)> {
    let guard = Guard { peer_cid: peer.cid, any_port: peer.any_port };
    Ok(match channel {
        ApiChannel::None => (Listener::Nothing, "off".to_owned()),
        ApiChannel::Unix(path) => {
            let words = format!("unix {}", path.display());
            (Listener::Unix(unix::Listener::bind(&path)?), words)
        }
        ApiChannel::Vsock { port } => match passed.take(port) {
            Some(socket) => (
                Listener::Vsock(vsock::Listener::adopt(socket, guard)),
                format!("vsock port {port}, held by guestlet.socket"),
            ),
            None => match vsock::Listener::bind(port, guard) {
                Ok(listener) => (Listener::Vsock(listener), format!("vsock port {port}")),
                Err(error) => {
                    tracing::warn!("no {name} channel: cannot listen on vsock port {port}: {error}");
                    (Listener::Nothing, "none (no vsock)".to_owned())
                }
            },
        },
    })
}

/// The channel of QGA clients.
pub enum Qga {
    /// One host after the other, on a virtio-serial port.
    Port(std::path::PathBuf),
    /// Clients of a socket.
    Clients(Listener),
}

impl Qga {
    /// The channel, and where it is, in words.
    pub fn build(channel: QgaChannel) -> anyhow::Result<(Self, String)> {
        Ok(match channel {
            QgaChannel::VirtioSerial(path) => {
                let words = path.display().to_string();
                (Self::Port(path), words)
            }
            QgaChannel::UnixListen(path) => {
                let words = path.display().to_string();
                (Self::Clients(Listener::Unix(unix::Listener::bind(&path)?)), words)
            }
            QgaChannel::None => (Self::Clients(Listener::Nothing), "off".to_owned()),
        })
    }

    /// Serves clients until `shutdown`.
    pub async fn run(self, context: Arc<qga::Context>, shutdown: CancellationToken) -> anyhow::Result<()> {
        match self {
            Self::Port(path) => {
                let served = shutdown.run_until_cancelled(Box::pin(serve_port(&path, &context))).await;
                served.unwrap_or(Ok(()))
            }
            Self::Clients(listener) => {
                let ending = shutdown.clone();
                clients::run(listener, shutdown, move |peer, stream| {
                    let (context, ending) = (Arc::clone(&context), ending.clone());
                    async move {
                        let session = async {
                            qga::session::run(stream, &peer, &context, End::Said).await.finish().await
                        };
                        if let Some(Err(error)) = ending.run_until_cancelled(session).await {
                            tracing::debug!("{peer}: {error}");
                        }
                    }
                })
                .await
            }
        }
    }
}

/// Serves one host after the other on a port, and the port again after it was unplugged. What a host that has
/// gone had asked for goes on while the next one is served.
async fn serve_port(path: &Path, context: &qga::Context) -> anyhow::Result<()> {
    let peer = path.display().to_string();
    let mut left = FuturesUnordered::new();
    loop {
        let opened = beside(&mut left, Port::open_when_there(path)).await;
        let mut port = opened.with_context(|| format!("cannot open {peer}"))?;
        tracing::info!("{peer}: open");
        loop {
            if let Err(error) = beside(&mut left, port.attached()).await {
                tracing::warn!("{peer}: {error}; waiting for the port to come back");
                break;
            }
            tracing::debug!("{peer}: a host is there");
            let session = qga::session::run(&mut port, &peer, context, End::Gone);
            let ended = beside(&mut left, Box::pin(session)).await;
            left.push(ended.finish());
        }
    }
}

/// Waits for `work` while what is `left` goes on, too.
async fn beside<T>(
    left: &mut FuturesUnordered<impl Future<Output = io::Result<()>>>,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            Some(result) = left.next() => {
                if let Err(error) = result {
                    tracing::debug!("a host that went away: {error}");
                }
            }
        }
    }
}
