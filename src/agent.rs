//! The agent: builds all parts from the settings, starts them, and drains them at the end.

mod channels;
mod clients;
mod csi;
mod disk_rules;
pub mod keys;
pub mod receipts;
mod services;
pub mod topology;
mod words;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio_util::sync::CancellationToken;

use crate::cloud;
use crate::config::agent::{AgentSettings, ApplicationSetting, ApplicationSettings};
use crate::copies::records::Records;
use crate::guest::events::TICK;
use crate::guest::freeze::applications::{Commands, Listed};
use crate::guest::{Guest, exec, freeze, identity, monitor, probes};
use crate::labels;
use crate::pace::Complaints;
use crate::policy::Audit;
use crate::policy::audit::Refusal;
use crate::qga;
use crate::qga::owners::Owners;
use crate::qga::policy::Policy;
use crate::qga::room::Room;
use crate::rpc::guard::Gate;
use crate::rpc::holder::Holder;
use crate::rpc::introduced::Introduced;
use crate::rpc::{callback, guest, health_checks, health_reports, local};
use crate::supervise::{Supervisor, termination};
use crate::sys::root::Root;
use crate::sys::ticker::Ticker;
use crate::sys::{activation, descriptor, error_chain, memory, service};
use crate::transport::http2::{self, Bounds};
use crate::transport::listen::{Incoming, Listener};
use crate::transport::{BoxStream, unix};
use crate::trust::guest::{Greeted, Refused, greet};
use crate::trust::keyring::Keyring;
use crate::wire::proto::v1::{AgentStarted, AgentStopping, WhoAmIResponse};
use channels::{Passed, Qga};
use services::Services;

/// Time in which all parts of the agent have to end.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs the agent until a signal ends it. `sockets` come from the service manager; `ready` is called once
/// everything is built.
///
/// # Errors
/// If a part cannot be built, or ends by itself.
#[allow(clippy::too_many_lines, reason = "each part is built in one place, in the order that counts")]
pub async fn run(
    settings: AgentSettings,
    sockets: Vec<activation::Passed>,
    ready: impl FnOnce() -> std::io::Result<()>,
) -> anyhow::Result<()> {
    memory::keep_freed();
    memory::keep_code();
    descriptor::keep_from_programs();
    descriptor::allow_many();
    let run_id = Root::default().line("/proc/sys/kernel/random/uuid");
    let guest = Guest { freezer: freezer(&settings), ..Guest::this_machine(run_id) };
    guest.processes.wait_for_outputs(settings.limits.output_deadline);
    guest.programs.keep(settings.program_ring);
    guest.forwards.allow(settings.forwards);
    let mut supervisor = Supervisor::new();
    let shutdown = supervisor.shutdown();
    let termination = termination()?;
    for remark in &settings.remarks {
        tracing::warn!("{remark}");
    }

    let audit = audit(&settings)?;
    // Everything that can fail comes before the first task runs, which is at the first `await`. Clients may connect to
    // the listeners from here on, but no connection is accepted before the start has succeeded.
    let context = Arc::new(qga::Context {
        guest: guest.clone(),
        policy: policy(&settings)?,
        audit: audit.clone(),
        complaints: Complaints::default(),
        room: Room::default(),
        owners: Owners::default(),
        stopping: shutdown.clone(),
        version: settings.version.clone().unwrap_or_else(|| qga::PROTOCOL_VERSION.to_owned()),
    });
    let mut passed = Passed::new(sockets);
    let (control, control_words) = channels::api(settings.control, settings.vsock_peer, &mut passed)?;
    let (qga, qga_words) = Qga::build(settings.qga, settings.retry_path, settings.vsock_peer, &mut passed)?;
    passed.finish();
    let status = format!("QGA: {qga_words}; control: {}", *control_words.borrow());
    let mut api = None;
    let fullness = monitor::fullness::Settings {
        interval: settings.file_systems.interval,
        full_percent: settings.file_systems.full_percent,
    };
    let mut kubelet_knows_host = false;
    if settings.local {
        let channels = local::Channels { qga: qga_words, control: control_words };
        let folder = settings.runtime_folder;
        guest.releases.keep_in(&folder);
        disk_rules::start(settings.disk_rules, &folder, &guest, &mut supervisor);
        let holder = Holder::default();
        let has_node = !settings.topology.no_node_labels;
        kubelet_knows_host = settings.csi.topology.iter().any(|key| key == labels::HOST);
        let teller = csi::start(settings.csi, has_node, &folder, &guest, holder.clone(), &mut supervisor);
        serve_cloud(settings.cloud_socket, holder.clone(), &mut supervisor);
        let people = people(&guest, &folder)?;
        let plain = !settings.rules.plain.is_empty();
        let records = copies(&settings.trust.state_folder, &mut supervisor);
        let keyring = keys::keyring(settings.trust, plain, &guest);
        receipts::sign_with(&guest.freezer, &keyring);
        let gate = Gate::new(settings.rules, audit.clone(), keyring.is_keyed(), guest.freezer.clone());
        let (audit, context) = (audit.clone(), Arc::clone(&context));
        let copies = (records, audit, context);
        let told = (people, channels, folder);
        api = Some(Api::new((control, keyring), told, (holder, teller), gate, copies));
    }
    let ticker = Ticker::new(TICK)?;
    exec::Programs::end_left_over(&guest.root);
    // Must come before `ready`: file systems that an earlier run has left frozen must not be written to, and clients
    // must see that they are frozen.
    freeze::begin(&guest).context("cannot check for file systems that an earlier run left frozen")?;
    ready().context("cannot detach from the terminal")?;

    supervisor.spawn("qga", qga.run(context, shutdown.clone()));
    let keyring = api.as_ref().map(|api: &Api| api.keyring.clone());
    if let Some(api) = api {
        let folder = api.folder.clone();
        api.start(&guest, fullness, &mut supervisor);
        topology::start(settings.topology, kubelet_knows_host, &folder, &guest, &mut supervisor).await;
    }
    let processes = Arc::clone(&guest.processes);
    let ending = shutdown.clone();
    supervisor.spawn("processes", async move {
        let _ = ending.run_until_cancelled(processes.care()).await;
        Ok(())
    });
    let programs = Arc::clone(&guest.programs);
    let ending = shutdown.clone();
    supervisor.spawn("programs", async move {
        if ending.run_until_cancelled(programs.care()).await.is_none() {
            programs.end_all();
        }
        Ok(())
    });
    supervisor.spawn("tick", tick(guest.clone(), audit, keyring, ticker, shutdown));

    tracing::info!("guestlet {} started: {status}", crate::VERSION);
    service::ready(&status);
    let stop = async {
        termination.await;
        if !matches!(guest.freezer.status(), freeze::Status::Thawed { .. }) {
            tracing::info!("stopping after the thaw: {}", guest.freezer.held());
            service::extend_stop(guest.freezer.longest());
        }
        guest.freezer.stop().await;
        receipts::finish(&guest.freezer).await;
        service::stopping();
        guest.events.tell(AgentStopping {});
    };
    supervisor.run(stop, DRAIN).await
}

