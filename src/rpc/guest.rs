//! `guestlet.v1.Guest`: who this guest is, and what happens in it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::guest::disks::lookup::{FindError, Selector};
use crate::guest::disks::release::{self, ReleaseError, Released};
use crate::guest::disks::room::WaitError;
use crate::guest::events::{self, Kind, News, Watcher};
use crate::guest::topology::Refusal;
use crate::guest::{Guest, identity, system};
use crate::rpc::callback::{self, Surroundings};
use crate::rpc::holder::{Hold, Holder};
use crate::rpc::keys::Keys;
use crate::rpc::{convert, guard, introduced};
use crate::sys::{blocking, error_chain};
use crate::transport::callback::Opened;
use crate::wire::proto::v1;
use crate::wire::proto::v1::disk_selector::By;
use crate::wire::proto::v1::guest_server::{self, GuestServer};

/// Bytes of one request; they are all small.
const MAX_REQUEST: usize = 16 * 1024;
/// Bytes of an answer of the host half's; the longest is a page of the list of volumes.
const MAX_ANSWER: usize = (4 << 20) + 4096;
/// The method whose messages are answers.
const CALLBACK: &str = "/guestlet.v1.Guest/Callback";
/// Bytes of a ping.
const MAX_PING: usize = 4096;
/// Maximum number of concurrent calls that read files. A host half that reconnects again and again leaves no
/// more than these behind.
const MAX_READING: usize = 16;
/// Work that is under way beside the event loop, of everybody; with more, disks hang, and calls that would add to it are
/// refused.
const MAX_WORK: usize = 128;
/// Milliseconds for which a disk is waited for.
const MAX_WAIT: u32 = 600_000;

/// The service, for one connection after the other.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    capabilities: Vec<String>,
    holder: Holder,
    surroundings: Surroundings,
    keys: Keys,
    /// Calls that may read files at the same time, shared by all connections.
    reading: Arc<Semaphore>,
}

impl Service {
    /// A service over this guest whose agent can do `capabilities`.
    pub fn new(
        guest: Guest,
        capabilities: Vec<String>,
        holder: Holder,
        surroundings: Surroundings,
        keys: Keys,
    ) -> Self {
        let reading = Arc::new(Semaphore::new(MAX_READING));
        Self { guest, capabilities, holder, surroundings, keys, reading }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> Served {
        let server = |most| GuestServer::new(self.clone()).max_decoding_message_size(most);
        Served { usual: server(MAX_REQUEST), callback: server(MAX_ANSWER) }
    }

    /// Returns the identity of this guest.
    ///
    /// # Errors
    /// If the kernel does not report its version, or too many earlier calls still wait for a disk that hangs.
    pub async fn info(&self) -> Result<v1::GuestInfo, Status> {
        let place = Arc::clone(&self.reading).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(
                "files such as /etc/os-release cannot be read: their disk does not answer",
            )
        })?;
        let root = self.guest.root.clone();
        // Continues after the caller has disconnected, and keeps its place until it is done.
        let read = blocking::run(move || {
            let read = (identity::identity(&root), system::os_release(&root));
            drop(place);
            read
        });
        let (identity, release) = read.await;
        let kernel = system::kernel().map_err(|error| Status::internal(error.to_string()))?;
        let field = |key| release.get(key).unwrap_or_default();
        Ok(v1::GuestInfo {
            machine_id: identity.machine_id,
            boot_id: identity.boot_id,
            dmi_uuid: identity.dmi_uuid,
            host_name: identity::host_name(),
            operating_system: Some(v1::OperatingSystem {
                id: field("ID"),
                name: field("NAME"),
                pretty_name: field("PRETTY_NAME"),
                version_id: field("VERSION_ID"),
            }),
            kernel_release: kernel.release,
            machine: kernel.machine,
            agent_version: crate::VERSION.to_owned(),
            capabilities: self.capabilities.clone(),
            heartbeat_interval_seconds: u32::try_from(events::TICK.as_secs()).unwrap_or(u32::MAX),
        })
    }
}

/// The service, which takes larger messages as answers than as requests.
#[derive(Debug, Clone)]
pub struct Served {
    usual: GuestServer<Service>,
    callback: GuestServer<Service>,
}

impl<B> tower_service::Service<http::Request<B>> for Served
where
    GuestServer<Service>: tower_service::Service<http::Request<B>>,
{
    type Response = <GuestServer<Service> as tower_service::Service<http::Request<B>>>::Response;
    type Error = <GuestServer<Service> as tower_service::Service<http::Request<B>>>::Error;
    type Future = <GuestServer<Service> as tower_service::Service<http::Request<B>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.usual.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let is_callback = request.uri().path() == CALLBACK;
        if is_callback { self.callback.call(request) } else { self.usual.call(request) }
    }
}

impl Service {
    /// Completes when the agent begins to stop.
    async fn stopping(&self) {
        let (_, mut watcher) = self.guest.events.watch(None);
        while !is_end(&watcher.next().await) {}
    }
}

