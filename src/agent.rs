//! The agent: builds all its parts from the settings, starts them, drains them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::config::agent::{AgentSettings, ControlChannel, QgaChannel};
use crate::guest::Guest;
use crate::guest::events::{Event, TICK};
use crate::qga;
use crate::qga::policy::Policy;
use crate::rpc::guest::Service;
use crate::supervise::{Scope, Supervisor, termination};
use crate::sys::service;
use crate::sys::ticker::Ticker;
use crate::transport::virtio_serial::Port;
use crate::transport::vsock::Guard;
use crate::transport::{Stream, http2, unix, vsock};

/// How long the parts may take to end.
const DRAIN: Duration = Duration::from_secs(5);
/// Clients that may be connected to one channel; others wait to be accepted.
const MAX_CLIENTS: usize = 16;
/// How long accepting rests after the system had no means for it.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// The name of the control channel's socket in guestlet.socket.
const CONTROL_SOCKET: &str = "control";

/// Runs the agent until a signal ends it. `sockets` are those of the service manager.
///
/// # Errors
/// If a part cannot be built, or ends by itself.
pub async fn run(settings: AgentSettings, sockets: Vec<(String, OwnedFd)>) -> anyhow::Result<()> {
    let guest = Guest::default();
    let mut supervisor = Supervisor::new();
    let termination = termination()?;

    std::fs::create_dir_all(&settings.state_folder)
        .with_context(|| format!("cannot use the state folder {}", settings.state_folder.display()))?;
    let context = Arc::new(qga::Context { guest: guest.clone(), policy: policy(&settings) });
    let qga = QgaPart::build(settings.qga)?;
    let control = ControlPart::build(settings.control, sockets)?;
    let status = format!("QGA on {}; control channel on {}", qga.describe(), control.describe());

    supervisor.spawn("qga", qga.run(context, supervisor.shutdown()));
    let api = Service::new(guest.clone(), vec!["events".to_owned(), "qga".to_owned()]);
    supervisor.spawn("control", control.run(api, supervisor.shutdown()));
    supervisor.spawn("tick", tick(guest.clone(), supervisor.shutdown()));

    tracing::info!("guestlet {} started: {status}", crate::VERSION);
    service::ready(&status);
    let stop = async {
        termination.await;
        service::stopping();
        guest.events.tell(Event::Stopping);
    };
    supervisor.run(stop, DRAIN).await
}

fn policy(settings: &AgentSettings) -> Policy {
    let (policy, unknown) = Policy::new(settings.allow.as_deref(), &settings.block);
    for name in unknown {
        tracing::warn!("the command {name:?} of the block or allow list is not known");
    }
    policy
}

/// The one periodic wakeup.
async fn tick(guest: Guest, shutdown: CancellationToken) -> anyhow::Result<()> {
    let ticker = Ticker::new(TICK)?;
    while let Some(tick) = shutdown.run_until_cancelled(ticker.tick()).await {
        tick?;
        service::alive();
        guest.events.tell(Event::Tick);
    }
    Ok(())
}

enum QgaPart {
    Port(std::path::PathBuf),
    Unix(unix::Listener, std::path::PathBuf),
    None,
}

impl QgaPart {
    fn build(channel: QgaChannel) -> anyhow::Result<Self> {
        Ok(match channel {
            QgaChannel::VirtioSerial(path) => Self::Port(path),
            QgaChannel::UnixListen(path) => Self::Unix(unix::Listener::bind(&path)?, path),
            QgaChannel::None => Self::None,
        })
    }

    fn describe(&self) -> String {
        match self {
            Self::Port(path) | Self::Unix(_, path) => path.display().to_string(),
            Self::None => "nothing".to_owned(),
        }
    }

    async fn run(self, context: Arc<qga::Context>, shutdown: CancellationToken) -> anyhow::Result<()> {
        match self {
            Self::Port(path) => {
                let port = serve_port(&path, &context);
                shutdown.run_until_cancelled(port).await.unwrap_or(Ok(()))
            }
            Self::Unix(listener, path) => {
                let scope = Scope::new();
                let places = Arc::new(Semaphore::new(MAX_CLIENTS));
                let peer: Arc<str> = path.display().to_string().into();
                while let Some(Ok(place)) =
                    shutdown.run_until_cancelled(Arc::clone(&places).acquire_owned()).await
                {
                    let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await else { break };
                    let Some(stream) = usable(accepted).await else { continue };
                    let (context, peer) = (Arc::clone(&context), Arc::clone(&peer));
                    scope.children().spawn(async move {
                        if let Err(error) = qga::session::run(stream, &peer, &context).await {
                            tracing::debug!("{peer}: {error}");
                        }
                        drop(place);
                    });
                }
                Ok(())
            }
            Self::None => {
                shutdown.cancelled().await;
                Ok(())
            }
        }
    }
}

