//! Builds the parts, leads while this replica may, and exits when it may no longer.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ccm::events::Recorder;
use crate::ccm::health::Health;
use crate::ccm::host::Host;
use crate::ccm::instance::Instances;
use crate::ccm::nodes::{self, Nodes};
use crate::ccm::services::Services;
use crate::ccm::services::wanted::Defaults;
use crate::ccm::watching::{self, Balancers};
use crate::kubernetes::connect;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::lease::{Candidate, Notice, Place, Timing};
use crate::kubernetes::standing::{Problems, Teller};
use crate::supervise::{Supervisor, termination};
use crate::sys::{logging, tcp};

/// Lease of the leading cloud controller manager. The usual name ensures that only one of two different ones
/// is active.
const LEASE: &str = "cloud-controller-manager";
/// Time that the parts have to end.
const DRAIN: Duration = Duration::from_secs(8);
/// Timeout for the release of the Lease.
const RELEASE: Duration = Duration::from_secs(3);

/// Options of the command line.
#[derive(Debug, Clone)]
pub struct Options {
    /// Configuration for access to the API server; in a pod its service account is used.
    pub kubeconfig: Option<PathBuf>,
    /// Name of this replica.
    pub name: String,
    /// Namespace of the Lease.
    pub namespace: String,
    /// Socket of this node's agent.
    pub socket: PathBuf,
    /// Durations of the Lease.
    pub timing: Timing,
    /// Address on which kubelet's probes are answered.
    pub health: SocketAddr,
    /// Settings for Nodes.
    pub nodes: nodes::Settings,
    /// Settings for Services.
    pub services: Defaults,
    /// True to log more.
    pub verbose: bool,
}

/// Runs until a signal ends it.
///
/// # Errors
/// Fails if it cannot start, or no longer leads.
pub fn run(options: Options) -> anyhow::Result<()> {
    logging::init("guestlet-ccm", options.verbose, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(serve(options))
}

async fn serve(options: Options) -> anyhow::Result<()> {
    let stop = termination()?;
    let config =
        connect::config(options.kubeconfig.as_deref()).await.context("cannot access the Kubernetes API")?;
    tracing::info!(
        server = %config.cluster_url,
        agent = %options.socket.display(),
        "guestlet-ccm {}: waiting to become the leader",
        crate::VERSION
    );
    let client = Client::try_from(config).context("cannot access the Kubernetes API")?;
    let at = options.health;
    let listener = tcp::listen(at).with_context(|| format!("cannot answer probes at {at} (--health)"))?;
    tracing::info!(address = %listener.local_addr()?, "serving probes");
    let mut supervisor = Supervisor::new();
    let shutdown = supervisor.shutdown();
    let problems = watch::Sender::new(Problems::new());
    let health = Health::new(problems.subscribe());
    let (probed, stopping) = (health.clone(), shutdown.clone());
    supervisor.spawn("health", async move {
        stopping.run_until_cancelled(probed.serve(listener)).await;
        Ok(())
    });
    supervisor.spawn("controllers", lead(client, options, problems, health, shutdown));
    supervisor.run(stop, DRAIN).await
}

/// Leads as soon as possible, until `shutdown`.
async fn lead(
    client: Client,
    options: Options,
    problems: watch::Sender<Problems>,
    health: Health,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let teller = |what| Teller::new(what, problems.clone(), Arc::new(|| ()));
    let place = Place { namespace: options.namespace.clone(), name: LEASE };
    let trouble = teller("the Lease of the cloud controller managers cannot be read or written");
    let candidate = Candidate::new(client.clone(), &place, &options.name, options.timing, trouble);
    let Some(mut leading) = shutdown.run_until_cancelled(candidate.lead(Notice::default())).await else {
        return Ok(());
    };
    let fence = Fence::default();
    let (instances, balancers) =
        (watch::Sender::new(Instances::default()), watch::Sender::new(Balancers::default()));
    let members = watch::Sender::new(None);
    let host = Host::new(options.socket);
    let recorder = Arc::new(Recorder::new(client.clone()));
    let nodes = Nodes {
        client: client.clone(),
        host: host.clone(),
        settings: options.nodes,
        instances: instances.subscribe(),
        balancers: balancers.subscribe(),
        members: members.clone(),
        fence: fence.clone(),
        recorder: Arc::clone(&recorder),
        pulse: health.pulse("Nodes"),
        teller: teller("the Nodes cannot be read; what is known of them may be stale"),
    };
    let services = Services {
        client,
        host: host.clone(),
        defaults: options.services,
        instances: instances.subscribe(),
        balancers: balancers.subscribe(),
        members: members.subscribe(),
        fence: fence.clone(),
        recorder,
        pulse: health.pulse("Services"),
        teller: teller("the Services cannot be read; what is known of them may be stale"),
    };
    let of_instances =
        teller("the host half does not report the VMs of this cluster; what is known of them may be stale");
    let of_balancers =
        teller("the host half does not report load balancers; what is known of them may be stale");
    let told = |until| {
        fence.extend(until);
        health.leads_until(until);
    };
    let outcome = tokio::select! {
        biased;
        why = leading.lost(told) => {
            fence.shut();
            Err(anyhow::anyhow!("this replica is no longer the leader: {why}"))
        }
        () = shutdown.cancelled() => Ok(()),
        _ = async {
            tokio::join!(
                watching::instances(host.clone(), instances, of_instances),
                watching::balancers(host.clone(), balancers, of_balancers),
                nodes.run(),
                services.run(),
            )
        } => Ok(()),
    };
    if outcome.is_ok() {
        fence.close().await;
        // Without the release, the next leader has to wait until the Lease has expired.
        drop(tokio::time::timeout(RELEASE, leading.release()).await);
    }
    outcome
}
