//! A model of the agent's socket and the host half behind it: what guestlet-ccm is answered, as proto/guestlet/v1/cloud.proto says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guestlet::transport::http2;
use guestlet::wire::proto::v1::cloud_server::{Cloud, CloudServer};
use guestlet::wire::proto::v1::get_instance_response::Existence;
use guestlet::wire::proto::v1::instance::Power;
use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, Ipam, LoadBalancer, ServiceReference};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// What the host half does wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// The API of its cluster is away: it knows nothing.
    Away,
    /// It answers whatever comes to its mind.
    Garbage,
    /// It never answers.
    Silent,
}

/// What there is on the host.
#[derive(Debug, Default)]
pub struct World {
    pub fault: Fault,
    pub instances: BTreeMap<String, v1::Instance>,
    /// VMs that are gone for certain.
    pub gone: BTreeSet<String>,
    pub balancers: BTreeMap<String, LoadBalancer>,
    pub requests: BTreeMap<String, v1::EnsureLoadBalancerRequest>,
    /// New load balancers get no address until [`Host::allocate`].
    pub is_slow: bool,
    /// Release takes until [`Host::released`].
    pub is_slow_to_release: bool,
    /// Each announcer has addresses of its own, as on a real host.
    pub is_moving: bool,
    /// All calls so far, by name.
    pub calls: BTreeMap<&'static str, u64>,
    /// What agents have reported, if they may.
    pub reports: Option<Vec<v1::ReportHealthChecksRequest>>,
    addresses: u8,
    /// What has changed, in its order: VMs or load balancers, by UID.
    instance_changes: Vec<String>,
    balancer_changes: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct Host {
    world: Arc<Mutex<World>>,
    changed: watch::Sender<u64>,
    socket: PathBuf,
}

/// Serves until it is dropped.
pub struct Serving(JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A VM that runs, whose agent says which Node it is.
pub fn instance(uid: &str, node: &str, address: &str) -> v1::Instance {
    v1::Instance {
        vm_uid: uid.to_owned(),
        provider_id: format!("guestlet://{uid}"),
        name: format!("vm-{uid}"),
        system_uuid: format!("uuid-{uid}"),
        node_name: node.to_owned(),
        power: Power::Running.into(),
        interfaces: vec![v1::InstanceInterface {
            hardware_address: "52:54:00:00:00:01".to_owned(),
            network: "default/lan".to_owned(),
            name: "enp1s0".to_owned(),
            addresses: vec![format!("{address}/24")],
        }],
        addresses_current: true,
        topology: Some(v1::Topology {
            region: "r1".to_owned(),
            zone: "z1".to_owned(),
            host: "host-1".to_owned(),
            labels: [("example.com/rack".to_owned(), "7".to_owned())].into(),
        }),
        instance_type: "4c-8g".to_owned(),
    }
}

impl Host {
    pub fn new(folder: &Path) -> Self {
        Self { world: Arc::default(), changed: watch::Sender::new(0), socket: folder.join("cloud.sock") }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Begins to listen.
    pub fn serve(&self) -> Serving {
        let _ = std::fs::remove_file(&self.socket);
        let (listener, host) = (UnixListener::bind(&self.socket).unwrap(), self.clone());
        Serving(tokio::spawn(async move {
            let mut clients = tokio::task::JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let service = CloudServer::new(host.clone());
                clients.spawn(async move {
                    let _ = http2::serve(stream, service, CancellationToken::new()).await;
                });
            }
        }))
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set(&self, instance: v1::Instance) {
        let mut world = self.world();
        world.instance_changes.push(instance.vm_uid.clone());
        world.instances.insert(instance.vm_uid.clone(), instance);
        drop(world);
        self.news();
    }

    pub fn change(&self, uid: &str, change: impl FnOnce(&mut v1::Instance)) {
        let mut instance = self.world().instances[uid].clone();
        change(&mut instance);
        self.set(instance);
    }

    /// The host half does not tell of a VM any more. Whether it is gone is another thing.
    pub fn withdraw(&self, uid: &str, is_gone: bool) {
        let mut world = self.world();
        world.instances.remove(uid);
        world.instance_changes.push(uid.to_owned());
        if is_gone {
            world.gone.insert(uid.to_owned());
        }
        drop(world);
        self.news();
    }

    pub fn fault(&self, fault: Fault) {
        self.world().fault = fault;
        self.news();
    }

    pub fn calls(&self, name: &str) -> u64 {
        self.world().calls.get(name).copied().unwrap_or_default()
    }

    /// What a Service asks for, by its UID.
    pub fn request(&self, uid: &str) -> Option<v1::EnsureLoadBalancerRequest> {
        self.world().requests.get(uid).cloned()
    }

    /// Changes what a Service has.
    pub fn balance(&self, uid: &str, change: impl FnOnce(&mut LoadBalancer)) {
        let mut world = self.world();
        change(world.balancers.get_mut(uid).expect("it has one"));
        world.balancer_changes.push(uid.to_owned());
        drop(world);
        self.news();
    }

    /// There is a load balancer of which the cluster knows nothing.
    pub fn leak(&self, namespace: &str, name: &str, uid: &str) {
        let service = ServiceReference { namespace: namespace.into(), name: name.into(), uid: uid.into() };
        let mut world = self.world();
        let balancer =
            LoadBalancer { service: Some(service), state: State::Ready.into(), ..LoadBalancer::default() };
        world.balancers.insert(uid.to_owned(), balancer);
        world.balancer_changes.push(uid.to_owned());
        drop(world);
        self.news();
    }

    /// There is one that Harvester's cloud provider has made for a Service of this name, and that says no UID.
    pub fn leave(&self, key: &str, name: &str, address: &str) {
        self.leak("default", name, key);
        self.balance(key, |balancer| {
            balancer.service.as_mut().unwrap().uid.clear();
            ready(balancer, address);
        });
    }

    /// Gives a Service that waits its address.
    pub fn allocate(&self, uid: &str) {
        let address = self.next_address();
        self.balance(uid, |balancer| ready(balancer, &address));
    }

    /// Nothing is left of what is being given back.
    pub fn released(&self, uid: &str) {
        let mut world = self.world();
        world.balancers.remove(uid);
        world.balancer_changes.push(uid.to_owned());
        drop(world);
        self.news();
    }

    fn next_address(&self) -> String {
        let mut world = self.world();
        world.addresses = world.addresses.wrapping_add(1);
        format!("198.51.100.{}", world.addresses)
    }

    fn news(&self) {
        self.changed.send_modify(|number| *number += 1);
    }

    async fn enter(&self, name: &'static str) -> Result<(), Status> {
        let fault = {
            let mut world = self.world();
            *world.calls.entry(name).or_default() += 1;
            world.fault
        };
        match fault {
            Fault::Away => Err(Status::unavailable("the API of the host cluster does not answer")),
            Fault::Silent => std::future::pending().await,
            Fault::None | Fault::Garbage => Ok(()),
        }
    }

    /// Waits until more has changed than at this position, or the time is over; from where, and whether all is to be told.
    async fn wait(
        &self,
        bounds: Option<v1::WatchBounds>,
        count: impl Fn(&World) -> usize + Send + Sync,
    ) -> (usize, bool) {
        let bounds = bounds.unwrap_or_default();
        let Ok(from) = bounds.position.parse::<usize>() else { return (0, true) };
        let mut changed = self.changed.subscribe();
        let limit = Duration::from_secs(u64::from(bounds.wait_seconds.min(20)));
        let is_news = || {
            let world = self.world();
            count(&world) > from || world.fault != Fault::None
        };
        let waiting = async {
            while !is_news() {
                changed.changed().await.unwrap();
            }
        };
        let _ = tokio::time::timeout(limit, waiting).await;
        (from, false)
    }
}

fn ready(balancer: &mut LoadBalancer, address: &str) {
    balancer.state = State::Ready.into();
    (balancer.reason, balancer.message) = (String::new(), String::new());
    balancer.addresses = vec![v1::LoadBalancerAddress { address: address.into(), pool: "pool".into() }];
}

fn nonsense() -> LoadBalancer {
    LoadBalancer {
        service: Some(ServiceReference {
            namespace: "..".into(),
            name: "a/b".into(),
            uid: "\u{1b}[2J".into(),
        }),
        state: 99,
        ipam: -5,
        announcing: 77,
        addresses: vec![v1::LoadBalancerAddress { address: "everywhere".into(), pool: "\0".into() }],
        message: "\u{7}".repeat(5000),
        ..LoadBalancer::default()
    }
}

#[tonic::async_trait]
impl Cloud for Host {
    async fn ensure_load_balancer(
        &self,
        request: Request<v1::EnsureLoadBalancerRequest>,
    ) -> Result<Response<v1::EnsureLoadBalancerResponse>, Status> {
        self.enter("EnsureLoadBalancer").await?;
        let request = request.into_inner();
        let service =
            request.service.clone().ok_or_else(|| Status::invalid_argument("service is missing"))?;
        let uid = service.uid.clone();
        if self.world().fault == Fault::Garbage {
            return Ok(Response::new(v1::EnsureLoadBalancerResponse { load_balancer: Some(nonsense()) }));
        }
        let before = self.world().requests.get(&uid).cloned();
        let is_moved = self.world().is_moving
            && before.as_ref().is_some_and(|before| before.announcing() != request.announcing());
        if before.is_some_and(|before| before.ipam() != request.ipam()) {
            return Err(Status::failed_precondition("the IPAM mode cannot change; make the Service anew"));
        }
        let address = match &request.share_with {
            Some(other) => {
                let world = self.world();
                let shared = world.balancers.get(&other.uid).and_then(|other| other.addresses.first());
                shared.map(|shared| shared.address.clone()).unwrap_or_default()
            }
            None if request.ipam() == Ipam::Dhcp => "0.0.0.0".to_owned(),
            None if is_moved => String::new(),
            None => match self.world().balancers.get(&uid).and_then(|one| one.addresses.first().cloned()) {
                Some(own) => own.address,
                None => String::new(),
            },
        };
        let is_slow = self.world().is_slow;
        let is_own = request.share_with.is_none();
        let address = if address.is_empty() && is_own && !is_slow { self.next_address() } else { address };
        let mut balancer = LoadBalancer {
            name: format!("lb-{uid}"),
            state: State::Pending.into(),
            ipam: request.ipam,
            network: request.network.clone(),
            announcing: request.announcing,
            shares_with: request.share_with.clone(),
            healthy: u32::try_from(request.backends.len()).unwrap(),
            service: Some(service),
            ..LoadBalancer::default()
        };
        if !address.is_empty() {
            ready(&mut balancer, &address);
        }
        let mut world = self.world();
        world.requests.insert(uid.clone(), request);
        world.balancers.insert(uid.clone(), balancer.clone());
        world.balancer_changes.push(uid.clone());
        // Those that share it have waited for it.
        let is_for = |one: &LoadBalancer| one.shares_with.as_ref().is_some_and(|of| of.uid == uid);
        let waiting = world.balancers.iter().filter(|(_, one)| is_for(one) && one.addresses.is_empty());
        for waiting in waiting.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            ready(world.balancers.get_mut(&waiting).unwrap(), &address);
            world.balancer_changes.push(waiting);
        }
        drop(world);
        self.news();
        Ok(Response::new(v1::EnsureLoadBalancerResponse { load_balancer: Some(balancer) }))
    }

    async fn release_load_balancer(
        &self,
        request: Request<v1::ReleaseLoadBalancerRequest>,
    ) -> Result<Response<v1::ReleaseLoadBalancerResponse>, Status> {
        self.enter("ReleaseLoadBalancer").await?;
        let of = request.into_inner().service.unwrap_or_default();
        let mut world = self.world();
        // One without a UID is meant by its name.
        let named = world.balancers.iter().find(|(_, one)| one.service.as_ref() == Some(&of));
        let uid = named.map_or(of.uid, |(key, _)| key.clone());
        let users =
            world.balancers.values().filter(|one| one.shares_with.as_ref().is_some_and(|of| of.uid == uid));
        if let Some(user) = users.map(|one| one.service.clone().unwrap_or_default()).next() {
            return Err(Status::failed_precondition(format!(
                "{}/{} shares its address",
                user.namespace, user.name
            )));
        }
        if world.is_slow_to_release && world.balancers.contains_key(&uid) {
            world.balancers.get_mut(&uid).unwrap().state = State::Releasing.into();
            return Ok(Response::new(v1::ReleaseLoadBalancerResponse { released: false }));
        }
        world.balancers.remove(&uid);
        world.requests.remove(&uid);
        world.balancer_changes.push(uid);
        drop(world);
        self.news();
        Ok(Response::new(v1::ReleaseLoadBalancerResponse { released: true }))
    }

    async fn list_load_balancers(
        &self,
        _: Request<v1::ListLoadBalancersRequest>,
    ) -> Result<Response<v1::ListLoadBalancersResponse>, Status> {
        self.enter("ListLoadBalancers").await?;
        let mut load_balancers: Vec<_> = self.world().balancers.values().cloned().collect();
        if self.world().fault == Fault::Garbage {
            load_balancers = vec![nonsense(), LoadBalancer::default()];
        }
        Ok(Response::new(v1::ListLoadBalancersResponse { load_balancers }))
    }

    async fn watch_load_balancers(
        &self,
        request: Request<v1::WatchLoadBalancersRequest>,
    ) -> Result<Response<v1::WatchLoadBalancersResponse>, Status> {
        self.enter("WatchLoadBalancers").await?;
        let (from, complete) =
            self.wait(request.into_inner().bounds, |world| world.balancer_changes.len()).await;
        self.enter("WatchLoadBalancers").await?;
        let world = self.world();
        if world.fault == Fault::Garbage {
            let load_balancers = vec![nonsense(); 50];
            return Ok(Response::new(v1::WatchLoadBalancersResponse {
                load_balancers,
                ..Default::default()
            }));
        }
        let changed: BTreeSet<_> =
            world.balancer_changes[from.min(world.balancer_changes.len())..].iter().collect();
        let is_told = |uid: &&String| complete || changed.contains(uid);
        let gone = changed.iter().filter(|uid| !world.balancers.contains_key(**uid));
        Ok(Response::new(v1::WatchLoadBalancersResponse {
            position: world.balancer_changes.len().to_string(),
            complete,
            load_balancers: world
                .balancers
                .iter()
                .filter(|(uid, _)| is_told(uid))
                .map(|(_, one)| one.clone())
                .collect(),
            gone: gone.map(|uid| ServiceReference { uid: (**uid).clone(), ..Default::default() }).collect(),
        }))
    }

    async fn watch_instances(
        &self,
        request: Request<v1::WatchInstancesRequest>,
    ) -> Result<Response<v1::WatchInstancesResponse>, Status> {
        self.enter("WatchInstances").await?;
        let (from, complete) =
            self.wait(request.into_inner().bounds, |world| world.instance_changes.len()).await;
        self.enter("WatchInstances").await?;
        let world = self.world();
        if world.fault == Fault::Garbage {
            let odd = v1::Instance { vm_uid: "../x".into(), power: -1, ..v1::Instance::default() };
            return Ok(Response::new(v1::WatchInstancesResponse {
                complete: true,
                instances: vec![odd; 100],
                withdrawn: vec!["\0".into()],
                position: "p".repeat(100_000),
            }));
        }
        let changed: BTreeSet<_> =
            world.instance_changes[from.min(world.instance_changes.len())..].iter().collect();
        let is_told = |uid: &&String| complete || changed.contains(uid);
        Ok(Response::new(v1::WatchInstancesResponse {
            position: world.instance_changes.len().to_string(),
            complete,
            instances: world
                .instances
                .iter()
                .filter(|(uid, _)| is_told(uid))
                .map(|(_, one)| one.clone())
                .collect(),
            withdrawn: changed
                .into_iter()
                .filter(|uid| !world.instances.contains_key(*uid))
                .cloned()
                .collect(),
        }))
    }

    async fn get_instance(
        &self,
        request: Request<v1::GetInstanceRequest>,
    ) -> Result<Response<v1::GetInstanceResponse>, Status> {
        self.enter("GetInstance").await?;
        let uid = request.into_inner().vm_uid;
        let world = self.world();
        let instance = world.instances.get(&uid).cloned();
        let existence = match (&instance, world.gone.contains(&uid)) {
            _ if world.fault == Fault::Garbage => 42,
            (Some(_), _) => Existence::Exists.into(),
            (None, true) => Existence::Gone.into(),
            (None, false) => Existence::Unknown.into(),
        };
        let reason = "it may run on another host".to_owned();
        Ok(Response::new(v1::GetInstanceResponse { existence, instance, reason }))
    }

    async fn report_health_checks(
        &self,
        request: Request<v1::ReportHealthChecksRequest>,
    ) -> Result<Response<v1::ReportHealthChecksResponse>, Status> {
        self.enter("ReportHealthChecks").await?;
        let mut world = self.world();
        let reports = world.reports.as_mut();
        reports
            .ok_or_else(|| Status::unimplemented("agents report, not guestlet-ccm"))?
            .push(request.into_inner());
        Ok(Response::new(v1::ReportHealthChecksResponse {}))
    }
}
