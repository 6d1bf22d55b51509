use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::super::super::settings::Policy;
use super::super::super::wanted::{Port, Protocol};
use super::super::balancers::{Asked, Key};
use super::super::object::tests::wanted;
use super::super::told::message;
use super::*;
use crate::host::backends::kubevirt::balancers::{Balancer, Pool, Told};
use crate::kubernetes::follow::Heard;
use crate::wire::proto::v1::LoadBalancer;
use crate::wire::proto::v1::load_balancer::State;

mod told;

/// API with some objects, and a client that carries out steps in it.
struct World {
    balancers: Balancers,
    settings: Settings,
    objects: BTreeMap<String, Value>,
    version: u64,
    steps: Vec<String>,
}

fn service(name: &str) -> Service {
    Service { namespace: "shop".into(), name: name.into(), uid: format!("u-{name}") }
}

fn of_port(port: u16) -> Wanted {
    let port = Port { name: String::new(), protocol: Protocol::Tcp, port, node_port: 30000 };
    Wanted { ports: vec![port], ..wanted() }
}

fn sharing(port: u16, primary: &str) -> Wanted {
    Wanted { share: Some(service(primary)), ..of_port(port) }
}

impl World {
    fn new() -> Self {
        let mut balancers = Balancers::default();
        drop(balancers.hear(Told::Balancers(Heard::All(Vec::new()))));
        drop(balancers.hear(Told::Pools(Heard::All(Vec::new()))));
        let networks = BTreeSet::from(["ns/lan".to_owned()]);
        let settings =
            Settings { of_clusters: [("ns/dev".to_owned(), networks)].into(), ..Settings::default() };
        Self { balancers, settings, objects: BTreeMap::new(), version: 0, steps: Vec::new() }
    }

    fn put(&mut self, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        self.objects.insert(format!("ns/{name}"), object.clone());
        let read: Balancer = serde_json::from_value(object).unwrap();
        drop(self.balancers.put(read));
    }

    fn change(&mut self, id: &str, patch: &Value) {
        let mut object = self.objects[id].clone();
        json_patch::merge(&mut object, patch);
        self.put(object);
    }

    fn plan(&self) -> Plan<'_> {
        Plan { balancers: &self.balancers, settings: &self.settings, cluster: "ns/dev", beside: 0 }
    }

    /// Carries out steps until nothing is left to do.
    fn ensure(&mut self, name: &str, wanted: &Wanted) -> Result<(), Refusal> {
        for _ in 0..8 {
            match self.plan().ensure(&service(name), wanted)? {
                Step::Done => return Ok(()),
                step => self.step(step),
            }
        }
        panic!("it has no end: {:?}", self.steps);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Done => {}
            Step::Make(object) => {
                self.steps.push(format!("make {}", object["metadata"]["name"].as_str().unwrap()));
                self.put(object);
            }
            Step::Change(id, patch) => {
                self.steps.push(format!("change {id}"));
                self.change(&id, &patch);
            }
            Step::Remove(id) => {
                self.steps.push(format!("remove {id}"));
                self.change(&id, &json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
            }
        }
    }

    fn release(&mut self, service: &Service) -> Result<Giving, Problem> {
        let giving = self.plan().release(service)?;
        if let Giving::Step(step) = &giving {
            self.step(step.clone());
        }
        Ok(giving)
    }

    /// Has Harvester assign an address.
    fn allocate(&mut self, name: &str, ip: &str) {
        let id = self.id(name);
        self.change(&id, &json!({ "status": { "allocatedAddress": { "ip": ip, "ipPool": "p" } } }));
        self.take_up(name);
    }

    /// Has Harvester add its finalizer.
    fn take_up(&mut self, name: &str) {
        let id = self.id(name);
        self.change(
            &id,
            &json!({ "metadata": { "finalizers": ["wrangler.cattle.io/harvester-lb-controller"] } }),
        );
    }

    fn id(&self, name: &str) -> String {
        self.balancers.own("ns/dev", &service(name)).unwrap().id()
    }

    fn told(&self, name: &str) -> LoadBalancer {
        self.message(&("ns/dev".to_owned(), service(name).uid)).unwrap()
    }

    fn message(&self, key: &Key) -> Option<LoadBalancer> {
        message(&self.balancers, self.settings.of_clusters.get("ns/dev"), key)
    }

    /// Asserts the reason why a Service cannot have this.
    fn fails(&mut self, name: &str, wanted: &Wanted, expected: &str) {
        match self.ensure(name, wanted) {
            Err(Refusal::Failure(failure)) => assert_eq!(failure.reason, expected, "{}", failure.message),
            other => panic!("{other:?}; expected {expected}"),
        }
    }
}

