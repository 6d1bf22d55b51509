//! A simulated guest: an agent on a unix socket, with good or bad manners.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use guestlet::rpc;
use guestlet::supervise::Scope;
use guestlet::transport::callback::Caller;
use guestlet::transport::{Both, http2};
use guestlet::wire::proto::v1::callback_from_host::Message;
use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::guest_server::{self, GuestServer};
use guestlet::wire::proto::v1::health_checks_server::HealthChecksServer;
use guestlet::wire::proto::v1::metrics_server::MetricsServer;
use guestlet::wire::proto::v1::power_server::PowerServer;
use guestlet::wire::proto::v1::qga_server::QgaServer;
use guestlet::wire::proto::v1::{self, AgentReady, Event, GuestInfo, GuestState, Heartbeat, WhoAmIResponse};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

use crate::answers::Machine;
use crate::asking;
use crate::checks::{Checker, Services};
use crate::frames::{self, Trick};

// Other test programs have this file by its path.
#[path = "guest/manner.rs"]
mod manner;

#[allow(unused_imports, reason = "each test program uses a part of it")]
pub use manner::Crowd;
pub use manner::{Door, Manner, info};

/// Guests that were started.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// How often a good guest's heart beats.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// A guest that runs until it is dropped; then all its streams end.
pub struct Guest {
    path: PathBuf,
    agent: Agent,
    open: Arc<AtomicUsize>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    /// Starts a guest whose agent is reached at `path`.
    pub fn start(path: &Path, door: Door, manner: Manner, info: GuestInfo) -> Self {
        Self::start_in(path, door, manner, info, GuestState::default())
    }

    /// Starts a guest in the given state.
    pub fn start_in(path: &Path, door: Door, manner: Manner, info: GuestInfo, state: GuestState) -> Self {
        let open = Arc::new(AtomicUsize::new(0));
        let (stop, stopped) = oneshot::channel();
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let agent = Agent {
            info,
            manner,
            run_id: format!("run-{}", RUNS.fetch_add(1, Ordering::SeqCst)),
            state,
            log: watch::Sender::new(Vec::new()),
            asked: Arc::default(),
            disks: Arc::default(),
            places: Arc::default(),
            behalves: Arc::default(),
            checks: Checker::default(),
            machine: Machine::default(),
        };
        let (counter, serving) = (open.clone(), agent.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let streams = Scope::new();
                let listener = UnixListener::from_std(listener).unwrap();
                streams.children().spawn(accept(listener, door, serving, counter));
                drop(stopped.await);
            });
        });
        Self { path: path.to_owned(), agent, open, stop: Some(stop), thread: Some(thread) }
    }

    /// Lets something happen in the guest.
    pub fn happen(&self, kind: Kind) {
        self.agent.log.send_modify(|log| log.push(kind));
    }

    /// Streams that the host half has open.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// What the host half says of this guest.
    pub fn identity(&self) -> Option<WhoAmIResponse> {
        self.agent.asked.identity.lock().unwrap().clone()
    }

    /// Its disks.
    pub fn disks(&self) -> MutexGuard<'_, Disks> {
        self.agent.disks.lock().unwrap()
    }

    /// For calls of the host half, once the callback is open.
    pub fn client(&self) -> Caller {
        let mut client = self.agent.asked.client.subscribe();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let opened = async { client.wait_for(Option::is_some).await.unwrap().clone().unwrap() };
        runtime.block_on(async { tokio::time::timeout(crate::lab::DEADLINE, opened).await.unwrap() })
    }

    /// Where it was told that it runs.
    pub fn places(&self) -> MutexGuard<'_, Places> {
        self.agent.places.lock().unwrap()
    }

    /// On whose behalf it was called so far.
    pub fn behalves(&self) -> Vec<Behalf> {
        self.agent.behalves.lock().unwrap().clone()
    }

    /// Which health checks it was given, each time.
    pub fn checks(&self) -> Vec<v1::SetHealthChecksRequest> {
        self.agent.checks.given.lock().unwrap().clone()
    }

    /// What people ask of it.
    pub fn machine(&self) -> &Machine {
        &self.agent.machine
    }

    /// How many of its calls the host half has answered.
    pub fn answers(&self) -> usize {
        self.agent.asked.answers.load(Ordering::SeqCst)
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

/// What the guest has asked the host half.
#[derive(Default)]
pub struct Asked {
    pub identity: Mutex<Option<WhoAmIResponse>>,
    pub answers: AtomicUsize,
    /// For calls on its newest callback.
    pub client: watch::Sender<Option<Caller>>,
}

#[derive(Clone)]
struct Agent {
    info: GuestInfo,
    manner: Manner,
    run_id: String,
    state: GuestState,
    log: watch::Sender<Vec<Kind>>,
    asked: Arc<Asked>,
    disks: Arc<Mutex<Disks>>,
    places: Arc<Mutex<Places>>,
    behalves: Arc<Mutex<Vec<Behalf>>>,
    checks: Checker,
    machine: Machine,
}

/// On whose behalf the host half has called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behalf {
    pub method: &'static str,
    pub caller: Option<String>,
    pub audit_id: Option<String>,
}

