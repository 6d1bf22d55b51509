//! Builds the agent's channels from its settings and from the sockets that the service manager passes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nix::libc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::agent::clients;
use crate::config::agent::{ApiChannel, QgaChannel, VsockPeer};
use crate::qga;
use crate::qga::session::End;
use crate::sys::activation;
use crate::transport::listen::Listener;
use crate::transport::serial::Line;
use crate::transport::virtio_serial::Port;
use crate::transport::vsock::Guard;
use crate::transport::{later, unix, vsock};

/// Unit whose sockets are ports of the guestlet API: they are never used for QGA, whatever ports the settings
/// name.
const API_UNIT: &str = "guestlet.socket";
/// Error of socket(2) for the vsock family if the kernel lacks vsock.
const NO_VSOCK: i32 = libc::EAFNOSUPPORT;
/// Time between two attempts to listen on a socket, if the settings ask for retries.
const RETRY: Duration = Duration::from_secs(5);
/// Time for which requests of clients may continue when the agent ends.
const LAST_ANSWERS: Duration = Duration::from_secs(3);
/// Minimum time between two openings of a serial line that is hung up at once.
const SHORT: Duration = Duration::from_secs(1);

/// Sockets that the service manager has passed and that are not in use yet.
pub struct Passed(Vec<activation::Passed>);

impl Passed {
    /// Takes ownership of the sockets.
    pub fn new(sockets: Vec<activation::Passed>) -> Self {
        Self(sockets)
    }

    /// Takes the socket that listens on this vsock port.
    fn take(&mut self, port: u32) -> Option<OwnedFd> {
        let place = self.0.iter().position(|passed| vsock::port(&passed.socket) == Some(port))?;
        Some(self.0.swap_remove(place).socket)
    }

    /// Takes the socket for QGA: the one left from units other than the API's. Must be called after the API's channels
    /// have taken theirs.
    fn take_qga(&mut self) -> anyhow::Result<Option<OwnedFd>> {
        let places: Vec<_> = (0..self.0.len()).filter(|place| self.0[*place].name != API_UNIT).collect();
        match places[..] {
            [] => Ok(None),
            [place] => Ok(Some(self.0.swap_remove(place).socket)),
            _ => {
                let names: Vec<_> = places.iter().map(|place| self.0[*place].name.as_str()).collect();
                bail!("the service manager passes more than one socket for QGA: {}", names.join(", "))
            }
        }
    }

    /// Logs the sockets that were not used.
    pub fn finish(self) {
        for activation::Passed { socket, name } in self.0 {
            let what = vsock::port(&socket)
                .map_or("not a vsock socket".to_owned(), |port| format!("vsock port {port}"));
            let words = format!("a socket that {name} passed is ignored: {what}");
            if name == API_UNIT {
                // The socket unit is never restarted, so it keeps the sockets that it listed when it was started.
                tracing::info!("{words}; if the unit no longer lists it, it disappears at the next boot");
            } else {
                tracing::warn!("{words}");
            }
        }
    }
}

/// Returns a channel of the guestlet API: its listener, and a description of where it listens.
///
/// Without vsock the listener waits until the kernel has it. This is logged but is no error: it may be intended.
pub fn api(
    channel: ApiChannel,
    peer: VsockPeer,
    passed: &mut Passed,
) -> anyhow::Result<(Listener, watch::Receiver<String>)> {
    let guard = Guard { peer_cid: peer.cid, any_port: peer.any_port };
    let (listener, words) = match channel {
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
                Err(error) if error.raw_os_error() == Some(NO_VSOCK) => {
                    tracing::info!("no control channel until the kernel has vsock: {error}");
                    let (listener, words) = later::Listener::new(port, guard);
                    return Ok((Listener::Later(listener), words));
                }
                Err(error) => {
                    tracing::warn!("no control channel: cannot listen on vsock port {port}: {error}");
                    (Listener::Nothing, format!("none (cannot listen on vsock port {port}: {error})"))
                }
            },
        },
    };
    Ok((listener, watch::channel(words).1))
}

/// The channel of QGA clients.
pub enum Qga {
    /// Virtio-serial port, on which one host after another is served.
    Port(PathBuf),
    /// Serial line, such as an ISA serial port.
    Line(PathBuf),
    /// Clients of a socket.
    Clients(Listener),
    /// Clients of a socket on which the agent cannot listen yet; it tries again.
    Later(QgaChannel, Guard),
}

