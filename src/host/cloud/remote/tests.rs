//! Tests of the registry with an API server in this process: which calls it makes to that, in which order, and how
//! often.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::super::settings::Policy;
use super::super::wanted::{Service, Wanted};
use super::super::{Asker, Found, Problem};
use super::object::tests::wanted;
use super::*;
use crate::host::backends::Problems;
use crate::host::backends::kubevirt::balancers::{Pool, Told};
use crate::host::backends::kubevirt::controller::Kind;
use crate::host::backends::kubevirt::interfaces::Interface;
use crate::host::fleet::{Reach, Reaches, Remote};
use crate::wire::proto::v1::PowerState;
use crate::wire::proto::v1::load_balancer::State;

mod at_once;
mod checked;
mod given_back;
mod leaving;

/// Time that the registry gets to come to rest; the clock is paused meanwhile.
const REST: Duration = Duration::from_millis(900);

/// Objects of the API server, and the changes that were requested.
#[derive(Default)]
struct Objects {
    balancers: BTreeMap<String, Value>,
    /// VirtualMachines of all namespaces.
    vms: Vec<Value>,
    version: u64,
    /// Requested changes: method and name.
    changes: Vec<String>,
    /// True if a webhook rejects every new object.
    is_refusing: bool,
    /// True if lists are not answered.
    is_away: bool,
    /// Number of changes that are held up.
    waiting: usize,
}

#[derive(Clone)]
struct Server {
    objects: Arc<Mutex<Objects>>,
    /// Permits for which each change waits.
    places: Arc<Semaphore>,
}

impl Server {
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap()
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        let mut objects = self.objects();
        let failed = |code: StatusCode, words: &str| {
            (
                code,
                json!({ "kind": "Status", "status": "Failure", "message": words, "reason": "", "code": code.as_u16() }),
            )
        };
        let of_name = path.rsplit_once("loadbalancers/").map(|(_, name)| name.to_owned());
        if *method == Method::GET {
            if objects.is_away {
                return failed(StatusCode::SERVICE_UNAVAILABLE, "away");
            }
            let within = path.split_once("/namespaces/").map(|(_, rest)| rest.split('/').next().unwrap());
            let items: Vec<Value> = match path.rsplit('/').next().unwrap() {
                "loadbalancers" => objects.balancers.values().cloned().collect(),
                "virtualmachines" => objects.vms.clone(),
                _ if path.contains("virtualmachine") && !path.ends_with("instances") => {
                    return failed(StatusCode::NOT_FOUND, "none");
                }
                _ => Vec::new(),
            };
            let is_meant = |one: &Value| within.is_none_or(|within| one["metadata"]["namespace"] == within);
            let items: Vec<_> = items.into_iter().filter(is_meant).collect();
            return (StatusCode::OK, json!({ "metadata": { "resourceVersion": "1" }, "items": items }));
        }
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let name = of_name.clone().unwrap_or_else(|| body["metadata"]["name"].as_str().unwrap().to_owned());
        objects.changes.push(format!("{method} {name}"));
        objects.version += 1;
        let version = objects.version.to_string();
        match *method {
            Method::POST if objects.is_refusing => failed(StatusCode::FORBIDDEN, "a webhook denies it"),
            Method::POST if objects.balancers.contains_key(&name) => {
                failed(StatusCode::CONFLICT, "there is one")
            }
            Method::POST => {
                let mut made = body;
                made["metadata"]["uid"] = json!(format!("uid-{version}"));
                made["metadata"]["resourceVersion"] = json!(version);
                objects.balancers.insert(name, made.clone());
                (StatusCode::CREATED, made)
            }
            Method::PATCH => {
                let Some(known) = objects.balancers.get_mut(&name) else {
                    return failed(StatusCode::NOT_FOUND, "none");
                };
                if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"] {
                    return failed(StatusCode::CONFLICT, "it has changed");
                }
                json_patch::merge(known, &body);
                known["metadata"]["resourceVersion"] = json!(version);
                (StatusCode::OK, known.clone())
            }
            _ => match objects.balancers.remove(&name) {
                Some(_) => (StatusCode::OK, json!({ "kind": "Status", "status": "Success" })),
                None => failed(StatusCode::NOT_FOUND, "none"),
            },
        }
    }
}

impl tower_service::Service<Request<kube::client::Body>> for Server {
    type Response = Response<String>;
    type Error = kube::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<String>, kube::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), kube::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            if head.method != Method::GET {
                server.objects().waiting += 1;
                server.places.acquire().await.unwrap().forget();
                server.objects().waiting -= 1;
            }
            let body = body.collect_bytes().await.unwrap();
            let (status, answer) = server.answer(&head.method, head.uri.path(), &body);
            Ok(Response::builder().status(status).body(answer.to_string()).unwrap())
        })
    }
}

