//! A container runtime: kubelet asks it over CRI (`runtime.v1alpha2` or `runtime.v1`) on a unix socket. A container is a process in a mount namespace of its own,
//! on the machine's files, that sees its volumes below [`VOLUMES`]; a sandbox is nothing but a name.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::fs::File;
use std::future::{Ready, ready};
use std::net::Ipv4Addr;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::SystemTime;

use guestlet::transport::http2;
use guestlet::transport::http2::foreign::Foreign;
use guestlet::wire::codec::Prost;
use http::{Request, Response};
use hyper::body::Incoming;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use prost::Message;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};

use crate::messages::{
    Container, ContainerConfig, ContainerFilter, ContainerStatus, ContainerStatusResponse,
    CreateContainerRequest, Empty, Id, Image, ImageStatusRequest, ImageStatusResponse, ListContainersRequest,
    ListContainersResponse, ListPodSandboxRequest, ListPodSandboxResponse, Network, PodSandboxStatusResponse,
    RunPodSandboxRequest, RuntimeCondition, RuntimeStatus, Sandbox, SandboxFilter, SandboxStatus,
    StatusResponse, VersionResponse,
};
use crate::stand_in;

/// Where a container finds its volumes. What kubelet would have it see elsewhere is left out.
const VOLUMES: &str = "/mnt/";

// States of a container; those of a sandbox are ready and not ready.
const CREATED: i32 = 0;
const RUNNING: i32 = 1;
const EXITED: i32 = 2;
const READY: i32 = 0;
const NOT_READY: i32 = 1;

/// All pods of the node. They outlive the kubelet that asked for them, and end with the test.
#[derive(Clone)]
pub struct Runtime(Arc<Mutex<Pods>>);

struct Pods {
    place: Place,
    made: u64,
    sandboxes: BTreeMap<String, Sandbox>,
    containers: BTreeMap<String, Held>,
}

/// What is the node's own.
struct Place {
    number: usize,
    /// A process in its mount namespace.
    mounts: String,
    /// Where the sidecars' credentials are.
    credentials: PathBuf,
}

/// A container, and its process once it was started.
struct Held {
    told: Container,
    config: ContainerConfig,
    log: PathBuf,
    child: Option<Child>,
    started_at: i64,
    ended: Option<(i64, ExitStatus)>,
}

impl Runtime {
    /// One without pods, whose containers have the mounts of this process, and what stands in for sidecars these credentials.
    pub fn new(number: usize, mounts: &str, credentials: &Path) -> Self {
        let place = Place { number, mounts: mounts.to_owned(), credentials: credentials.to_owned() };
        let (sandboxes, containers) = (BTreeMap::new(), BTreeMap::new());
        Self(Arc::new(Mutex::new(Pods { place, made: 0, sandboxes, containers })))
    }

    /// Ends all containers at once.
    pub fn kill(&self) {
        let mut pods = self.pods();
        let all: Vec<_> = pods.sandboxes.keys().cloned().collect();
        for sandbox in all {
            pods.stop_sandbox(&sandbox);
        }
    }