#[test]
fn a_service_gets_an_object_and_its_address() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!((world.told("web").state(), world.told("web").addresses.len()), (State::Pending, 0));
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!(world.steps.len(), 1, "once more is the same");
    world.allocate("web", "192.0.2.7");
    let told = world.told("web");
    assert_eq!((told.state(), told.addresses[0].address.as_str()), (State::Ready, "192.0.2.7"));
    assert_eq!((told.addresses[0].pool.as_str(), told.service.unwrap().uid.as_str()), ("p", "u-web"));
    // The address is also written to where Harvester's cloud provider looks for it.
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!(world.objects[&world.id("web")]["status"]["address"], "192.0.2.7");
    world.ensure("web", &of_port(81)).unwrap();
    assert_eq!(world.steps.len(), 3, "{:?}", world.steps);
}

#[test]
fn what_it_is_cannot_become_something_else() {
    let mut world = World::new();
    world.ensure("web", &Wanted { network: "ns/lan".into(), ..of_port(80) }).unwrap();
    for other in [Wanted { ipam: Ipam::Dhcp, network: "ns/lan".into(), ..of_port(80) }, of_port(80)] {
        let refused = world.ensure("web", &other).unwrap_err();
        assert!(
            matches!(&refused, Refusal::Problem(Problem::Contradiction(why)) if why.contains("cannot become")),
            "{refused:?}"
        );
    }
    assert_eq!(world.steps.len(), 1);
}

/// Regression test for harvester/harvester#10905, where any network could be named.
#[test]
fn what_the_cluster_may_not_have_is_refused_and_nothing_is_made() {
    let mut world = World::new();
    let with = |change: &dyn Fn(&mut Wanted)| {
        let mut wanted = of_port(80);
        change(&mut wanted);
        wanted
    };
    for (wanted, reason) in [
        (with(&|one| one.network = "infra/others".into()), "UnknownNetwork"),
        (with(&|one| one.announcing = Announcing::Host), "NotForwarded"),
        (with(&|one| (one.ipam, one.announcing) = (Ipam::Dhcp, Announcing::None)), "NoDhcp"),
        (
            with(&|one| (one.families, one.all_families) = (vec![Family::Ipv4, Family::Ipv6], true)),
            "FamilyMissing",
        ),
        (with(&|one| one.addresses = vec!["192.0.2.7".parse().unwrap()]), "AddressOutsidePools"),
        (sharing(80, "none"), "NoPrimary"),
        (sharing(80, "web"), "SharesItself"),
    ] {
        world.fails("web", &wanted, reason);
    }
    world.balancers.pools = None;
    world.fails("web", &with(&|one| one.addresses = vec!["192.0.2.7".parse().unwrap()]), "PoolsUnknown");
    world.balancers.pools = Some(BTreeMap::new());
    let policy = Policy { load_balancers: Some(1), ..Policy::default() };
    world.settings.clusters.insert("ns/dev".into(), policy);
    world.ensure("web", &of_port(80)).unwrap();
    world.fails("db", &sharing(81, "web"), "NoPrimary");
    world.allocate("web", "192.0.2.7");
    let refused = world.ensure("db", &of_port(80)).unwrap_err();
    assert!(
        matches!(&refused, Refusal::Problem(Problem::Exhausted(why)) if why.contains("may have at most 1")),
        "{refused:?}"
    );
    let refused = world.ensure("db", &sharing(81, "web")).unwrap_err();
    assert!(matches!(refused, Refusal::Problem(Problem::Exhausted(_))), "{refused:?}");
    assert_eq!(world.steps.len(), 1, "{:?}", world.steps);
}