/// Where a guest was told that it runs.
#[derive(Debug, Default)]
pub struct Places {
    pub told: Vec<v1::Topology>,
    /// Why none is taken, if none is.
    pub refusal: Option<(Code, String)>,
    /// Callbacks that the settings did not allow.
    pub callbacks_denied: usize,
}

/// The disks of a guest, as a test wants them.
#[derive(Debug, Default)]
pub struct Disks {
    /// The names of those that it sees, by their serial numbers, or the texts of page 83h.
    pub seen: BTreeMap<String, String>,
    /// Why none is released, if none is.
    pub refusal: Option<(Code, String)>,
    /// What the host half has asked.
    pub asked: Vec<String>,
}

impl Agent {
    fn called<T>(&self, method: &'static str, request: &Request<T>) {
        let told = |key| Some(request.metadata().get(key)?.to_str().unwrap().to_owned());
        let (caller, audit_id) = (told("guestlet-caller"), told("guestlet-audit-id"));
        self.behalves.lock().unwrap().push(Behalf { method, caller, audit_id });
    }

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
        if let Manner::Tricky(trick) = self.manner {
            if trick == Trick::Resets {
                return frames::play(trick, stream).await;
            }
            let (near, far) = tokio::io::duplex(64 * 1024);
            let serving = http2::serve(near, GuestServer::new(self), CancellationToken::new());
            return tokio::join!(serving, frames::play_later(trick, stream, far)).1;
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
            _ => {
                let checks = HealthChecksServer::new(self.checks.clone());
                let machine = self.machine.clone();
                let services = Services { guest: GuestServer::new(self), checks };
                let services = Both(PowerServer::new(machine.clone()), services);
                let services = Both(MetricsServer::new(machine.clone()), services);
                let real = machine.laid_out();
                let services = Both(QgaServer::new(machine), services);
                let services = Both(rpc::accounts::Service::new(real.clone()).into_server(), services);
                let services = Both(rpc::file_systems::Service::new(real.clone()).into_server(), services);
                let services = Both(rpc::freeze::Service::new(real.clone()).into_server(), services);
                let services = Both(rpc::machine::Service::new(real.clone()).into_server(), services);
                let services = Both(rpc::network::Service::new(real).into_server(), services);
                drop(http2::serve(stream, services, CancellationToken::new()).await);
            }
        }
        Ok(())
    }

    /// Sends all events after `sequence`, and heartbeats in between.
    async fn tell(self, mut sequence: u64, events: mpsc::Sender<Result<Event, Status>>) {
        let mut log = self.log.subscribe();
        loop {
            let next = usize::try_from(sequence).unwrap();
            let happened = log.borrow_and_update().get(next).cloned();
            let kind = if let Some(kind) = happened {
                sequence += if self.manner == Manner::Hole { 2 } else { 1 };
                kind
            } else {
                let beat = async {
                    match self.manner {
                        Manner::Mute => std::future::pending().await,
                        Manner::Flood => tokio::task::yield_now().await,
                        _ => tokio::time::sleep(HEARTBEAT).await,
                    }
                };
                tokio::select! {
                    _ = log.changed() => continue,
                    () = beat => {}
                }
                if self.manner == Manner::Bulky { bulk(&mut sequence) } else { Kind::Heartbeat(Heartbeat {}) }
            };
            if events.send(Ok(event(sequence, kind))).await.is_err() {
                return;
            }
        }
    }
}

fn event(sequence: u64, kind: Kind) -> Event {
    Event { sequence, time: Some(SystemTime::now().into()), kind: Some(kind) }
}

/// An event of about 200 KB.
fn bulk(sequence: &mut u64) -> Kind {
    *sequence += 1;
    Kind::ShutdownRequested(v1::ShutdownRequested { mode: "x".repeat(200_000) })
}

fn serial(disk: Option<v1::DiskSelector>) -> String {
    match disk.unwrap().by.unwrap() {
        v1::disk_selector::By::Serial(text) | v1::disk_selector::By::Alias(text) => text,
        other @ v1::disk_selector::By::WorldWideName(_) => panic!("{other:?}"),
    }
}

#[tonic::async_trait]
impl guest_server::Guest for Agent {
    async fn get_info(&self, request: Request<v1::GetInfoRequest>) -> Result<Response<GuestInfo>, Status> {
        self.called("GetInfo", &request);
        Ok(Response::new(self.info.clone()))
    }