    /// Serves kubelet on a unix socket for as long as the test's runtime is there.
    pub fn serve(&self, socket: &Path) {
        let listener = UnixListener::bind(socket).unwrap();
        let runtime = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let stream = Foreign::new(stream, |why| panic!("kubelet is refused: {why}"));
                tokio::spawn(http2::serve(stream, runtime.clone(), CancellationToken::new()));
            }
        });
    }

    fn pods(&self) -> MutexGuard<'_, Pods> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self, request: Request<Incoming>) -> Response<Body> {
        let (service, method) = request.uri().path().rsplit_once('/').unwrap_or_default();
        let is_v1 = service.starts_with("/runtime.v1.");
        let method = method.to_owned();
        match method.as_str() {
            "Version" => unary(request, |_: Empty| Ok(version(is_v1))).await,
            "Status" => unary(request, |_: Empty| Ok(status())).await,
            "ImageStatus" => unary(request, |asked| Ok(image(asked))).await,
            "RunPodSandbox" => unary(request, |asked| self.pods().run_sandbox(asked)).await,
            "StopPodSandbox" => unary(request, |Id { id }| Ok(self.pods().stop_sandbox(&id))).await,
            "RemovePodSandbox" => unary(request, |Id { id }| Ok(self.pods().remove_sandbox(&id))).await,
            "PodSandboxStatus" => unary(request, |Id { id }| self.pods().sandbox_status(&id)).await,
            "ListPodSandbox" => unary(request, |asked| Ok(self.pods().sandboxes(asked))).await,
            "CreateContainer" => unary(request, |asked| self.pods().create(asked)).await,
            "StartContainer" => unary(request, |Id { id }| self.pods().start(&id)).await,
            "StopContainer" => unary(request, |Id { id }| Ok(self.pods().stop(&id))).await,
            "RemoveContainer" => unary(request, |Id { id }| Ok(self.pods().remove(&id))).await,
            "ContainerStatus" => unary(request, |Id { id }| self.pods().status(&id)).await,
            "ListContainers" => unary(request, |asked| Ok(self.pods().containers(asked))).await,
            // Nothing to tell of these.
            "UpdateRuntimeConfig"
            | "ListContainerStats"
            | "ListPodSandboxStats"
            | "ListImages"
            | "ImageFsInfo"
            | "RuntimeConfig" => unary(request, |_: Empty| Ok(Empty {})).await,
            _ => Status::unimplemented(method).into_http(),
        }
    }
}

impl tower_service::Service<Request<Incoming>> for Runtime {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let runtime = self.clone();
        Box::pin(async move { Ok(runtime.answer(request).await) })
    }
}

/// A method of one request and one answer.
struct Unary<F>(F);

impl<Q, A, F: FnMut(Q) -> Result<A, Status>> UnaryService<Q> for Unary<F> {
    type Response = A;
    type Future = Ready<Result<tonic::Response<A>, Status>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        ready((self.0)(request.into_inner()).map(tonic::Response::new))
    }
}

async fn unary<Q, A>(request: Request<Incoming>, work: impl FnMut(Q) -> Result<A, Status>) -> Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + 'static,
{
    Grpc::new(Prost::<A, Q>::default()).unary(Unary(work), request).await
}

fn version(is_v1: bool) -> VersionResponse {
    VersionResponse {
        version: "0.1.0".to_owned(),
        runtime_name: "processes".to_owned(),
        runtime_version: "1.0.0".to_owned(),
        runtime_api_version: if is_v1 { "v1" } else { "v1alpha2" }.to_owned(),
    }
}

fn status() -> StatusResponse {
    let ready = |name: &str| RuntimeCondition { r#type: name.to_owned(), status: true };
    StatusResponse {
        status: Some(RuntimeStatus { conditions: vec![ready("RuntimeReady"), ready("NetworkReady")] }),
    }
}

/// Every image is there.
fn image(asked: ImageStatusRequest) -> ImageStatusResponse {
    let name = asked.image.unwrap_or_default().image;
    ImageStatusResponse { image: Some(Image { id: name.clone(), tags: vec![name], size: 1 }) }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_nanos()).unwrap()
}

fn unknown(id: &str) -> Status {
    Status::not_found(format!("there is no {id}"))
}