#[derive(Debug)]
struct Nobody;

impl Reaches for Nobody {
    fn reach(&self, _: &str, _: &str, _: &str) -> Reach {
        Reach::NoSession
    }
}

/// Registry that does nothing by itself: a test passes messages to it.
struct Bench {
    server: Server,
    registry: Registry,
    settings: watch::Sender<Arc<Settings>>,
}

type Ensured = oneshot::Receiver<Result<v1::LoadBalancer, Problem>>;

fn service(name: &str) -> Service {
    Service { namespace: "shop".into(), name: name.into(), uid: format!("u-{name}") }
}

fn asker(cluster: &str) -> Asker {
    Asker { vm: "ns/a".into(), uid: "vm-a".into(), cluster: cluster.into() }
}

fn asking(address: &str) -> Wanted {
    Wanted { addresses: vec![address.parse::<IpAddr>().unwrap()], ..wanted() }
}

impl Bench {
    /// Builds a registry where the cluster `ns/dev` has a VM that is attached to `ns/lan`, and there are no load
    /// balancers or pools.
    fn new() -> Self {
        let server = Server { objects: Arc::default(), places: Arc::new(Semaphore::new(1000)) };
        let client = kube::Client::new(server.clone(), "default");
        let half = Arc::new(Half::new("test".into()));
        let cluster = Cluster::new(client, watch::Sender::new(Problems::new()), Arc::clone(&half));
        let (settings, followed) = watch::channel(Arc::<Settings>::default());
        let limits = Arc::default();
        let (_, options) = watch::channel(Options { max_volumes: 64, limits, node_labels: Vec::new() });
        let (_, facts) = mpsc::channel(1);
        let (_, _, fleet) = Remote::new(Arc::new(Nobody));
        let parts = Parts { half, cluster, settings: followed, options, facts, fleet };
        let (registry, _) = Registry::new(parts);
        let mut bench = Self { server, registry, settings };
        for kind in [Kind::Wanted, Kind::Runs] {
            let news = bench.registry.members.hear_vms(kind, Heard::All(Vec::new()));
            bench.registry.tell(news);
        }
        let news = bench.registry.members.hear_reports(Heard::All(Vec::new()));
        bench.registry.tell(news);
        let news = bench.registry.members.hear_hosts(Heard::All(Vec::new()));
        bench.registry.tell(news);
        bench.vm("a", "dev", "ns/lan");
        bench.registry.hear(Told::Balancers(Heard::All(Vec::new())));
        bench.registry.hear(Told::Pools(Heard::All(Vec::new())));
        bench
    }

    fn facts(name: &str, cluster: &str, network: &str) -> Arc<Facts> {
        Arc::new(Facts {
            name: format!("ns/{name}"),
            uid: format!("run-{name}"),
            lasting: format!("vm-{name}"),
            cluster: format!("ns/{cluster}"),
            power: PowerState::Running,
            interfaces: vec![Interface { network: network.into(), ..Interface::default() }],
            ..Facts::default()
        })
    }

    /// Adds a VM of a cluster on a network, both to the API and to the reports.
    fn vm(&mut self, name: &str, cluster: &str, network: &str) {
        let labels = json!({ "guestcluster.harvesterhci.io/name": cluster });
        self.server.objects().vms.push(json!({
            "metadata": { "namespace": "ns", "name": name, "uid": format!("vm-{name}") },
            "spec": { "template": { "metadata": { "labels": labels } } },
        }));
        let facts = Self::facts(name, cluster, network);
        let news = self.registry.members.hear_vms(Kind::Wanted, Heard::There(facts));
        self.registry.tell(news);
    }

    /// Reports that a VM is deleted; the API still has it unless `is_true`.
    fn lose(&mut self, name: &str, cluster: &str, is_true: bool) {
        if is_true {
            self.server.objects().vms.retain(|vm| vm["metadata"]["name"] != name);
        }
        let facts = Self::facts(name, cluster, "");
        let news = self.registry.members.hear_vms(Kind::Wanted, Heard::Gone(facts));
        self.registry.tell(news);
    }

