//! Assembly of `guestlet-host`: settings → parts → run → drain.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::host::{HostSettings, LoadBalancerSettings, Role as SettingsRole, TrustSettings};
use crate::host::admission::Admission;
use crate::host::api::{self, Api};
use crate::host::backends;
use crate::host::changed::Changed;
use crate::host::cloud::{self, forward::Forwarder, forward::Numbered};
use crate::host::exporters::Exporters;
use crate::host::fleet::{Fleet, Handle};
use crate::host::half::Half;
use crate::host::machine::Desks;
use crate::host::place::Topology;
use crate::host::trust::{Pins, Trust};
use crate::host::volumes::Keeper;
use crate::host::{console, for_guests, scrape};
use crate::supervise::{Supervisor, termination};
use crate::sys::{host_name::host_name, logging, service};
use crate::transport::unix::{self, Listener};
use crate::trust;

#[cfg(feature = "kubevirt")]
mod controller;
#[cfg(feature = "kubevirt")]
mod node;
mod settings;
mod told;

#[cfg(feature = "kubevirt")]
pub use crate::host::backends::kubevirt::node::profile::install as install_seccomp_profile;
#[cfg(feature = "kubevirt")]
pub use controller::ControllerOptions;
#[cfg(feature = "kubevirt")]
pub use node::NodeOptions;
use settings::{Followed, Reloader};
use told::{listen_for_metrics, watch_over};

/// Time for the tasks to end.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// Time for the tasks of a controller, which completes the changes that it has begun in the cluster, and
/// releases the Lease. Less than the 15 s that its pod has.
#[cfg(feature = "kubevirt")]
const CONTROLLER_DRAIN: Duration = Duration::from_secs(14);
/// Longest wait at the end for system calls that have not returned, such as those on a pool that hangs. Work
/// that they leave unfinished is resumed at the next start.
const LEFT_BEHIND: Duration = Duration::from_secs(5);
/// Interval at which the number of sessions is reported to systemd.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which missing audit records are reported.
const AUDIT_INTERVAL: Duration = Duration::from_secs(5);

/// Pause before the program exits because of wrong settings, so that systemd does not restart it at once.
const WRONG_SETTINGS_PAUSE: Duration = Duration::from_secs(10);

/// Role of the host half, which determines the VMs that it serves.
#[derive(Debug, Clone)]
pub enum Role {
    /// Serves the VMs of this machine, which the settings list.
    Machine,
    /// Serves the VMs of a node of a Kubernetes cluster.
    #[cfg(feature = "kubevirt")]
    Node(NodeOptions),
    /// Serves the VMs of a whole cluster: attaches volumes to them for its nodes.
    #[cfg(feature = "kubevirt")]
    Controller(ControllerOptions),
}

impl Role {
    fn of_settings(&self) -> SettingsRole {
        match self {
            Self::Machine => SettingsRole::Machine,
            #[cfg(feature = "kubevirt")]
            Self::Node(_) => SettingsRole::Node,
            #[cfg(feature = "kubevirt")]
            Self::Controller(_) => SettingsRole::Controller,
        }
    }

    /// Returns the time for the tasks of this role to end.
    fn drain(&self) -> Duration {
        match self {
            #[cfg(feature = "kubevirt")]
            Self::Controller(_) => CONTROLLER_DRAIN,
            _ => DRAIN_DEADLINE,
        }
    }

    /// Returns the name of the host as reported to guests.
    fn host_name(&self) -> String {
        match self {
            Self::Machine => host_name(),
            #[cfg(feature = "kubevirt")]
            Self::Node(node) => node.name.clone(),
            #[cfg(feature = "kubevirt")]
            Self::Controller(controller) => controller.name.clone(),
        }
    }
}

/// Options of the command line.
#[derive(Debug, Clone)]
pub struct Options {
    /// Role of the host half.
    pub role: Role,
    /// Main settings file.
    pub file: PathBuf,
    /// True if the main file has to exist.
    pub required: bool,
    /// True to log what is of interest only while looking for a fault.
    pub verbose: bool,
}

/// Reads and checks the settings, without any other effect.
///
/// # Errors
/// Fails if they are wrong, with file and line.
pub fn check(options: &Options) -> anyhow::Result<HostSettings> {
    Ok(HostSettings::load(&options.file, options.required, options.role.of_settings())?)
}

