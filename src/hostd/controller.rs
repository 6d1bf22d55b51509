//! Parts of the controller role.
//!
//! ```text
//!  VMs of the cluster ──▶ Remote ◀── Keeper ──▶ Claims          on each replica: these only read
//!            └──────────▶ Registry   api                        and report
//!  Lease ──leads──▶ repair, nodes                               on the leader only: these make changes
//! ```

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{Begun, spawn_until, watch_over};
use crate::host::admission::Admission;
use crate::host::api::{self, Api};
use crate::host::backends::kubevirt::api::Cluster;
use crate::host::backends::kubevirt::controller::certificates::{Ca, CaError};
use crate::host::backends::kubevirt::controller::lease::{self, Candidate, Notice, Timing};
use crate::host::backends::kubevirt::controller::listing::Listing;
use crate::host::backends::kubevirt::controller::{Options, Roster, Site};
use crate::host::backends::kubevirt::hotplug::Patience;
use crate::host::backends::kubevirt::node::elsewhere::Elsewhere;
use crate::host::backends::kubevirt::snapshots::Snapshots;
use crate::host::backends::kubevirt::standing;
use crate::host::backends::kubevirt::volumes::Claims;
use crate::host::backends::volumes::Volumes;
use crate::host::backends::{Backend as _, Problems, Standing, meters};
use crate::host::cloud;
use crate::host::cloud::remote::{self, Registry};
use crate::host::controller::{self, Asked, Joining, Nodes, Server};
use crate::host::exporters::Exporters;
use crate::host::fleet::{Handle, Remote};
use crate::host::half::Half;
use crate::host::machine::Desks;
use crate::host::place::Topology;
use crate::host::text;
use crate::host::volumes::Keeper;
use crate::host::{console, scrape};
use crate::kubernetes::connect;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::standing::Teller;
use crate::supervise::{self, Supervisor};
use crate::sys::{descriptor, tcp};

/// Pause before the CA is requested again.
const AGAIN: Duration = Duration::from_secs(2);
/// Facts about VMs that may wait to be passed to clusters.
const FACTS: usize = 256;
/// Timeout for the release of the Lease.
const RELEASE: Duration = Duration::from_secs(3);

/// Cluster of a controller, and the address at which nodes reach this replica.
#[derive(Debug, Clone)]
pub struct ControllerOptions {
    /// Configuration with the API server and credentials; without one, the service account of a pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of guestlet's own objects.
    pub namespace: String,
    /// Name of this replica: that of its pod.
    pub name: String,
    /// Address of this replica, for nodes.
    pub address: IpAddr,
}

/// Returns what is reported to Prometheus: the controller itself, because its VMs are reported by the nodes.
fn subject(fleet: &Handle, volumes: &Arc<dyn Volumes>, half: &Arc<Half>) -> scrape::Subject {
    let exporters = Exporters::none(fleet, half);
    let meters = Arc::new(meters::Unasked);
    scrape::Subject::new(fleet.clone(), Arc::clone(volumes), Arc::clone(half), exporters, meters)
}