impl Qga {
    /// Builds the channel, and describes where it is. A socket that the service manager has passed takes precedence
    /// over `channel`.
    pub fn build(
        channel: QgaChannel,
        retry: bool,
        peer: VsockPeer,
        passed: &mut Passed,
    ) -> anyhow::Result<(Self, String)> {
        // QGA clients take any source port, as with qemu-ga.
        let guard = Guard { peer_cid: peer.cid, any_port: true };
        if let Some(socket) = passed.take_qga()? {
            let words = vsock::port(&socket).map(|port| format!("vsock port {port}"));
            let listener =
                Listener::adopt(socket, guard).context("the socket passed for QGA cannot be used")?;
            let words = match &listener {
                Listener::Unix(listener) => listener.path().display().to_string(),
                _ => words.unwrap_or_default(),
            };
            return Ok((Self::Clients(listener), format!("{words}, held by the service manager")));
        }
        Ok(match channel {
            QgaChannel::VirtioSerial(path) => {
                let words = path.display().to_string();
                (Self::Port(path), words)
            }
            QgaChannel::IsaSerial(path) => {
                let words = path.display().to_string();
                (Self::Line(path), words)
            }
            QgaChannel::None => (Self::Clients(Listener::Nothing), "off".to_owned()),
            QgaChannel::UnixListen(_) | QgaChannel::VsockListen { .. } => {
                let words = match &channel {
                    QgaChannel::VsockListen { cid, port } => format!("vsock {cid}:{port}"),
                    QgaChannel::UnixListen(path) => path.display().to_string(),
                    _ => String::new(),
                };
                match listen(&channel, guard) {
                    Ok(listener) => (Self::Clients(listener), words),
                    Err(error) if retry => {
                        tracing::warn!("{error:#}; trying again every {} s", RETRY.as_secs());
                        (Self::Later(channel, guard), words)
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// Serves clients until `shutdown`.
    pub async fn run(self, context: Arc<qga::Context>, shutdown: CancellationToken) -> anyhow::Result<()> {
        let listener = match self {
            Self::Port(path) => {
                let served = unless_late(&shutdown, Box::pin(serve_port(&path, &context))).await;
                return served.unwrap_or(Ok(()));
            }
            Self::Line(path) => {
                let served = unless_late(&shutdown, Box::pin(serve_line(&path, &context))).await;
                return served.unwrap_or(Ok(()));
            }
            Self::Clients(listener) => listener,
            Self::Later(channel, guard) => {
                match shutdown.run_until_cancelled(listen_later(channel, guard)).await {
                    Some(listener) => listener,
                    None => return Ok(()),
                }
            }
        };
        let ending = shutdown.clone();
        clients::run_with_places(listener, shutdown, move |peer, stream, place| {
            let (context, ending) = (Arc::clone(&context), ending.clone());
            async move {
                let session = async {
                    let ended = qga::session::run(stream, &peer, &context, End::Said).await;
                    // Commands that the client has started may continue for long after it has left.
                    // They have a limit of their own, so the client's slot is freed now.
                    drop(place);
                    ended.finish().await
                };
                if let Some(Err(error)) = unless_late(&ending, session).await {
                    tracing::debug!("{peer}: {error}");
                }
            }
        })
        .await
    }
}

/// Returns the result of `work`, or `None` if it takes longer than `LAST_ANSWERS` after `shutdown`.
async fn unless_late<T>(shutdown: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    let late = async {
        shutdown.cancelled().await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        done = work => Some(done),
        () = late => None,
    }
}

fn listen(channel: &QgaChannel, guard: Guard) -> anyhow::Result<Listener> {
    Ok(match channel {
        QgaChannel::UnixListen(path) => Listener::Unix(unix::Listener::bind(path)?),
        QgaChannel::VsockListen { cid, port } => {
            let listener = vsock::Listener::bind_at(*cid, *port, guard);
            Listener::Vsock(listener.with_context(|| format!("cannot listen on vsock {cid}:{port}"))?)
        }
        _ => Listener::Nothing,
    })
}

/// Tries to listen until it succeeds.
async fn listen_later(channel: QgaChannel, guard: Guard) -> Listener {
    loop {
        tokio::time::sleep(RETRY).await;
        let channel = channel.clone();
        // Binding may block while another process holds the lock of the socket's directory.
        if let Ok(Ok(listener)) = tokio::task::spawn_blocking(move || listen(&channel, guard)).await {
            tracing::info!("listening for QGA clients now");
            return listener;
        }
    }
}

/// Serves the peer at the other end of a serial line, and opens the line again after it was hung up. Requests from
/// before that continue.
async fn serve_line(path: &Path, context: &qga::Context) -> anyhow::Result<()> {
    let peer = path.display().to_string();
    let mut left = FuturesUnordered::new();
    loop {
        let opening = context.stopping.run_until_cancelled(Line::open_when_there(path));
        let Some(opened) = beside(&mut left, opening).await else { break };
        let mut line = opened.with_context(|| format!("cannot open {peer}"))?;
        tracing::info!("{peer}: open");
        let opened = Instant::now();
        let session = qga::session::run(&mut line, &peer, context, End::Gone);
        let ended = beside(&mut left, Box::pin(session)).await;
        left.push(ended.finish());
        drop(line);
        if context.stopping.is_cancelled() {
            break;
        }
        tracing::info!("{peer}: hung up; opening it again");
        if opened.elapsed() < SHORT {
            beside(&mut left, tokio::time::sleep(SHORT)).await;
        }
    }
    while left.next().await.is_some() {}
    Ok(())
}

/// Serves one host after another on a port, and opens the port again after it was unplugged. Requests of a host
/// that has disconnected continue while the next one is served.
async fn serve_port(path: &Path, context: &qga::Context) -> anyhow::Result<()> {
    let peer = path.display().to_string();
    let mut left = FuturesUnordered::new();
    while let Some(opened) = {
        let opening = context.stopping.run_until_cancelled(Port::open_when_there(path));
        beside(&mut left, opening).await
    } {
        let mut port = opened.with_context(|| format!("cannot open {peer}"))?;
        tracing::info!("{peer}: open");
        while let Some(attached) = {
            let attaching = context.stopping.run_until_cancelled(port.attached());
            beside(&mut left, Box::pin(attaching)).await
        } {
            if let Err(error) = attached {
                tracing::warn!("{peer}: {error}; waiting for the port to come back");
                break;
            }
            tracing::debug!("{peer}: a host is connected");
            let session = qga::session::run(&mut port, &peer, context, End::Gone);
            let ended = beside(&mut left, Box::pin(session)).await;
            left.push(ended.finish());
        }
    }
    while left.next().await.is_some() {}
    Ok(())
}

/// Waits for `work`, and lets the commands in `left` continue meanwhile.
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
                    tracing::debug!("a host that has disconnected: {error}");
                }
            }
        }
    }
}