#[test]
fn services_share_an_address_as_long_as_their_ports_differ() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    world.allocate("web", "192.0.2.7");
    world.ensure("db", &sharing(5432, "web")).unwrap();
    world.ensure("db", &sharing(5432, "web")).unwrap();
    let told = world.told("db");
    assert_eq!((told.state(), told.addresses[0].address.as_str()), (State::Ready, "192.0.2.7"));
    assert_eq!(told.shares_with.unwrap().name, "web");
    assert_eq!(world.steps.len(), 2, "{:?}", world.steps);
    world.fails("api", &sharing(5432, "web"), "PortInUse");
    world.fails("api", &sharing(81, "db"), "PrimaryShares");
    world.fails("web", &of_port(5432), "PortInUse");
    let refused = world.release(&service("web")).unwrap_err();
    assert!(matches!(&refused, Problem::Contradiction(why) if why.contains("shop/db")), "{refused:?}");
    // It gets an address of its own and is no longer a sharer; then the other way round.
    world.ensure("db", &of_port(5432)).unwrap();
    assert_eq!(world.told("db").shares_with, None);
    assert!(world.balancers.shared("ns/dev", "u-db").is_none());
    world.allocate("db", "192.0.2.8");
    world.ensure("web", &sharing(80, "db")).unwrap();
    assert_eq!(world.told("web").shares_with.unwrap().name, "db");
    assert!(world.steps.last().unwrap().starts_with("remove ns/dev-shop-web-"), "{:?}", world.steps);
    assert!(matches!(world.release(&service("web")), Ok(Giving::Step(Step::Change(..)))));
    assert_eq!(world.release(&service("web")), Ok(Giving::UnderWay), "what it had of its own");
    assert!(matches!(world.release(&service("db")), Ok(Giving::Step(Step::Remove(_)))));
}

#[test]
fn sharing_an_address_is_no_way_to_another_ipam() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    world.ensure("db", &of_port(81)).unwrap();
    let other = Wanted { ipam: Ipam::Dhcp, ..sharing(81, "web") };
    let refused = world.ensure("db", &other).unwrap_err();
    assert!(matches!(refused, Refusal::Problem(Problem::Contradiction(_))), "{refused:?}");
}

#[test]
fn one_that_shares_anothers_address_leaves_the_one_before() {
    let mut world = World::new();
    for (name, port, address) in [("web", 80, "192.0.2.7"), ("db", 5432, "192.0.2.8")] {
        world.ensure(name, &of_port(port)).unwrap();
        world.allocate(name, address);
    }
    world.ensure("api", &sharing(81, "web")).unwrap();
    world.ensure("api", &sharing(81, "db")).unwrap();
    assert_eq!(world.told("api").addresses[0].address, "192.0.2.8");
    assert!(matches!(world.release(&service("web")), Ok(Giving::Step(Step::Remove(_)))));
    // An earlier attempt to do this was interrupted.
    let mut world = World::new();
    for (name, port, address) in [("web", 80, "192.0.2.7"), ("db", 5432, "192.0.2.8")] {
        world.ensure(name, &of_port(port)).unwrap();
        world.allocate(name, address);
        world.ensure("api", &sharing(81, "web")).unwrap();
    }
    let Ok(Step::Change(id, patch)) = world.plan().ensure(&service("api"), &sharing(81, "db")) else {
        panic!()
    };
    world.change(&id, &patch);
    for _ in 0..2 {
        assert!(matches!(world.release(&service("api")), Ok(Giving::Step(Step::Change(..)))));
    }
    assert_eq!(world.release(&service("api")), Ok(Giving::Nothing));
    for name in ["web", "db"] {
        assert!(matches!(world.release(&service(name)), Ok(Giving::Step(Step::Remove(_)))), "{name}");
    }
}