/// Checks that another piece of work that may hang can be started.
pub(super) fn may_work() -> Result<(), Status> {
    if blocking::under_way() < MAX_WORK {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "{MAX_WORK} operations are under way, which is the limit: disks or other resources do not answer"
    )))
}

fn selector(disk: Option<v1::DiskSelector>) -> Result<Selector, Status> {
    match disk.and_then(|disk| disk.by) {
        Some(By::Serial(serial)) => Ok(Selector::Serial(serial)),
        Some(By::Alias(alias)) => Ok(Selector::Alias(alias)),
        Some(By::WorldWideName(name)) => Ok(Selector::Wwn(name)),
        None => Err(Status::invalid_argument("disk.by is missing: it must identify the disk")),
    }
}

fn not_found_out(error: &FindError) -> Status {
    match error {
        FindError::NotFound(_) => Status::not_found(error.to_string()),
        FindError::Ambiguous { .. } => Status::failed_precondition(error.to_string()),
        FindError::Unusable { .. } => Status::invalid_argument(error.to_string()),
    }
}

fn not_released(error: &ReleaseError) -> Status {
    let code = match error {
        ReleaseError::Find(error) => return not_found_out(error),
        ReleaseError::InUse { .. } | ReleaseError::ByRule { .. } | ReleaseError::Unknown { .. } => {
            Code::FailedPrecondition
        }
        ReleaseError::Busy(_) => Code::Aborted,
        ReleaseError::Silent { .. } => Code::DeadlineExceeded,
        ReleaseError::System { .. } => Code::Internal,
    };
    Status::new(code, error_chain::words(error))
}

#[tonic::async_trait]
impl guest_server::Guest for Service {
    async fn get_info(&self, _: Request<v1::GetInfoRequest>) -> Result<Response<v1::GuestInfo>, Status> {
        self.info().await.map(Response::new)
    }

    async fn ping(&self, request: Request<v1::PingRequest>) -> Result<Response<v1::PingResponse>, Status> {
        let payload = request.into_inner().payload;
        if payload.len() > MAX_PING {
            return Err(Status::invalid_argument(format!(
                "the payload has {} bytes; at most {MAX_PING} are allowed",
                payload.len()
            )));
        }
        Ok(Response::new(v1::PingResponse { payload }))
    }

    async fn find_disk(
        &self,
        request: Request<v1::FindDiskRequest>,
    ) -> Result<Response<v1::FindDiskResponse>, Status> {
        let v1::FindDiskRequest { disk, wait_milliseconds } = request.into_inner();
        if wait_milliseconds > MAX_WAIT {
            return Err(Status::invalid_argument(format!("wait_milliseconds is more than {MAX_WAIT}")));
        }
        let selector = selector(disk)?;
        may_work()?;
        let within = Duration::from_millis(wait_milliseconds.into());
        let found = tokio::select! {
            found = release::find(&self.guest, &selector, within) => found,
            () = self.stopping() => return Err(Status::unavailable("the agent is stopping")),
        };
        match found {
            Ok(disk) => Ok(Response::new(v1::FindDiskResponse { disk: Some(convert::disk(&disk)) })),
            Err(WaitError::TooLate { .. }) => Ok(Response::new(v1::FindDiskResponse { disk: None })),
            Err(WaitError::Find(error)) => Err(not_found_out(&error)),
        }
    }

    async fn release_disk(
        &self,
        request: Request<v1::ReleaseDiskRequest>,
    ) -> Result<Response<v1::ReleaseDiskResponse>, Status> {
        let wanted = request.get_ref().disk.clone();
        let selector = selector(wanted)?;
        guard::concerns(&request, || selector.to_string());
        may_work()?;
        let (disk, removed) = match release::release(&self.guest, &selector).await {
            Ok(Released::Absent) => (None, false),
            Ok(Released::Unused(disk)) => (Some(convert::disk(&disk)), false),
            Ok(Released::Removed(disk)) => (Some(convert::disk(&disk)), true),
            Err(error) => return Err(not_released(&error)),
        };
        Ok(Response::new(v1::ReleaseDiskResponse { disk, removed }))
    }

    async fn set_topology(
        &self,
        request: Request<v1::SetTopologyRequest>,
    ) -> Result<Response<v1::SetTopologyResponse>, Status> {
        guard::concerns(&request, || {
            let topology = request.get_ref().topology.clone().unwrap_or_default();
            format!("{}/{}/{}", topology.region, topology.zone, topology.host)
        });
        let peer = introduced::peer(&request);
        let v1::SetTopologyRequest { host_instance_id, topology } = request.into_inner();
        let holder = self.holder.held_by(&host_instance_id, &peer);
        let holder = holder.ok_or_else(|| {
            Status::failed_precondition("only the host half that holds this guest may set where it runs")
        })?;
        let topology = topology.ok_or_else(|| Status::invalid_argument("topology is missing"))?;
        may_work()?;
        let (desk, events) = (&self.guest.topology, &self.guest.events);
        match desk.take(convert::told(topology), &holder.host_name, events).await {
            Ok(()) => Ok(Response::new(v1::SetTopologyResponse {})),
            Err(refusal @ Refusal::Wrong(_)) => Err(Status::invalid_argument(refusal.to_string())),
            Err(refusal) => Err(Status::internal(error_chain::words(&refusal))),
        }
    }