impl Pods {
    fn new_id(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind}-{}", self.made)
    }

    fn run_sandbox(&mut self, asked: RunPodSandboxRequest) -> Result<Id, Status> {
        let config = asked.config.ok_or_else(|| Status::invalid_argument("config is missing"))?;
        let id = self.new_id("sandbox");
        let sandbox = Sandbox {
            id: id.clone(),
            metadata: config.metadata,
            state: READY,
            created_at: now(),
            labels: config.labels,
            annotations: config.annotations,
        };
        self.sandboxes.insert(id.clone(), sandbox);
        Ok(Id { id })
    }

    /// The address of a sandbox.
    fn address(&self, sandbox: &str) -> Ipv4Addr {
        let number = sandbox.rsplit('-').next().and_then(|number| number.parse::<u32>().ok());
        let first = if self.place.number == 0 { [198, 18, 1, 0] } else { [198, 19, 1, 0] };
        Ipv4Addr::from(u32::from(Ipv4Addr::from(first)) + number.expect("the number of a sandbox"))
    }

    /// Ids of the containers of a sandbox.
    fn inside(&self, sandbox: &str) -> Vec<String> {
        let inside = self.containers.values().filter(|held| held.told.sandbox == sandbox);
        inside.map(|held| held.told.id.clone()).collect()
    }

    fn stop_sandbox(&mut self, id: &str) -> Empty {
        for container in self.inside(id) {
            self.stop(&container);
        }
        if let Some(sandbox) = self.sandboxes.get_mut(id) {
            sandbox.state = NOT_READY;
        }
        Empty {}
    }

    fn remove_sandbox(&mut self, id: &str) -> Empty {
        for container in self.inside(id) {
            self.remove(&container);
        }
        self.sandboxes.remove(id);
        Empty {}
    }

    fn sandbox_status(&self, id: &str) -> Result<PodSandboxStatusResponse, Status> {
        let sandbox = self.sandboxes.get(id).ok_or_else(|| unknown(id))?.clone();
        let ip = self.address(id).to_string();
        let status = SandboxStatus {
            id: sandbox.id,
            metadata: sandbox.metadata,
            state: sandbox.state,
            created_at: sandbox.created_at,
            network: Some(Network { ip }),
            labels: sandbox.labels,
            annotations: sandbox.annotations,
        };
        Ok(PodSandboxStatusResponse { status: Some(status) })
    }

    fn sandboxes(&self, asked: ListPodSandboxRequest) -> ListPodSandboxResponse {
        let SandboxFilter { id, state, labels } = asked.filter.unwrap_or_default();
        let wanted = |sandbox: &&Sandbox| {
            (id.is_empty() || sandbox.id == id)
                && state.as_ref().is_none_or(|wanted| wanted.state == sandbox.state)
                && labels.iter().all(|(key, value)| sandbox.labels.get(key) == Some(value))
        };
        ListPodSandboxResponse { items: self.sandboxes.values().filter(wanted).cloned().collect() }
    }

    fn create(&mut self, asked: CreateContainerRequest) -> Result<Id, Status> {
        let config = asked.config.ok_or_else(|| Status::invalid_argument("config is missing"))?;
        let log = Path::new(&asked.sandbox_config.unwrap_or_default().log_directory).join(&config.log_path);
        // kubelet removes this file and those beside it.
        assert!(log.is_absolute() && !config.log_path.is_empty(), "{}", log.display());
        let id = self.new_id("container");
        let told = Container {
            id: id.clone(),
            sandbox: asked.sandbox,
            metadata: config.metadata.clone(),
            image: config.image.clone(),
            image_id: config.image.clone().unwrap_or_default().image,
            state: CREATED,
            created_at: now(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
        };
        self.containers
            .insert(id.clone(), Held { told, config, log, child: None, started_at: 0, ended: None });
        Ok(Id { id })
    }

    fn start(&mut self, id: &str) -> Result<Empty, Status> {
        let held = self.containers.get(id).ok_or_else(|| unknown(id))?;
        let child = spawn(&self.place, self.address(&held.told.sandbox), &held.config, &held.log)?;
        let held = self.containers.get_mut(id).ok_or_else(|| unknown(id))?;
        held.child = Some(child);
        held.started_at = now();
        held.told.state = RUNNING;
        Ok(Empty {})
    }

    fn stop(&mut self, id: &str) -> Empty {
        if let Some(held) = self.containers.get_mut(id) {
            held.stop();
        }
        Empty {}
    }

    fn remove(&mut self, id: &str) -> Empty {
        self.stop(id);
        self.containers.remove(id);
        Empty {}
    }

    fn status(&mut self, id: &str) -> Result<ContainerStatusResponse, Status> {
        let held = self.containers.get_mut(id).ok_or_else(|| unknown(id))?;
        held.look();
        let told = held.told.clone();
        let (finished_at, exit_code) = held.ended.map_or((0, 0), |(at, status)| {
            (at, status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()))
        });
        let status = ContainerStatus {
            id: told.id,
            metadata: told.metadata,
            state: told.state,
            created_at: told.created_at,
            started_at: held.started_at,
            finished_at,
            exit_code,
            image: told.image,
            image_id: told.image_id,
            labels: told.labels,
            annotations: told.annotations,
            log_path: held.log.display().to_string(),
        };
        Ok(ContainerStatusResponse { status: Some(status) })
    }

    fn containers(&mut self, asked: ListContainersRequest) -> ListContainersResponse {
        let ContainerFilter { id, state, sandbox, labels } = asked.filter.unwrap_or_default();
        self.containers.values_mut().for_each(Held::look);
        let wanted = |told: &&Container| {
            (id.is_empty() || told.id == id)
                && (sandbox.is_empty() || told.sandbox == sandbox)
                && state.as_ref().is_none_or(|wanted| wanted.state == told.state)
                && labels.iter().all(|(key, value)| told.labels.get(key) == Some(value))
        };
        let all = self.containers.values().map(|held| &held.told);
        ListContainersResponse { containers: all.filter(wanted).cloned().collect() }
    }
}