/// Starts the parts of a replica.
pub(super) async fn assemble(
    options: &ControllerOptions,
    begun: Begun,
    supervisor: &mut Supervisor,
) -> anyhow::Result<()> {
    let Begun { socket, metrics, half, trust, settings, reloader, followed } = begun;
    let config =
        connect::config(options.kubeconfig.as_deref()).await.context("cannot access the Kubernetes API")?;
    let client = kube::Client::try_from(config.clone()).context("cannot access the Kubernetes API")?;
    descriptor::allow_many();
    let listen = settings.kubevirt.controller;
    let listener = tcp::listen(listen)
        .with_context(|| format!("cannot serve nodes at {listen} (kubevirt.controller)"))?;
    let address = SocketAddr::new(options.address, listener.local_addr()?.port());
    tracing::info!(%address, server = %config.cluster_url, "a controller of the VMs of a cluster");
    let (problems, told) = watch::channel(Problems::new());
    let nodes = Nodes::default();
    let (vms, changes, fleet) = Remote::new(Arc::new(nodes.clone()));
    let listing = Listing::default();
    let (heard, facts) = mpsc::channel(FACTS);
    let site = Site {
        cluster: config,
        options: followed.controller.clone(),
        problems: problems.clone(),
        listing: listing.clone(),
        heard: Some(heard),
    };
    let roster = Box::new(Roster::new(site, Arc::clone(&half)));

    let shutdown = supervisor.shutdown();
    spawn_until(supervisor, "fleet", vms.run(shutdown.clone()));
    let token = shutdown.clone();
    spawn_until(supervisor, "backend", async move {
        token.run_until_cancelled(roster.watch(changes)).await;
    });
    spawn_until(supervisor, "settings", reloader.run(shutdown.clone()));
    let fence = Fence::default();
    let cluster = Cluster::new(client.clone(), problems.clone(), Arc::clone(&half)).behind(fence.clone());
    let of_clusters = remote::Parts {
        half: Arc::clone(&half),
        cluster: cluster.clone(),
        settings: followed.cloud,
        options: followed.controller.clone(),
        facts,
        fleet: fleet.clone(),
    };
    let cloud = tell_clusters(supervisor, of_clusters);
    let teller = |what| standing::teller(what, problems.clone(), Arc::clone(&half));
    let candidate = lease::candidate(
        client.clone(),
        &options.namespace,
        &options.name,
        Timing::default(),
        teller(lease::TROUBLE),
    );
    let replica = Replica {
        candidate,
        teller: teller("the CA of the controllers cannot be read or created; nodes cannot join"),
        namespace: options.namespace.clone(),
        address,
        listener,
        nodes,
        half: Arc::clone(&half),
        options: followed.controller.clone(),
        cluster: cluster.clone(),
        cloud: cloud.clone(),
    };
    let access_mode = settings.kubevirt.access_mode.name().to_owned();
    let claims = Arc::new(Claims::begin(cluster, Patience::default(), access_mode).with_listing(listing));
    let volumes: Arc<dyn Volumes> = Arc::clone(&claims) as _;
    watch_over(supervisor, metrics, fleet.clone(), &half, &subject(&fleet, &volumes, &half));
    supervisor.spawn("controller", async move {
        let keeper = Keeper::new(volumes, fleet.clone(), followed.policies, Arc::clone(&half));
        let rules = followed.access;
        let admission =
            Admission { rules, fleet: fleet.clone(), volumes: keeper.clone(), half: Arc::clone(&half) };
        let api = Api {
            admission,
            fleet,
            disks: Arc::new(Elsewhere),
            volumes: keeper.clone(),
            trust,
            consoles: console::Desk::new(Arc::new(Elsewhere), Arc::clone(&half)),
            half,
            settings: followed.standing,
            // The controller has no place of its own; its VMs have.
            topology: watch::channel(Arc::new(Topology::default())).1,
            backend: Standing { problems: told, ..Standing::default() },
            desks: Desks::default(),
            cloud: Some(cloud),
            listed: None,
        };
        let lead = async {
            // Requests of people are answered meanwhile, as far as possible.
            match shutdown.run_until_cancelled(claims.read_all()).await {
                None => Ok(()),
                Some(()) => replica.lead(keeper, &fence, shutdown.clone()).await,
            }
        };
        let mut lead = std::pin::pin!(lead);
        tokio::select! {
            outcome = &mut lead => outcome,
            () = api::run(socket, api, shutdown.clone()) => lead.await,
        }
    });
    Ok(())
}

/// Starts the registry, which answers guests about their clusters, on a thread of its own.
fn tell_clusters(supervisor: &mut Supervisor, parts: remote::Parts) -> cloud::Handle {
    let (registry, handle) = Registry::new(parts);
    let shutdown = supervisor.shutdown();
    spawn_until(supervisor, "clusters", async move {
        supervise::apart("clusters", move || registry.run(shutdown)).await;
    });
    handle
}

/// Replica of the controller; one of them leads.
struct Replica {
    candidate: Candidate,
    /// Receives the reason why the replica cannot start.
    teller: Teller,
    cluster: Cluster,
    namespace: String,
    /// Address at which nodes reach the replica.
    address: SocketAddr,
    listener: TcpListener,
    nodes: Nodes,
    half: Arc<Half>,
    options: watch::Receiver<Options>,
    /// Handle of the registry, which answers guests about their clusters.
    cloud: cloud::Handle,
}

impl Replica {
    /// Returns the CA of the controllers, once the API server is reachable.
    async fn authority(&self) -> Result<Ca, CaError> {
        loop {
            match Ca::load_or_make(&self.cluster.client(), &self.namespace).await {
                Err(error @ CaError::Unavailable(..)) => {
                    self.teller.failed(&text::chain(&error));
                    tokio::time::sleep(AGAIN).await;
                }
                outcome => {
                    self.teller.well();
                    return outcome;
                }
            }
        }
    }

    /// Leads as soon as possible, until `shutdown`.
    ///
    /// # Errors
    /// Fails if this replica may no longer lead, so that the next leader is the only one.
    async fn lead(self, keeper: Keeper, fence: &Fence, shutdown: CancellationToken) -> anyhow::Result<()> {
        let beginning = async {
            let ca = Arc::new(self.authority().await?);
            let notice = Notice { address: self.address.to_string(), authority_pem: ca.pem().to_owned() };
            let tls = ca.server_config()?;
            anyhow::Ok((ca, tls, self.candidate.lead(notice).await))
        };
        let Some(begun) = shutdown.run_until_cancelled(beginning).await else { return Ok(()) };
        let (ca, tls, mut leading) = begun?;
        let joining = Joining { ca, tls, client: self.cluster.client(), namespace: self.namespace };
        let asked = Asked {
            client: self.cluster.client(),
            volumes: Arc::new(keeper.clone()),
            cloud: Arc::new(self.cloud),
            snapshots: Snapshots::new(self.cluster),
            half: self.half,
            options: self.options,
        };
        let server = Server { joining, asked, nodes: self.nodes };
        let outcome = tokio::select! {
            biased;
            why = leading.lost(|until| fence.extend(until)) => {
                fence.shut();
                Err(anyhow::anyhow!("this replica is no longer the leader: {why}"))
            }
            _ = async {
                tokio::join!(
                    controller::serve(self.listener, server, shutdown.clone()),
                    keeper.repair(shutdown.clone()),
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
}