/// Serves one host after the other on a port, and the port again after it was unplugged.
async fn serve_port(path: &std::path::Path, context: &qga::Context) -> anyhow::Result<()> {
    let peer = path.display().to_string();
    loop {
        let mut port =
            Port::open_when_there(path).await.with_context(|| format!("cannot open {}", path.display()))?;
        tracing::info!("{peer}: open");
        loop {
            if let Err(error) = port.attached().await {
                tracing::warn!("{peer}: {error}; waiting for the port to come back");
                break;
            }
            tracing::debug!("{peer}: a host is there");
            if let Err(error) = qga::session::run(&mut port, &peer, context).await {
                tracing::debug!("{peer}: {error}");
            }
        }
    }
}

enum ControlPart {
    Vsock(vsock::Listener, String),
    Unix(unix::Listener, String),
    None(&'static str),
}

impl ControlPart {
    fn build(channel: ControlChannel, sockets: Vec<(String, OwnedFd)>) -> anyhow::Result<Self> {
        let mut passed = None;
        for (name, socket) in sockets {
            if name == CONTROL_SOCKET {
                passed = Some(socket);
            } else {
                tracing::warn!("the service manager passed a socket named {name:?}, which is not known");
            }
        }
        Ok(match channel {
            ControlChannel::None => Self::None("nothing"),
            ControlChannel::Unix(path) => {
                Self::Unix(unix::Listener::bind(&path)?, format!("unix {}", path.display()))
            }
            ControlChannel::Vsock { port, peer_cid, any_port } => {
                let guard = Guard { peer_cid, any_port };
                if any_port {
                    tracing::info!("hybrid vsock: every source port of context {peer_cid} is let in");
                }
                match passed {
                    Some(socket) => Self::Vsock(
                        vsock::Listener::adopt(socket, guard)?,
                        "vsock (held by guestlet.socket)".to_owned(),
                    ),
                    None => match vsock::Listener::bind(port, guard) {
                        Ok(listener) => Self::Vsock(listener, format!("vsock port {port}")),
                        Err(error) => {
                            tracing::warn!("no control channel: cannot listen on vsock port {port}: {error}");
                            Self::None("nothing (no vsock)")
                        }
                    },
                }
            }
        })
    }

    fn describe(&self) -> &str {
        match self {
            Self::Vsock(_, name) | Self::Unix(_, name) => name,
            Self::None(why) => why,
        }
    }

    async fn run(self, api: Service, shutdown: CancellationToken) -> anyhow::Result<()> {
        let scope = Scope::new();
        let places = Arc::new(Semaphore::new(MAX_CLIENTS));
        while let Some(Ok(place)) = shutdown.run_until_cancelled(Arc::clone(&places).acquire_owned()).await {
            match &self {
                Self::None(_) => shutdown.cancelled().await,
                Self::Unix(listener, name) => {
                    let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await else { break };
                    let Some(stream) = usable(accepted).await else { continue };
                    scope.children().spawn(serve_api(
                        stream,
                        name.clone(),
                        api.clone(),
                        shutdown.clone(),
                        place,
                    ));
                }
                Self::Vsock(listener, _) => {
                    let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await else { break };
                    match usable(accepted).await {
                        None => {}
                        Some((peer, Err(refusal))) => tracing::warn!("{peer} is refused: {refusal}"),
                        Some((peer, Ok(stream))) => {
                            scope.children().spawn(serve_api(
                                stream,
                                peer,
                                api.clone(),
                                shutdown.clone(),
                                place,
                            ));
                        }
                    }
                }
            }
        }
        // Connections end by themselves when the shutdown is announced.
        drop(places.acquire_many(u32::try_from(MAX_CLIENTS).unwrap_or(u32::MAX)).await);
        Ok(())
    }
}

async fn serve_api(
    stream: impl Stream,
    peer: String,
    api: Service,
    shutdown: CancellationToken,
    place: tokio::sync::OwnedSemaphorePermit,
) {
    tracing::debug!("{peer}: connected");
    match http2::serve(stream, api.into_server(), shutdown).await {
        Ok(()) => tracing::debug!("{peer}: closed"),
        Err(error) => tracing::debug!("{peer}: {error}"),
    }
    drop(place);
}

/// What was accepted, or nothing after a moment's rest: a lack of descriptors or memory passes.
async fn usable<T>(accepted: io::Result<T>) -> Option<T> {
    match accepted {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            tracing::warn!("cannot accept a connection: {error}");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}