/// Builds the freezer of this guest's file systems.
fn freezer(settings: &AgentSettings) -> freeze::Freezer {
    freeze::Freezer::new(freeze::Settings {
        hook: settings.fsfreeze_hook.clone(),
        hook_deadline: settings.limits.hook_deadline,
        deadline: settings.limits.freeze_deadline,
        hooks_deadline: settings.limits.hooks_deadline,
        folder: settings.state_folder.clone(),
        receipts: Some(settings.receipts.clone()),
        applications: applications(&settings.applications),
        guarded: true,
    })
}

/// Converts the settings of the applications that take part in freezes.
fn applications(settings: &ApplicationSettings) -> freeze::applications::Settings {
    let listed = settings.listed.iter().cloned().map(|one| match one {
        ApplicationSetting::Kind { kind, target, user } => Listed::Kind { kind, target, user },
        ApplicationSetting::Commands { name, user, freeze, thaw, data } => {
            Listed::Commands(Commands { name, user, freeze, thaw, data })
        }
    });
    let (deadline, required) = (settings.deadline, settings.required);
    freeze::applications::Settings { auto: settings.auto, listed: listed.collect(), deadline, required }
}

/// Opens the records of interrupted copies, and starts the task that removes them after a day, with their leftover
/// files.
fn copies(state: &Path, supervisor: &mut Supervisor) -> Records {
    let records = Records::at(state.join("copies"));
    let (cared_for, shutdown) = (records.clone(), supervisor.shutdown());
    supervisor.spawn("copies", async move {
        let _ = shutdown.run_until_cancelled(cared_for.care()).await;
        Ok(())
    });
    records
}