/// Harvester's cloud provider ignored an object whose address was not announced yet, and did not delete it
/// (harvester/harvester#8318, #5918).
#[test]
fn one_is_given_back_however_far_it_has_come() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    // Harvester may be reserving an address for it, and would not notice its deletion.
    let early = Giving::Early("u-web".to_owned(), world.id("web"));
    assert_eq!(world.release(&service("web")), Ok(early));
    world.take_up("web");
    assert!(matches!(world.release(&service("web")), Ok(Giving::Step(Step::Remove(_)))));
    assert_eq!(
        (world.release(&service("web")), world.told("web").state()),
        (Ok(Giving::UnderWay), State::Releasing)
    );
    // Requested again, it is created anew once the old object is deleted.
    world.fails("web", &of_port(80), "BeingReleased");
    let id = world.id("web");
    drop(world.balancers.drop(&id));
    assert_eq!(world.release(&service("web")), Ok(Giving::Nothing));
    world.ensure("web", &of_port(80)).unwrap();
}

/// Builds an object as Harvester's cloud provider has created it for this Service.
fn theirs(of: &Service) -> Value {
    let mut made = object::new("ns/dev", of, &wanted(), None, None);
    let annotations = made["metadata"]["annotations"].as_object_mut().unwrap();
    annotations.retain(|key, _| !key.starts_with("guestlet.io/"));
    annotations.insert("loadbalancer.harvesterhci.io/network".into(), json!("ns/lan"));
    made["metadata"]["finalizers"] = json!(["wrangler.cattle.io/harvester-lb-controller"]);
    made["status"] =
        json!({ "allocatedAddress": { "ip": "192.0.2.7", "ipPool": "p" }, "address": "192.0.2.7" });
    made
}

#[test]
fn one_that_harvester_has_made_is_taken_over_under_its_name() {
    let mut world = World::new();
    world.put(theirs(&service("web")));
    let key = world.balancers.keys(Some("ns/dev")).pop_first().unwrap();
    let told = world.message(&key).unwrap();
    assert_eq!((told.state(), told.service.unwrap().uid.as_str()), (State::Ready, ""));
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!((world.steps.len(), world.objects.len()), (1, 1), "{:?}", world.steps);
    assert_eq!(world.told("web").addresses[0].address, "192.0.2.7");
    assert_eq!(world.balancers.keys(Some("ns/dev")).len(), 1);
    // The labels that Harvester's cloud provider needs are unchanged.
    let object = world.objects.values().next().unwrap();
    assert_eq!(object["metadata"]["labels"], theirs(&service("web"))["metadata"]["labels"]);
}

/// Regression test for harvester/harvester#11345: a Service that is created anew with another UID leaves its
/// object behind.
#[test]
fn what_a_service_of_the_same_name_has_left_is_not_taken_over_and_can_be_given_back() {
    let mut world = World::new();
    let before = Service { uid: "before".into(), ..service("web") };
    world.put(theirs(&before));
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!(world.objects.len(), 2, "it has another name");
    let nobodys = Service { uid: String::new(), ..before };
    assert!(matches!(world.release(&nobodys), Ok(Giving::Step(Step::Remove(id))) if id != world.id("web")));
    assert_eq!(world.release(&nobodys), Ok(Giving::UnderWay));
    // An object that guestlet has created says whose it was.
    world.ensure("db", &of_port(80)).unwrap();
    let again = Service { uid: "again".into(), ..service("db") };
    assert_eq!(world.plan().release(&again), Ok(Giving::Nothing));
    world.take_up("db");
    assert!(matches!(world.release(&service("db")), Ok(Giving::Step(Step::Remove(_)))));
}