    type CallbackStream = Opened;

    async fn callback(
        &self,
        request: Request<Streaming<v1::CallbackFromHost>>,
    ) -> Result<Response<Opened>, Status> {
        let peer = introduced::peer(&request);
        let surroundings = self.surroundings.clone();
        callback::open(request.into_inner(), &self.holder, peer, surroundings).await.map(Response::new)
    }

    async fn enroll(
        &self,
        request: Request<v1::EnrollRequest>,
    ) -> Result<Response<v1::EnrollResponse>, Status> {
        may_work()?;
        let proof = self.keys.proof(request.extensions()).await?;
        Ok(Response::new(v1::EnrollResponse { proof }))
    }

    async fn rotate_key(
        &self,
        request: Request<v1::RotateKeyRequest>,
    ) -> Result<Response<v1::RotateKeyResponse>, Status> {
        may_work()?;
        let key = self.keys.rotate(request.extensions(), &request.get_ref().r#use).await?;
        Ok(Response::new(v1::RotateKeyResponse { public_key: key.spki().to_vec() }))
    }

    async fn replace_host_key(
        &self,
        request: Request<v1::ReplaceHostKeyRequest>,
    ) -> Result<Response<v1::ReplaceHostKeyResponse>, Status> {
        may_work()?;
        let (_, extensions, request) = request.into_parts();
        self.keys.replace_host_key(&extensions, request.step).await?;
        Ok(Response::new(v1::ReplaceHostKeyResponse {}))
    }

    type WatchEventsStream = Pin<Box<dyn Stream<Item = Result<v1::Event, Status>> + Send>>;

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let peer = introduced::peer(&request);
        let may_call_back = guard::may_call_back(&request);
        let v1::WatchEventsRequest { host, after } = request.into_inner();
        let host = host.filter(|host| !host.instance_id.is_empty()).ok_or_else(|| {
            Status::invalid_argument("host.instance_id is empty: a host half must identify itself")
        })?;
        let hold = self.holder.take(host, peer, may_call_back).await?;
        let after = after.map(|after| events::Position { run_id: after.run_id, sequence: after.sequence });
        let (opening, watcher) = self.guest.events.watch(after.as_ref());
        let watching = Watching { watcher, hold, ended: false };
        let first = convert::ready(opening);
        let events = tokio_stream::once(Ok(first));
        Ok(Response::new(Box::pin(tokio_stream::StreamExt::chain(events, watching.into_stream()))))
    }
}

/// Returns whether the notification reports that the agent is stopping.
fn is_end(news: &News) -> bool {
    matches!(news, News::Event(recorded) if matches!(recorded.event, Kind::AgentStopping(_)))
}

/// The events of one holder. Ends after the agent said that it stops, or when the guest is taken over.
struct Watching {
    watcher: Watcher,
    hold: Hold,
    ended: bool,
}

impl Watching {
    fn into_stream(self) -> impl Stream<Item = Result<v1::Event, Status>> {
        futures_util::stream::unfold(self, |mut this| async {
            if this.ended {
                return None;
            }
            let item = tokio::select! {
                biased;
                taken_over = this.hold.lost() => {
                    this.ended = true;
                    Err(taken_over)
                }
                news = this.watcher.next() => {
                    this.ended = is_end(&news);
                    Ok(convert::news(news))
                }
            };
            Some((item, this))
        })
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;

    use super::*;
    use crate::sys::root::Root;
    use crate::trust::keyring::Keyring;
    use crate::wire::proto::v1::guest_server::Guest as _;

    /// Simulates a disk that hangs: opening a pipe without a writer blocks.
    #[tokio::test]
    #[allow(clippy::disallowed_methods)]
    async fn calls_that_hang_leave_no_more_behind_than_so_many_however_often_a_host_comes_again() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        let pipe = folder.path().join("etc/machine-id");
        nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
        let surroundings = Surroundings { changes: guest.disks.changes(), known: Arc::new(|_| {}) };
        let keys = Keys::new(Keyring::empty(), || Ok(None));
        let service = Service::new(guest, Vec::new(), Holder::default(), surroundings, keys);
        let mut refused = 0;
        for _ in 0..MAX_READING * 4 {
            // The client calls, waits for a short time, and disconnects.
            match tokio::time::timeout(Duration::from_millis(2), service.info()).await {
                Err(_) => {}
                Ok(answer) => {
                    assert_eq!(answer.unwrap_err().code(), Code::ResourceExhausted);
                    refused += 1;
                }
            }
        }
        assert_eq!(refused, MAX_READING * 3);
        let begun = std::time::Instant::now();
        let ping = Request::new(v1::PingRequest { payload: vec![1] });
        assert_eq!(service.ping(ping).await.unwrap().into_inner().payload, [1]);
        assert!(begun.elapsed() < Duration::from_secs(1));
        // The disk responds again: opening the pipe gives waiting readers a writer, and later readers find no file.
        let writer = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        std::fs::remove_file(&pipe).unwrap();
        drop(writer);
        while service.info().await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