impl Held {
    /// Looks whether its process has ended.
    fn look(&mut self) {
        if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
            self.end(status);
        }
    }

    fn stop(&mut self) {
        if let Some(child) = &mut self.child {
            // The group is there for as long as the child was not waited for.
            killpg(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGKILL).unwrap();
            let status = child.wait().unwrap();
            self.end(status);
        }
    }

    fn end(&mut self, status: ExitStatus) {
        self.child = None;
        self.told.state = EXITED;
        self.ended = Some((now(), status));
    }
}

/// Starts a container's process, in a process group and a mount namespace of its own, in which the node's mounts end with
/// the node's.
fn spawn(place: &Place, address: Ipv4Addr, config: &ContainerConfig, log: &Path) -> Result<Child, Status> {
    let stands_in = config.image.as_ref().is_some_and(|image| stand_in::is_meant(&image.image));
    let output = File::create(format!("/proc/{}/root{}", place.mounts, log.display()))?;
    let errors = if stands_in { Stdio::inherit() } else { output.try_clone()?.into() };
    let mut script = format!("mount -t tmpfs container {VOLUMES}; ");
    let mounts = config.mounts.iter().map(|mount| (&mount.inside, &mount.outside, mount.is_read_only));
    let devices = config.devices.iter().map(|device| (&device.inside, &device.outside, false));
    for (inside, outside, is_read_only) in mounts.chain(devices) {
        let inside = if stands_in { stand_in::inside(inside) } else { inside.clone() };
        if !inside.starts_with(VOLUMES) {
            continue;
        }
        let above = Path::new(&inside).parent().expect("a path below").display();
        let make = format!(
            "if [ -d '{outside}' ]; then mkdir -p '{inside}'; else mkdir -p '{above}'; touch '{inside}'; fi"
        );
        write!(script, "{make}; mount --bind '{outside}' '{inside}'; ").unwrap();
        if is_read_only {
            write!(script, "mount -o remount,bind,ro '{inside}'; ").unwrap();
        }
    }
    script.push_str("exec \"$@\"");
    let mut command = Command::new("nsenter");
    command.args(["--mount", "--target", &place.mounts, "unshare", "--mount", "--propagation", "slave"]);
    command.args(["sh", "-ec", &script, "container"]);
    if stands_in {
        stand_in::complete(&mut command, config, address, &place.credentials);
    } else {
        command.args(&config.command).args(&config.arguments);
    }
    let command = command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(errors);
    command.spawn().map_err(Status::from)
}