    /// Adds a pool with one address of `ns/lan`, for all clusters.
    fn pool(&mut self, name: &str, address: &str) {
        let scope = json!([{ "project": "*", "namespace": "*", "guestCluster": "*" }]);
        let pool: Pool = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "ranges": [{ "subnet": format!("{address}/32") }], "selector": { "network": "ns/lan", "scope": scope } },
            "status": { "total": 1, "available": 1 },
        }))
        .unwrap();
        self.registry.hear(Told::Pools(Heard::There(pool)));
    }

    fn ensure(&mut self, cluster: &str, name: &str, wanted: Wanted) -> Ensured {
        let (reply, answer) = oneshot::channel();
        self.registry.take(super::super::Request::Ensure(
            asker(cluster),
            service(name),
            Box::new(wanted),
            reply,
        ));
        answer
    }

    fn release(&mut self, name: &str) -> oneshot::Receiver<Result<bool, Problem>> {
        let (reply, answer) = oneshot::channel();
        self.registry.take(super::super::Request::Release(asker("ns/dev"), service(name), reply));
        answer
    }

    /// Takes in results of calls until no more arrive.
    async fn rest(&mut self) {
        while let Ok(Some(done)) = tokio::time::timeout(REST, self.registry.dones.recv()).await {
            self.registry.take_in(done);
        }
    }

    async fn ensured(&mut self, name: &str, wanted: Wanted) -> v1::LoadBalancer {
        let answer = self.ensure("ns/dev", name, wanted);
        self.rest().await;
        answer.await.unwrap().unwrap()
    }

    /// Has Harvester assign an address, and reports the change.
    fn allocate(&mut self, name: &str, ip: &str) {
        let id = self.registry.balancers.own("ns/dev", &service(name)).unwrap().name().to_owned();
        let mut objects = self.server.objects();
        objects.version += 1;
        let version = objects.version.to_string();
        let object = objects.balancers.get_mut(&id).unwrap();
        object["status"]["allocatedAddress"] = json!({ "ip": ip, "ipPool": "p" });
        object["metadata"]["finalizers"] = json!(["wrangler.cattle.io/harvester-lb-controller"]);
        object["metadata"]["resourceVersion"] = json!(version);
        let object = object.clone();
        drop(objects);
        self.heard(&object);
    }

    fn heard(&mut self, object: &Value) {
        let read = serde_json::from_value(object.clone()).unwrap();
        self.registry.hear(Told::Balancers(Heard::There(read)));
    }

    fn changes(&self) -> Vec<String> {
        let changes = self.server.objects().changes.clone();
        let short = |change: &String| {
            let (method, name) = change.split_once(' ').unwrap();
            format!("{method} {}", name.split('-').nth(2).unwrap())
        };
        changes.iter().map(short).collect()
    }

    /// Returns the requested configuration as the object of a Service has it.
    fn wanted_of(&self, name: &str) -> Wanted {
        self.registry.balancers.own("ns/dev", &service(name)).unwrap().wanted.clone().unwrap()
    }

    /// Holds up changes from now on, or lets them continue.
    fn hold(&self, is_held: bool) {
        if is_held {
            self.server.places.forget_permits(1000);
        } else {
            self.server.places.add_permits(1000);
        }
    }
}

/// A request that has become possible is retried although no caller waits. Requests made meanwhile take
/// precedence.
#[tokio::test(start_paused = true)]
async fn what_was_refused_is_not_made_again_after_it_was_changed_or_given_back() {
    let mut bench = Bench::new();
    for (name, address) in [("web", "192.0.2.7"), ("db", "192.0.2.8"), ("api", "192.0.2.9")] {
        let told = bench.ensured(name, asking(address)).await;
        assert_eq!(told.reason, "AddressOutsidePools");
    }
    // While a job is under way, one waiting request is changed and one released. Then all become possible.
    bench.hold(true);
    let busy = bench.ensure("ns/dev", "busy", wanted());
    let changed = bench.ensure("ns/dev", "web", wanted());
    let released = bench.release("db");
    for (name, address) in [("p7", "192.0.2.7"), ("p8", "192.0.2.8"), ("p9", "192.0.2.9")] {
        bench.pool(name, address);
    }
    bench.hold(false);
    bench.rest().await;
    assert!(busy.await.unwrap().is_ok() && changed.await.unwrap().is_ok());
    assert_eq!(released.await.unwrap(), Ok(true));
    assert_eq!(bench.changes(), ["POST busy", "POST web", "POST api"], "the last one as it was asked for");
    assert_eq!(bench.wanted_of("web").addresses, [] as [IpAddr; 0]);
    assert_eq!(bench.wanted_of("api"), asking("192.0.2.9"));
    assert!(bench.registry.balancers.asked.is_empty());
}