    async fn ping(&self, request: Request<v1::PingRequest>) -> Result<Response<v1::PingResponse>, Status> {
        self.called("Ping", &request);
        Ok(Response::new(v1::PingResponse { payload: request.into_inner().payload }))
    }

    async fn find_disk(
        &self,
        request: Request<v1::FindDiskRequest>,
    ) -> Result<Response<v1::FindDiskResponse>, Status> {
        self.called("FindDisk", &request);
        let request = request.into_inner();
        assert_eq!(request.wait_milliseconds, 10_000);
        let serial = serial(request.disk);
        let mut disks = self.disks.lock().unwrap();
        disks.asked.push(format!("find {serial}"));
        let disk = disks.seen.get(&serial).map(|name| v1::Disk { name: name.clone(), ..v1::Disk::default() });
        Ok(Response::new(v1::FindDiskResponse { disk }))
    }

    async fn release_disk(
        &self,
        request: Request<v1::ReleaseDiskRequest>,
    ) -> Result<Response<v1::ReleaseDiskResponse>, Status> {
        self.called("ReleaseDisk", &request);
        let serial = serial(request.into_inner().disk);
        let mut disks = self.disks.lock().unwrap();
        disks.asked.push(format!("release {serial}"));
        match &disks.refusal {
            Some((code, words)) => Err(Status::new(*code, words.clone())),
            None => Ok(Response::new(v1::ReleaseDiskResponse { disk: None, removed: false })),
        }
    }

    async fn set_topology(
        &self,
        request: Request<v1::SetTopologyRequest>,
    ) -> Result<Response<v1::SetTopologyResponse>, Status> {
        self.called("SetTopology", &request);
        let request = request.into_inner();
        assert!(!request.host_instance_id.is_empty());
        let mut places = self.places.lock().unwrap();
        places.told.push(request.topology.unwrap());
        if self.manner == Manner::Narrow {
            return Err(Status::permission_denied("no grant gives the role topology"));
        }
        match &places.refusal {
            Some((code, words)) => Err(Status::new(*code, words.clone())),
            None => Ok(Response::new(v1::SetTopologyResponse {})),
        }
    }

    async fn enroll(&self, _: Request<v1::EnrollRequest>) -> Result<Response<v1::EnrollResponse>, Status> {
        Err(Status::failed_precondition("this guest has no keys"))
    }

    async fn replace_host_key(
        &self,
        _: Request<v1::ReplaceHostKeyRequest>,
    ) -> Result<Response<v1::ReplaceHostKeyResponse>, Status> {
        Err(Status::failed_precondition("this guest has no keys"))
    }

    async fn rotate_key(
        &self,
        _: Request<v1::RotateKeyRequest>,
    ) -> Result<Response<v1::RotateKeyResponse>, Status> {
        Err(Status::failed_precondition("this guest has no keys"))
    }

    type CallbackStream = asking::Messages;

    async fn callback(
        &self,
        request: Request<tonic::Streaming<v1::CallbackFromHost>>,
    ) -> Result<Response<asking::Messages>, Status> {
        self.called("Callback", &request);
        if self.manner == Manner::Narrow {
            self.places.lock().unwrap().callbacks_denied += 1;
            return Err(Status::permission_denied("no grant gives the role disks"));
        }
        let mut answers = request.into_inner();
        let Some(Message::Bounds(bounds)) = answers.message().await?.unwrap().message else {
            panic!("no bounds")
        };
        assert!(!bounds.host_instance_id.is_empty());
        Ok(Response::new(asking::Messages::new(self.manner, &self.asked, &bounds, answers)))
    }

    type WatchEventsStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        self.called("WatchEvents", &request);
        let v1::WatchEventsRequest { host, after } = request.into_inner();
        assert!(!host.unwrap().instance_id.is_empty());
        if self.manner == Manner::Held {
            return Err(Status::failed_precondition("held by host half other (1234), which answers"));
        }
        let (sender, receiver) = mpsc::channel(2);
        let newest = self.log.borrow().len() as u64;
        let resumed = after.filter(|after| after.run_id == self.run_id && after.sequence <= newest);
        let ready = AgentReady {
            run_id: self.run_id.clone(),
            resumed: resumed.is_some(),
            missed: 0,
            // Made here, for it is large.
            state: resumed.is_none().then(|| match self.manner {
                Manner::Crowded(crowd) => Box::new(crowd.state()),
                _ => Box::new(self.state.clone()),
            }),
        };
        let sequence = resumed.map_or(newest, |after| after.sequence);
        sender.send(Ok(event(sequence, Kind::AgentReady(ready)))).await.unwrap();
        let scope = Scope::new();
        scope.children().spawn(self.clone().tell(sequence, sender));
        Ok(Response::new(Box::pin(Events { receiver, _scope: scope })))
    }
}

struct Events {
    receiver: mpsc::Receiver<Result<Event, Status>>,
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