/// Returns whether an error was caused by wrong settings.
pub fn is_of_settings(error: &anyhow::Error) -> bool {
    error.is::<crate::config::Error>()
}

/// Waits before the exit if systemd is to start the program again: wrong settings stay wrong until somebody
/// corrects them, and `RestartSec=` is short because of crashes.
pub fn pause_under_systemd() {
    if std::env::var_os("NOTIFY_SOCKET").is_some() {
        service::status("The settings are invalid; see the log");
        std::thread::sleep(WRONG_SETTINGS_PAUSE);
    }
}

/// Runs the host half until a signal ends it.
///
/// # Errors
/// Fails if the settings are wrong, the socket cannot be served, or a task ended by itself.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let settings = check(options)?;
    logging::init("guestlet-host", options.verbose, None)?;
    settings.remarks.iter().for_each(|remark| tracing::warn!("{remark}"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let outcome = runtime.block_on(serve(options.clone(), settings));
    runtime.shutdown_timeout(LEFT_BEHIND);
    outcome
}

async fn serve(options: Options, settings: HostSettings) -> anyhow::Result<()> {
    let stop = termination()?;
    let mut supervisor = Supervisor::new();
    let role = options.role.clone();
    let drain = role.drain();
    let begun = Begun::new(options, settings)?;
    let half = Arc::clone(&begun.half);
    match role {
        #[cfg(feature = "kubevirt")]
        Role::Controller(controller) => controller::assemble(&controller, begun, &mut supervisor).await?,
        role => assemble(&role, begun, &mut supervisor).await?,
    }
    tracing::info!("guestlet-host {}", crate::VERSION);
    let stop = async {
        stop.await;
        service::stopping();
    };
    let outcome = supervisor.run(stop, drain).await;
    half.audit.finish();
    outcome
}

/// Parts that every role starts with.
struct Begun {
    /// Socket for guestctl.
    socket: Listener,
    metrics: Vec<scrape::Listener>,
    half: Arc<Half>,
    trust: Arc<Trust>,
    /// Settings as they were read at the start.
    settings: HostSettings,
    reloader: Reloader,
    followed: Followed,
}

impl Begun {
    fn new(options: Options, settings: HostSettings) -> anyhow::Result<Self> {
        let socket = listen(&settings.socket)?;
        let metrics = listen_for_metrics(&settings)?;
        let half = Half::new(options.role.host_name());
        let half = Arc::new(match &settings.audit.file {
            None => half,
            Some(file) => half
                .with_audit_file(file)
                .with_context(|| format!("cannot write audit records to {} (audit.file)", file.display()))?,
        });
        let trust = Arc::new(trust(&settings.trust)?);
        tracing::info!(socket = %settings.socket.display(), "people ask here");
        let (reloader, followed) = Reloader::new(options, settings.clone())?;
        Ok(Self { socket, metrics, half, trust, settings, reloader, followed })
    }
}

/// Starts the host half of a machine or a node, which has sessions with the guests of its VMs.
async fn assemble(role: &Role, begun: Begun, supervisor: &mut Supervisor) -> anyhow::Result<()> {
    let Begun { socket, metrics, half, trust, settings, reloader, followed } = begun;
    let (fleet, changes, handle) = Fleet::new(Arc::clone(&half));
    let parts = parts(role, &followed, &settings, &handle, &half).await?;
    let Parts { kind, topology, standing, for_guests, changed, beside } = parts;
    let is_machine = matches!(role, Role::Machine);
    let backends::Built { backend, disks, volumes, consoles, meters } = kind.build(&half);
    let keeper = Keeper::new(Arc::clone(&volumes), handle.clone(), followed.policies, Arc::clone(&half));
    let keeps_volumes = for_guests.is_none();
    let (volumes_for_guests, cloud_for_guests): (Arc<dyn for_guests::Volumes>, _) = match for_guests {
        Some(ForGuests { volumes, cloud }) => (volumes, Some(cloud)),
        None => (Arc::new(keeper.clone()), None),
    };
    let mut fleet = fleet.with_trust(Arc::clone(&trust)).with_volumes(volumes_for_guests);
    if let Some(cloud) = cloud_for_guests {
        fleet = fleet.with_cloud(cloud);
    }
    if let Some(changed) = changed {
        fleet = fleet.with_changed(changed);
    }
    let shutdown = supervisor.shutdown();
    let mut cloud = None;
    if is_machine {
        let (desk, news) =
            assemble_cloud(supervisor, &half, &handle, followed.cloud, settings.load_balancers);
        fleet = fleet.with_changed(news).with_cloud(Arc::new(desk.clone()));
        cloud = Some(desk);
    }

    spawn_until(supervisor, "fleet", fleet.run(shutdown.clone()));
    let token = shutdown.clone();
    spawn_until(supervisor, "backend", async move {
        token.run_until_cancelled(backend.watch(changes)).await;
    });
    for (name, work) in beside {
        let token = shutdown.clone();
        spawn_until(supervisor, name, async move {
            token.run_until_cancelled(work).await;
        });
    }
    if keeps_volumes {
        spawn_until(supervisor, "volumes", keeper.clone().repair(shutdown.clone()));
    }
    spawn_until(supervisor, "settings", reloader.run(shutdown.clone()));
    let admission = Admission {
        rules: followed.access,
        fleet: handle.clone(),
        volumes: keeper.clone(),
        half: Arc::clone(&half),
    };
    let desks = Desks::default();
    let exporters = Exporters::new(handle.clone(), desks.clone(), Arc::clone(&half), followed.exporters);
    let api = Api {
        admission,
        fleet: handle.clone(),
        disks,
        volumes: keeper,
        trust,
        half: Arc::clone(&half),
        settings: followed.standing,
        topology,
        backend: standing,
        desks,
        consoles: console::Desk::new(consoles, Arc::clone(&half)),
        cloud,
        listed: is_machine.then_some(followed.machines),
    };
    spawn_until(supervisor, "api", api::run(socket, api, shutdown.clone()));
    let subject = scrape::Subject::new(handle.clone(), volumes, Arc::clone(&half), exporters, meters);
    watch_over(supervisor, metrics, handle, &half, &subject);
    Ok(())
}

/// Starts the part that answers guests about their clusters. Returns its handle, and the record through which
/// it learns of changed VMs.
fn assemble_cloud(
    supervisor: &mut Supervisor,
    half: &Arc<Half>,
    fleet: &Handle,
    settings: watch::Receiver<Arc<cloud::settings::Settings>>,
    paths: LoadBalancerSettings,
) -> (cloud::Handle, Arc<Changed>) {
    let changed = Arc::new(Changed::default());
    let (plans, planned) = watch::channel(Numbered::default());
    let (targets, asked) = watch::channel(Vec::new());
    let (candidates, looked_at) = watch::channel(BTreeSet::new());
    let (seen, neighbours) = watch::channel(Arc::default());
    let (forwarder, in_force) = Forwarder::new(paths.nft, planned);
    let (desk, handle) = cloud::Desk::new(cloud::Parts {
        half: Arc::clone(half),
        fleet: fleet.clone(),
        changed: Arc::clone(&changed),
        settings,
        state_dir: paths.state_dir,
        plans,
        in_force,
        targets,
        candidates,
        neighbours,
    });
    let shutdown = supervisor.shutdown();
    spawn_until(supervisor, "load balancers", desk.run(shutdown.clone()));
    let token = shutdown.clone();
    spawn_until(supervisor, "forwarding", async move {
        token.run_until_cancelled(forwarder.run()).await;
    });
    let (token, looking) = (shutdown.clone(), cloud::neighbours::run(looked_at, seen));
    spawn_until(supervisor, "neighbours", async move {
        token.run_until_cancelled(looking).await;
    });
    let asking = cloud::endpoints::run(asked, handle.clone());
    spawn_until(supervisor, "endpoints", async move {
        shutdown.run_until_cancelled(asking).await;
    });
    (handle, changed)
}

/// Starts a task whose end is not a failure.
fn spawn_until(
    supervisor: &mut Supervisor,
    name: &'static str,
    work: impl Future<Output = ()> + Send + 'static,
) {
    supervisor.spawn(name, async move {
        work.await;
        Ok(())
    });
}

/// Work of a task.
type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Parts that depend on the role.
struct Parts {
    kind: backends::Kind,
    /// Topology of this host.
    topology: watch::Receiver<Arc<Topology>>,
    standing: backends::Standing,
    /// Answers the guests' calls about volumes and their clusters, if this host half does not do so itself.
    for_guests: Option<ForGuests>,
    /// Receives which VMs have changed.
    changed: Option<Arc<Changed>>,
    /// Further tasks, with their names.
    beside: Vec<(&'static str, Work)>,
}

/// Parts that answer the calls of guests.
struct ForGuests {
    volumes: Arc<dyn for_guests::Volumes>,
    cloud: Arc<dyn for_guests::Cloud>,
}

#[allow(
    clippy::unused_async,
    unused_variables,
    reason = "not every build has a role that asks for something"
)]
async fn parts(
    role: &Role,
    followed: &Followed,
    settings: &HostSettings,
    fleet: &Handle,
    half: &Arc<Half>,
) -> anyhow::Result<Parts> {
    match role {
        Role::Machine => {
            let (machines, pools) = (followed.machines.clone(), followed.pools.clone());
            let topology = followed.topology.clone();
            let (volumes, state) = (settings.volumes.clone(), settings.trust.folder.clone());
            let kind = backends::Kind::Qemu { machines, topology: topology.clone(), volumes, pools, state };
            let standing = backends::Standing::default();
            Ok(Parts { kind, topology, standing, for_guests: None, changed: None, beside: Vec::new() })
        }
        #[cfg(feature = "kubevirt")]
        Role::Node(node) => {
            let node = node::Node::new(node, followed.node.clone()).await?;
            let (beside, relay) = node.beside(fleet, half);
            let node::Node { kind, topology, standing, changed, .. } = node;
            let relay = Arc::new(relay);
            let for_guests = Some(ForGuests { volumes: Arc::clone(&relay) as _, cloud: relay });
            let changed = Some(changed);
            Ok(Parts { kind, topology, standing, for_guests, changed, beside })
        }
        #[cfg(feature = "kubevirt")]
        Role::Controller(_) => anyhow::bail!("a controller has no sessions"),
    }
}

