//! A simulated guest: an agent on a unix socket, with good or bad manners.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use guestlet::supervise::Scope;
use guestlet::transport::http2;
use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::guest_server::{self, GuestServer};
use guestlet::wire::proto::v1::{self, AgentReady, Event, GuestInfo, Heartbeat, OperatingSystem};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{broadcast, oneshot};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// How often a good guest's heart beats.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// How a guest behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Good,
    /// Takes the stream and says nothing.
    Silent,
    /// Answers, opens the events, and says nothing more.
    Mute,
    /// Speaks something else than HTTP/2.
    Garbage,
    /// Sends events as fast as it can.
    Flood,
    /// Closes the stream as soon as the events are open.
    Fickle,
}

/// How the socket leads to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    Unix,
    /// CONNECT comes first.
    Hybrid,
    /// CONNECT comes first and finds nobody.
    HybridClosed,
}

/// A guest that runs until it is dropped; then all its streams end.
pub struct Guest {
    path: PathBuf,
    events: broadcast::Sender<Kind>,
    open: Arc<AtomicUsize>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a decent guest says of itself.
pub fn info(uuid: &str, boot_id: &str) -> GuestInfo {
    GuestInfo {
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        boot_id: boot_id.into(),
        dmi_uuid: uuid.into(),
        host_name: "web-1.example".into(),
        operating_system: Some(OperatingSystem {
            id: "debian".into(),
            name: "Debian GNU/Linux".into(),
            pretty_name: "Debian GNU/Linux 12 (bookworm)".into(),
            version_id: "12".into(),
        }),
        kernel_release: "6.1.0-30-cloud-amd64".into(),
        machine: "x86_64".into(),
        agent_version: "0.1.0".into(),
        capabilities: vec!["events".into(), "qga".into()],
        heartbeat_interval_seconds: 1,
    }
}

impl Guest {
    /// Starts a guest whose agent is reached at `path`.
    pub fn start(path: &Path, door: Door, manner: Manner, info: GuestInfo) -> Self {
        let events = broadcast::Sender::new(16);
        let open = Arc::new(AtomicUsize::new(0));
        let (stop, stopped) = oneshot::channel();
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let agent = Agent { info, manner, events: events.clone() };
        let counter = open.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = UnixListener::from_std(listener).unwrap();
                tokio::select! {
                    () = accept(listener, door, agent, counter) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { path: path.to_owned(), events, open, stop: Some(stop), thread: Some(thread) }
    }

    /// Lets something happen in the guest, on every stream of events.
    pub fn happen(&self, kind: Kind) {
        self.events.send(kind).unwrap();
    }

    /// Streams that the host half has open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
        drop(self.stop.take());
        drop(self.thread.take().unwrap().join());
    }
}

/// Counts a stream for as long as it is open.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn accept(listener: UnixListener, door: Door, agent: Agent, open: Arc<AtomicUsize>) {
    let streams = Scope::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        open.fetch_add(1, Ordering::SeqCst);
        let (agent, counted) = (agent.clone(), Counted(open.clone()));
        streams.children().spawn(async move {
            drop(agent.serve(stream, door).await);
            drop(counted);
        });
    }
}

#[derive(Clone)]
struct Agent {
    info: GuestInfo,
    manner: Manner,
    events: broadcast::Sender<Kind>,
}

impl Agent {
    async fn serve(self, mut stream: UnixStream, door: Door) -> std::io::Result<()> {
        if door != Door::Unix {
            let mut request = [0; b"CONNECT 970\n".len()];
            stream.read_exact(&mut request).await?;
            assert_eq!(&request, b"CONNECT 970\n");
            if door == Door::HybridClosed {
                return Ok(());
            }
            stream.write_all(b"OK 1073741824\n").await?;
        }
        match self.manner {
            Manner::Silent => {
                // Until the host half closes the stream.
                let mut heard = [0; 1024];
                while stream.read(&mut heard).await? > 0 {}
            }
            Manner::Garbage => stream.write_all(&b"\x00\x1bHTTP/1.1 400 No\r\n\r\n".repeat(100)).await?,
            Manner::Fickle => {
                let serving = http2::serve(stream, GuestServer::new(self), CancellationToken::new());
                drop(tokio::time::timeout(HEARTBEAT, serving).await);
            }
            Manner::Good | Manner::Mute | Manner::Flood => {
                drop(http2::serve(stream, GuestServer::new(self), CancellationToken::new()).await);
            }
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl guest_server::Guest for Agent {
    async fn get_info(&self, _: Request<v1::GetInfoRequest>) -> Result<Response<GuestInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    type WatchEventsStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn watch_events(
        &self,
        _: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let (manner, mut happening) = (self.manner, self.events.subscribe());
        let scope = Scope::new();
        scope.children().spawn(async move {
            let mut kind = Kind::AgentReady(AgentReady {});
            for sequence in 1.. {
                let event = Event { sequence, time: Some(SystemTime::now().into()), kind: Some(kind) };
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
                let beat = async {
                    match manner {
                        Manner::Mute => std::future::pending().await,
                        Manner::Flood => tokio::task::yield_now().await,
                        _ => tokio::time::sleep(HEARTBEAT).await,
                    }
                };
                kind = tokio::select! {
                    Ok(kind) = happening.recv() => kind,
                    () = beat => Kind::Heartbeat(Heartbeat {}),
                };
            }
        });
        Ok(Response::new(Box::pin(Events { receiver, _scope: scope })))
    }
}

struct Events {
    receiver: tokio::sync::mpsc::Receiver<Result<Event, Status>>,
    _scope: Scope,
}

impl Stream for Events {
    type Item = Result<Event, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.receiver.poll_recv(context)
    }
}