#[test]
fn an_address_that_is_asked_for_is_had_where_harvester_can_be_told() {
    let mut world = World::new();
    let pool = |name: &str, subnet: &str, total: u64, scope: Value| {
        serde_json::from_value::<Pool>(json!({
            "metadata": { "name": name },
            "spec": { "ranges": [{ "subnet": subnet }], "selector": { "network": "ns/lan", "scope": scope } },
            "status": { "total": total, "available": total, "allocated": { "192.0.2.66": "ns/other" },
                        "allocatedHistory": {} },
        }))
        .unwrap()
    };
    let mine = json!([{ "project": "*", "namespace": "ns", "guestCluster": "dev" }]);
    let others = json!([{ "project": "*", "namespace": "ns", "guestCluster": "prod" }]);
    let pools = vec![
        pool("one", "192.0.2.7/32", 1, mine.clone()),
        pool("many", "192.0.2.64/27", 30, mine.clone()),
        pool("others", "198.51.100.0/24", 254, others),
        pool(
            "elsewhere",
            "203.0.113.1/32",
            1,
            json!([{ "project": "c/p", "namespace": "*", "guestCluster": "*" }]),
        ),
    ];
    drop(world.balancers.hear(Told::Pools(Heard::All(pools))));
    let asking = |address: &str| Wanted { addresses: vec![address.parse().unwrap()], ..of_port(80) };
    world.fails("web", &asking("192.0.2.70"), "AddressNotSelectable");
    world.fails("web", &asking("192.0.2.66"), "AddressInUse");
    for outside in ["198.51.100.7", "203.0.113.1", "192.0.2.8"] {
        world.fails("web", &asking(outside), "AddressOutsidePools");
    }
    world.ensure("web", &asking("192.0.2.7")).unwrap();
    assert_eq!(world.objects[&world.id("web")]["spec"]["ipPool"], "one");
    world.allocate("web", "192.0.2.9");
    let told = world.told("web");
    assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "AddressDiffers"));
    world.fails("web", &asking("192.0.2.7"), "AddressDiffers");
}

#[test]
fn what_the_host_says_of_an_address_that_is_not_there_is_told() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    let id = world.id("web");
    let condition = json!({ "type": "Ready", "status": "False", "message": "no available IP" });
    world.change(&id, &json!({ "status": { "conditions": [condition] } }));
    let told = world.told("web");
    assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "AddressNotAllocated"));
    assert_eq!(told.message, "the host has assigned no address: no available IP");
    world.allocate("web", "192.0.2.7");
    assert_eq!(world.told("web").state(), State::Ready);
    // A further request fails, and the present configuration stays in force.
    let failure = Failure::new("PortInUse", "it is");
    let asked = Asked { service: service("web"), wanted: of_port(80), failure };
    world.balancers.asked.insert(("ns/dev".into(), "u-web".into()), asked);
    let told = world.told("web");
    assert_eq!((told.state(), told.addresses.len(), told.reason.as_str()), (State::Failed, 1, "PortInUse"));
}

#[test]
fn what_is_heard_late_is_not_put_in_the_place_of_what_was_written() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    let old: Balancer = serde_json::from_value(world.objects[&world.id("web")].clone()).unwrap();
    world.ensure("web", &of_port(81)).unwrap();
    drop(world.balancers.hear(Told::Balancers(Heard::There(old.clone()))));
    assert_eq!(world.balancers.own("ns/dev", &service("web")).unwrap().wanted, Some(of_port(81)));
    // The report is about an earlier object of the same name.
    let mut other = old;
    other.metadata.uid = Some("other".into());
    drop(world.balancers.hear(Told::Balancers(Heard::Gone(other))));
    assert!(world.balancers.own("ns/dev", &service("web")).is_some());
    let gone = {
        let begun = world.balancers.list_begins();
        world.balancers.listed("ns/dev", &begun, Vec::new())
    };
    assert_eq!((gone.len(), world.balancers.keys(None).len()), (1, 0));
}

#[test]
fn a_list_says_nothing_of_what_has_changed_since_it_began() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    let web: Balancer = serde_json::from_value(world.objects[&world.id("web")].clone()).unwrap();
    let id = world.id("web");
    let (early, late) = (world.balancers.list_begins(), world.balancers.list_begins());
    world.ensure("new", &of_port(81)).unwrap();
    drop(world.balancers.drop(&id));
    drop(world.balancers.listed("ns/dev", &early, vec![web.clone()]));
    assert!(world.balancers.get(&id).is_none(), "it is deleted");
    assert!(world.balancers.own("ns/dev", &service("new")).is_some(), "it was made meanwhile");
    world.balancers.list_failed(&late);
    let now = world.balancers.list_begins();
    drop(world.balancers.listed("ns/dev", &now, vec![web]));
    assert!(world.balancers.get(&id).is_some());
    assert!(world.balancers.own("ns/dev", &service("new")).is_none());
}