/// Reports at intervals which audit records were left out or lost.
async fn settle(half: Arc<Half>, shutdown: CancellationToken) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(AUDIT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
        half.metrics.lost_records.fetch_add(half.audit.settle(), Ordering::Relaxed);
    }
    Ok(())
}

/// Opens the keys of guests and of this host half.
fn trust(settings: &TrustSettings) -> anyhow::Result<Trust> {
    let folder = &settings.folder;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make the directory {}", folder.display()))?;
    let key = settings.key.clone().unwrap_or_else(|| folder.join("host.key"));
    let files = trust::host::Files { key, certificate: settings.certificate.clone() };
    let identity =
        trust::host::Identity::load(files).context("this host half cannot prove its identity to guests")?;
    tracing::info!(key = %identity.shown().key.fingerprint(), "this host half's key");
    Ok(Trust::new(identity, Pins::open(folder.join("guests"))?))
}

/// Binds the socket, and creates its directory if necessary.
fn listen(path: &Path) -> anyhow::Result<Listener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the directory {}", folder.display()))?;
    }
    Listener::bind(path).map_err(|error| match error {
        unix::Error::InUse(path) => anyhow::anyhow!(
            "another guestlet-host already serves {}; stop it first, or set another socket",
            path.display()
        ),
        error => error.into(),
    })
}

/// Notifies systemd that the fleet answers, and of the number of sessions.
async fn notify(fleet: Handle, shutdown: CancellationToken) -> anyhow::Result<()> {
    let watchdog = sd_notify::watchdog_enabled();
    let interval = watchdog.map_or(STATUS_INTERVAL, |watchdog| STATUS_INTERVAL.min(watchdog / 2));
    let mut ticks = tokio::time::interval(interval.max(Duration::from_millis(100)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told = None;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
        }
        // The fleet may have ended already when a shutdown has just begun.
        let Ok(tally) = fleet.tally().await else {
            shutdown.cancelled().await;
            return Ok(());
        };
        let mut status = format!("{} of {} VMs connected", tally.connected, tally.vms);
        if tally.no_vsock > 0 {
            status = format!("{status}, {} without vsock", tally.no_vsock);
        }
        match told.replace(tally) {
            None => service::ready(&status),
            Some(before) if before != tally => service::status(&status),
            Some(_) => {}
        }
        service::alive();
    }
}