/// Starts serving the cloud controller manager of the guest's cluster, over the callback of `holder`.
fn serve_cloud(socket: Option<PathBuf>, holder: Holder, supervisor: &mut Supervisor) {
    let Some(socket) = socket else { return };
    let shutdown = supervisor.shutdown();
    let work = cloud::run(socket, Arc::new(move || holder.caller()), shutdown.clone());
    supervisor.spawn("cloud", async move {
        // The agent continues: clients on other channels are still served.
        if let Err(error) = work.await {
            tracing::error!("guestlet-ccm is no longer served: {error}");
        }
        shutdown.cancelled().await;
        Ok(())
    });
}

/// Creates the socket in the runtime directory for people in the guest. Also marks there that the agent has run
/// since the boot, and sends the first event, which says whether it had.
fn people(guest: &Guest, folder: &Path) -> anyhow::Result<Listener> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot use the directory {}", folder.display()))?;
    let people = Listener::Unix(unix::Listener::bind(&folder.join(LOCAL_SOCKET))?);
    let first_since_boot = identity::first_run(&guest.root, folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    guest.events.tell(AgentStarted { first_since_boot });
    Ok(people)
}

/// Capabilities of this agent, as reported by the guestlet API.
const CAPABILITIES: [&str; 12] = [
    "events",
    "qga",
    "disks",
    "topology",
    "callback",
    "health-checks",
    "machine",
    "exec",
    "login",
    "files",
    "forward",
    "metrics",
];

/// Parts that serve the host half and people in the guest.
struct Api {
    control: Listener,
    keyring: Keyring,
    people: Listener,
    channels: local::Channels,
    folder: PathBuf,
    holder: Holder,
    teller: csi::Teller,
    gate: Gate,
    audit: Audit,
    /// Records of interrupted copies.
    records: Records,
    /// Context of the QGA commands that a host half sends.
    context: Arc<qga::Context>,
}

impl Api {
    fn new(
        (control, keyring): (Listener, Keyring),
        (people, channels, folder): (Listener, local::Channels, PathBuf),
        (holder, teller): (Holder, csi::Teller),
        gate: Gate,
        (records, audit, context): (Records, Audit, Arc<qga::Context>),
    ) -> Self {
        Self { control, keyring, people, channels, folder, holder, teller, gate, audit, records, context }
    }

    fn start(self, guest: &Guest, fullness: monitor::fullness::Settings, supervisor: &mut Supervisor) {
        let shutdown = supervisor.shutdown();
        let (folder, holder) = (self.folder, self.holder);
        let capabilities = CAPABILITIES.map(str::to_owned).to_vec();
        let news = News { folder: folder.into(), freezer: guest.freezer.clone(), teller: self.teller };
        let surroundings = callback::Surroundings {
            // The number of possible volumes depends on the attached disks.
            changes: guest.disks.changes(),
            known: Arc::new(move |identity| news.tell(identity)),
        };
        let keys = keys::of_the_api(&self.keyring, guest);
        let api =
            guest::Service::new(guest.clone(), capabilities, holder.clone(), surroundings, keys.clone());
        let people = local::Service::new(
            guest.clone(),
            api.clone(),
            holder.clone(),
            self.channels,
            keys,
            self.records.clone(),
        );
        let checks = check_health(guest, holder, supervisor);
        let services =
            services::all(guest, self.context, checks, api, &self.gate, self.records, shutdown.clone());

        keys::follow(&self.keyring, supervisor);
        let door = Door {
            gate: self.gate,
            audit: self.audit,
            keyring: self.keyring,
            complaints: Arc::default(),
            shutdown: shutdown.clone(),
        };
        let ending = shutdown.clone();
        let control = self.control;
        supervisor.spawn("control", async move {
            let complaints = door.complaints.clone();
            let doorkeeper = door.clone();
            let greet = move |name, incoming| doorkeeper.clone().greet(name, incoming);
            let serve = move |name, greeted| door.clone().serve(name, greeted, services.clone());
            clients::run_doubting(control, ending, &complaints, greet, serve).await
        });
        let ending = shutdown.clone();
        let serve_people =
            move |peer, stream| serve(peer, stream, people.clone().into_server(), ending.clone());
        supervisor.spawn("local", clients::run(self.people, shutdown.clone(), serve_people));
        let settings = monitor::Settings { fullness, ..monitor::Settings::default() };
        for (name, work) in monitor::all(guest, settings, &shutdown) {
            supervisor.spawn(name, async move {
                work.await;
                Ok(())
            });
        }
    }
}