/// Pending requests of a cluster without VMs are dropped, since nobody would release what it gets.
#[tokio::test(start_paused = true)]
async fn what_a_dead_cluster_has_asked_for_is_asked_for_no_more() {
    let mut bench = Bench::new();
    assert_eq!(bench.ensured("web", asking("192.0.2.7")).await.state(), State::Failed);
    bench.lose("a", "dev", true);
    bench.pool("p7", "192.0.2.7");
    bench.rest().await;
    assert_eq!(bench.changes(), [] as [String; 0]);
    assert!(
        bench.registry.balancers.keys(None).is_empty()
            && bench.registry.clusters["ns/dev"].balancers.all().next().is_none()
    );
    // The cluster has a VM again, which requests it.
    bench.vm("a", "dev", "ns/lan");
    assert_eq!(bench.ensured("web", asking("192.0.2.7")).await.state(), State::Pending);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_where_nothing_has_changed() {
    let mut bench = Bench::new();
    let many = Wanted { backends: (0..500).map(|number| format!("vm-{number}")).collect(), ..wanted() };
    bench.ensured("web", many.clone()).await;
    assert_eq!(bench.changes(), ["POST web"]);
    bench.allocate("web", "192.0.2.7");
    bench.rest().await;
    assert_eq!(bench.changes(), ["POST web", "PATCH web"], "that it has an address is said in it");
    let object = bench.server.objects().balancers.values().next().unwrap().clone();
    assert!(!object["metadata"]["annotations"]["guestlet.io/wanted"].as_str().unwrap().contains("vm-1"));
    for round in 0..3 {
        let fewer = Wanted { backends: vec![format!("vm-{round}")], ..wanted() };
        assert_eq!(bench.ensured("web", fewer).await.state(), State::Ready);
        bench.heard(&object);
        bench
            .registry
            .hear(Told::Balancers(Heard::All(vec![serde_json::from_value(object.clone()).unwrap()])));
        bench.pool("p", "192.0.2.7");
        bench.vm("a", "dev", "ns/lan");
        bench.registry.follow_settings();
        bench.registry.look_at_reports();
        bench.registry.look_for_abandoned();
        bench.rest().await;
    }
    assert_eq!(bench.changes().len(), 2, "{:?}", bench.changes());
}

/// Requests that the host refuses are not retried because of anything that a guest does.
#[tokio::test(start_paused = true)]
async fn what_a_webhook_denies_is_not_tried_for_each_thing_that_happens() {
    let mut bench = Bench::new();
    bench.server.objects().is_refusing = true;
    let told = bench.ensured("web", wanted()).await;
    assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "RefusedByHost"));
    for round in 0..5 {
        bench.vm(&format!("n{round}"), "dev", "ns/lan");
        bench.rest().await;
    }
    assert_eq!(bench.changes(), ["POST web"]);
    bench.server.objects().is_refusing = false;
    bench.registry.follow_settings();
    bench.rest().await;
    assert_eq!(bench.changes(), ["POST web", "POST web"]);
    assert_eq!(bench.registry.balancers.asked.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn of_what_cannot_be_had_no_more_is_remembered_than_a_cluster_may_have() {
    let mut bench = Bench::new();
    let policy = Policy { load_balancers: Some(3), ..Policy::default() };
    let clusters = [("ns/dev".to_owned(), policy)].into();
    bench.settings.send_replace(Arc::new(Settings { clusters, ..Settings::default() }));
    for round in 0..10 {
        let answer = bench.ensure("ns/dev", &format!("s{round}"), asking("192.0.2.7"));
        bench.rest().await;
        match answer.await.unwrap() {
            Ok(told) => assert!(round < 3 && told.state() == State::Failed, "{round}"),
            Err(problem) => {
                assert!(round >= 3 && matches!(problem, Problem::Exhausted(_)), "{round} {problem}");
            }
        }
    }
    assert_eq!(bench.registry.balancers.asked.len(), 3);
    // Services with a remembered request may change it.
    assert_eq!(bench.ensured("s0", asking("192.0.2.8")).await.state(), State::Failed);
}

/// A VM may be in another namespace: it is deleted only if no namespace has it.
#[tokio::test(start_paused = true)]
async fn a_vm_in_another_namespace_is_not_gone() {
    let mut bench = Bench::new();
    bench.server.objects().vms.push(json!({
        "metadata": { "namespace": "elsewhere", "name": "moved", "uid": "vm-moved" },
        "spec": { "template": { "metadata": { "labels": { "guestcluster.harvesterhci.io/name": "dev" } } } },
    }));
    let mut ask = async |uid: &str| {
        let (reply, answer) = oneshot::channel();
        bench.registry.take(super::super::Request::Instance(asker("ns/dev"), uid.into(), reply));
        bench.rest().await;
        answer.await.unwrap()
    };
    assert!(matches!(ask("vm-moved").await, Ok(Found::Unknown(_))));
    assert!(matches!(ask("vm-none").await, Ok(Found::Gone)));
    bench.server.objects().is_away = true;
    let (reply, answer) = oneshot::channel();
    bench.registry.take(super::super::Request::Instance(asker("ns/dev"), "vm-none".into(), reply));
    bench.rest().await;
    assert!(matches!(answer.await.unwrap(), Err(Problem::Unavailable(_))));
}