/// Starts the task that makes the health checks for the host half and reports their results.
fn check_health(guest: &Guest, holder: Holder, supervisor: &mut Supervisor) -> health_checks::Service {
    let (checks, prober) = probes::probes(Arc::clone(&guest.topology));
    let reports = health_reports::report(holder.clone(), checks.standing());
    let shutdown = supervisor.shutdown();
    supervisor.spawn("health checks", async move {
        let work = async { tokio::join!(prober.run(), reports) };
        let _ = shutdown.run_until_cancelled(work).await;
        shutdown.cancelled().await;
        Ok(())
    });
    health_checks::Service::new(checks, holder)
}

/// Entrance for host halves: authenticates and serves them.
#[derive(Clone)]
struct Door {
    gate: Gate,
    audit: Audit,
    keyring: Keyring,
    complaints: Arc<Complaints>,
    shutdown: CancellationToken,
}

impl Door {
    /// Authenticates the peer; returns `None` if it is refused.
    async fn greet(self, name: String, incoming: Incoming) -> Option<Greeted> {
        let standing = self.keyring.standing().await;
        match greet(incoming, standing).await {
            Ok(greeted) => return Some(greeted),
            // A host half tries with keys first, and then without.
            Err(Refused::NoKeys) => tracing::debug!("{name}: the peer uses no keys"),
            Err(Refused::Gone) => tracing::debug!("{name}: gone"),
            Err(refused) => self.audit.refused(&Refusal {
                peer: &name,
                host: &refused.shown(),
                kind: refused.kind(),
                why: &error_chain::words(&refused),
            }),
        }
        None
    }

    /// Serves the peer until it disconnects, or its key is no longer accepted.
    async fn serve(self, name: String, greeted: Greeted, services: Services) {
        let Greeted { stream, peer, binding } = greeted;
        let peer = Arc::new(peer);
        let service = self.gate.before(services);
        let service = Introduced::new(service, Arc::clone(&peer), binding);
        let served = serve(name.clone(), stream, service, self.shutdown);
        tokio::select! {
            () = served => {}
            loss = self.keyring.lost(&peer) => tracing::warn!("{name} is disconnected: {loss}"),
        }
    }
}

/// File name of the socket for people in the guest, in the runtime directory.
pub const LOCAL_SOCKET: &str = "agent.sock";

fn policy(settings: &AgentSettings) -> anyhow::Result<Policy> {
    let policy = Policy::new(settings.rules.clone());
    let unknown = policy.unknown();
    for name in &unknown {
        tracing::warn!("the command {name:?} of the block or allow list is not known");
    }
    if settings
        .allow
        .as_ref()
        .is_some_and(|allow| !allow.is_empty() && allow.iter().all(|name| unknown.contains(&name.as_str())))
    {
        bail!("allow-rpcs lists no known command, so nothing would be allowed; see guestlet -a help");
    }
    Ok(policy)
}

fn audit(settings: &AgentSettings) -> anyhow::Result<Audit> {
    let (mode, file) = (settings.rules.mode, settings.audit_file.as_deref());
    Audit::start(mode, file).with_context(|| {
        let file = file.unwrap_or(Path::new(""));
        format!("cannot open the file for audit records {}", file.display())
    })
}

/// Drives the ticks of the agent, its only periodic wakeup.
async fn tick(
    guest: Guest,
    audit: Audit,
    keyring: Option<Keyring>,
    ticker: Ticker,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    while let Some(tick) = shutdown.run_until_cancelled(ticker.tick()).await {
        tick?;
        service::alive();
        guest.events.tick();
        receipts::tick(&guest.freezer);
        audit.tick();
        if let Some(keyring) = &keyring {
            keyring.tick().await;
        }
    }
    audit.tick();
    Ok(())
}

async fn serve<S>(peer: String, stream: BoxStream, service: S, shutdown: CancellationToken)
where
    S: http2::Service,
{
    tracing::debug!("{peer}: connected");
    match http2::serve_within(stream, service, shutdown, Bounds::WIDE).await {
        Ok(()) => tracing::debug!("{peer}: closed"),
        Err(error) => tracing::debug!("{peer}: {error}"),
    }
}

/// Recipients of the identity that the host half reports for this guest.
#[derive(Clone)]
struct News {
    folder: Arc<Path>,
    freezer: freeze::Freezer,
    teller: csi::Teller,
}

impl News {
    fn tell(&self, identity: &WhoAmIResponse) {
        self.teller.tell(identity);
        let (identity, folder) = (identity.clone(), Arc::clone(&self.folder));
        self.freezer.unfrozen(move || {
            if let Err(error) = local::remember(&identity, &folder) {
                tracing::warn!("cannot write to {}: {error}", folder.display());
            }
        });
    }
}
