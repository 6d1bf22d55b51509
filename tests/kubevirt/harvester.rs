//! Harvester's load-balancer controller and webhook, as far as load balancers of guest clusters need them: one task that looks at all
//! of them whenever something of them changes, as a watch tells it, and now and then. It gives addresses of the pool that matches, keeps an object until its address is given back, and says in
//! the condition `Ready` why it has none.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};

use crate::api::Api;
use crate::client::{JSON, Watch, call, list};
use crate::model::objects::{Kind, is_deleted, items, key, namespace, text};

pub const BALANCERS: &str = "/apis/loadbalancer.harvesterhci.io/v1beta1/loadbalancers";
const POOLS: &str = "/apis/loadbalancer.harvesterhci.io/v1beta1/ippools";
const FINALIZER: &str = "wrangler.cattle.io/harvester-lb-controller";
const OURS: &str = "loadbalancer.harvesterhci.io";
const NETWORK: &str = "loadbalancer.harvesterhci.io/network";
const PACE: Duration = Duration::from_millis(40);
/// Between two looks while nothing changes: there may be another pool.
const SELDOM: Duration = Duration::from_millis(200);
/// Load balancers that are written at a time.
const AT_ONCE: usize = 8;

/// It, until this is dropped.
pub struct Harvester {
    task: JoinHandle<()>,
    held: Arc<AtomicBool>,
}

impl Drop for Harvester {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Harvester {
    pub fn start(api: &Api) -> Self {
        let (held, api) = (Arc::new(AtomicBool::new(false)), api.keeping());
        let holds = Arc::clone(&held);
        let task = tokio::spawn(async move {
            let known = Arc::new(Known::default());
            let mut watching = JoinSet::new();
            watching.spawn(watch(api.clone(), Arc::clone(&known)));
            loop {
                if !holds.load(Ordering::SeqCst) {
                    pass(&api, &known).await;
                }
                tokio::time::sleep(PACE).await;
                drop(tokio::time::timeout(SELDOM, known.changed.notified()).await);
            }
        });
        Self { task, held }
    }

    /// It does nothing from now on, or goes on.
    pub fn hold(&self, is_held: bool) {
        self.held.store(is_held, Ordering::SeqCst);
    }
}

/// Makes a pool of the addresses from `first` to `last` for such guest clusters.
pub async fn pool(api: &Api, name: &str, network: &str, cluster: &str, (first, last): (&str, &str)) {
    let (from, to) = (number(first), number(last));
    let total = to - from + 1 - u32::from((from..=to).contains(&gateway(from, to)));
    // Two may match the same clusters only if one comes first; the newest does.
    let priority = api.list(POOLS).await.len() + 1;
    let pool = json!({
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "IPPool",
        "metadata": { "name": name },
        "spec": {
            "ranges": [{ "subnet": format!("{first}/{}", prefix(from, to)), "rangeStart": first, "rangeEnd": last }],
            "selector": {
                "priority": priority,
                "network": network,
                "scope": [{ "project": "*", "namespace": "*", "guestCluster": cluster }],
            },
        },
        "status": { "total": total, "available": total, "lastAllocated": first, "allocated": {}, "allocatedHistory": {} },
    });
    api.create(POOLS, &pool).await;
}

/// The pool of this name.
pub async fn of_pool(api: &Api, name: &str) -> Value {
    api.get(&format!("{POOLS}/{name}")).await.unwrap()
}

/// The path of a load balancer.
pub fn path(object: &Value) -> String {
    let (space, name) = (namespace(object), text(&object["metadata"]["name"]));
    format!("/apis/loadbalancer.harvesterhci.io/v1beta1/namespaces/{space}/loadbalancers/{name}")
}

fn number(address: &str) -> u32 {
    address.parse::<Ipv4Addr>().unwrap().into()
}

/// The load balancers, as a watch has told of them.
#[derive(Default)]
struct Known {
    all: Mutex<BTreeMap<String, Value>>,
    changed: Notify,
}

impl Known {
    fn set(&self, change: impl FnOnce(&mut BTreeMap<String, Value>)) {
        change(&mut self.all.lock().unwrap());
        self.changed.notify_one();
    }
}

/// Keeps what is known as the API server has it, for ever.
async fn watch(api: Api, known: Arc<Known>) {
    loop {
        // A server that a test has ended comes back.
        drop(watch_once(&api, &known).await);
        tokio::time::sleep(PACE).await;
    }
}

async fn watch_once(api: &Api, known: &Known) -> std::io::Result<()> {
    let (all, version) = list(api, BALANCERS).await?;
    known.set(|before| *before = all.into_iter().map(|one| (key(&one), one)).collect());
    let mut watch = Watch::open(api, BALANCERS, &version).await?;
    while let Some(mut event) = watch.next().await? {
        let object = event["object"].take();
        match text(&event["type"]) {
            "ADDED" | "MODIFIED" => known.set(|all| drop(all.insert(key(&object), object))),
            "DELETED" => known.set(|all| drop(all.remove(&key(&object)))),
            _ => break,
        }
    }
    Ok(())
}

async fn put(api: &Api, path: &str, object: &Value) -> bool {
    let answer = call(api, Method::PUT, path, JSON, Some(object)).await;
    answer.is_ok_and(|(status, _)| status.is_success())
}

/// A look at everything: what is given of pools is written there first, then what has come of it to the load balancers. What is
/// refused, or interrupted, is tried again with the next look; what was reserved for one that is gone stays reserved.
async fn pass(api: &Api, known: &Known) {
    let balancers: Vec<_> =
        known.all.lock().unwrap().values().filter(|one| !is_settled(one)).cloned().collect();
    let mut world = World { pools: api.list(POOLS).await, used: BTreeSet::new(), vmis: Vec::new() };
    if balancers.iter().any(|one| text(&one["metadata"]["annotations"][NETWORK]).is_empty()) {
        world.vmis = api.list(&Kind::Vmi.all()).await;
    }
    let mut changed = Vec::new();
    for mut balancer in balancers {
        if world.look(&mut balancer) {
            changed.push(balancer);
        }
    }
    for number in world.used {
        let pool = &world.pools[number];
        if !put(api, &format!("{POOLS}/{}", text(&pool["metadata"]["name"])), pool).await {
            return;
        }
    }
    let mut writing = JoinSet::new();
    for balancer in changed {
        let api = api.clone();
        writing.spawn(async move { put(&api, &path(&balancer), &balancer).await });
        if writing.len() >= AT_ONCE {
            writing.join_next().await;
        }
    }
    writing.join_all().await;
}

/// Whether nothing is left to do for a load balancer.
fn is_settled(balancer: &Value) -> bool {
    let has_finalizer = items(&balancer["metadata"]["finalizers"]).any(|one| one == FINALIZER);
    let given = &balancer["status"]["allocatedAddress"]["ip"];
    has_finalizer && !is_deleted(balancer) && !text(given).is_empty()
}

/// What there is beside the load balancers.
struct World {
    pools: Vec<Value>,
    /// The pools that were changed.
    used: BTreeSet<usize>,
    vmis: Vec<Value>,
}

impl World {
    /// Does what is next for a load balancer; whether that has changed.
    fn look(&mut self, balancer: &mut Value) -> bool {
        let has_finalizer = items(&balancer["metadata"]["finalizers"]).any(|one| one == FINALIZER);
        if is_deleted(balancer) {
            if has_finalizer {
                self.give_back(balancer);
                balancer["metadata"]["finalizers"] = Value::Null;
            }
            return has_finalizer;
        }
        let annotations = &balancer["metadata"]["annotations"];
        let cluster = text(&annotations[format!("{OURS}/cluster")]).to_owned();
        if text(&annotations[NETWORK]).is_empty() {
            let network = self.first_network(namespace(balancer), &cluster);
            balancer["metadata"]["annotations"][format!("{OURS}/namespace")] = namespace(balancer).into();
            balancer["metadata"]["annotations"][NETWORK] = network.into();
        }
        let before = balancer["status"].clone();
        if text(&before["allocatedAddress"]["ip"]).is_empty() {
            let (given, ready) = match self.allocate(balancer, &cluster) {
                Ok(given) => (given, ready("True", "")),
                Err(why) => (Value::Null, ready("False", &why)),
            };
            if given.is_object() {
                balancer["status"]["allocatedAddress"] = given;
            }
            balancer["status"]["conditions"] = ready;
            if balancer["status"] != before {
                return true;
            }
        }
        // It hears of the end of a load balancer only from here on.
        if !has_finalizer {
            balancer["metadata"]["finalizers"] = json!([FINALIZER]);
        }
        !has_finalizer
    }

    fn first_network(&self, space: &str, cluster: &str) -> String {
        let mut of = self.vmis.iter().filter(|vmi| {
            namespace(vmi) == space
                && vmi["metadata"]["labels"]["guestcluster.harvesterhci.io/name"] == cluster
        });
        let name = of.find_map(|vmi| {
            items(&vmi["spec"]["networks"]).find_map(|one| one["multus"]["networkName"].as_str())
        });
        name.unwrap_or_default().to_owned()
    }

    /// An address for a load balancer: the one that it had before, else the next one.
    fn allocate(&mut self, balancer: &Value, cluster: &str) -> Result<Value, String> {
        if balancer["spec"]["ipam"] == "dhcp" {
            return Ok(json!({ "ip": "0.0.0.0" }));
        }
        let (wanted, space) = (text(&balancer["spec"]["ipPool"]), namespace(balancer));
        let network = text(&balancer["metadata"]["annotations"][NETWORK]);
        let is = |of: &Value, one: &str| of == "*" || of == one;
        let fits = |pool: &Value| {
            let selector = &pool["spec"]["selector"];
            let has = |one: &Value| is(&one["namespace"], space) && is(&one["guestCluster"], cluster);
            text(&selector["network"]) == network && items(&selector["scope"]).any(has)
        };
        let all = self.pools.iter().enumerate();
        let number = if wanted.is_empty() {
            let priority = |pool: &Value| pool["spec"]["selector"]["priority"].as_u64();
            all.filter(|(_, pool)| fits(pool)).max_by_key(|(_, pool)| priority(pool))
        } else {
            all.into_iter().find(|(_, pool)| pool["metadata"]["name"] == wanted)
        };
        let number = number.map(|(number, _)| number).ok_or_else(|| {
            format!(
                "no matched IPPool with requirement &{{Network:{network} Project: Namespace:{space} Cluster:{cluster}}}"
            )
        })?;
        let pool = &mut self.pools[number];
        let (name, own) = (text(&pool["metadata"]["name"]).to_owned(), key(balancer));
        let (first, last) = bounds(pool);
        let free: Vec<u32> = (first..=last)
            .filter(|one| *one != gateway(first, last))
            .filter(|one| {
                let holder = &pool["status"]["allocated"][Ipv4Addr::from(*one).to_string()];
                holder.is_null() || *holder == own
            })
            .collect();
        let held = |field: &str, one: u32| pool["status"][field][Ipv4Addr::from(one).to_string()] == own;
        let had = free.iter().find(|one| held("allocatedHistory", **one) || held("allocated", **one));
        let before = text(&pool["status"]["lastAllocated"]).parse::<Ipv4Addr>().map_or(0, u32::from);
        let next = had.or_else(|| free.iter().find(|one| **one > before)).or_else(|| free.first());
        let Some(&ip) = next else {
            let set = format!("{}-{}", Ipv4Addr::from(first), Ipv4Addr::from(last));
            return Err(format!(
                "fail to get ip from pool {name}, error: no IP addresses available in range set: {set}"
            ));
        };
        let (ip, available) = (Ipv4Addr::from(ip).to_string(), free.len() - 1);
        let status = &mut pool["status"];
        if status["allocated"][&ip] != own {
            status["allocated"][&ip] = own.into();
            status["lastAllocated"] = ip.clone().into();
            status["available"] = available.into();
            self.used.insert(number);
        }
        Ok(json!({ "ip": ip, "ipPool": name, "mask": "255.255.255.0", "gateway": "0.0.0.0" }))
    }

    fn give_back(&mut self, balancer: &Value) {
        let given = &balancer["status"]["allocatedAddress"];
        let (ip, name) = (text(&given["ip"]), text(&given["ipPool"]));
        let Some(number) = self.pools.iter().position(|pool| pool["metadata"]["name"] == name) else {
            return;
        };
        let status = &mut self.pools[number]["status"];
        if status["allocated"][ip] == key(balancer) {
            if let Some(allocated) = status["allocated"].as_object_mut() {
                allocated.remove(ip);
            }
            status["allocatedHistory"][ip] = key(balancer).into();
            status["available"] = (status["available"].as_u64().unwrap_or_default() + 1).into();
            self.used.insert(number);
        }
    }
}

fn ready(status: &str, message: &str) -> Value {
    json!([{ "type": "Ready", "status": status, "message": message }])
}

/// The first and the last address of a pool.
fn bounds(pool: &Value) -> (u32, u32) {
    let range = &pool["spec"]["ranges"][0];
    (number(text(&range["rangeStart"])), number(text(&range["rangeEnd"])))
}

/// How many bits of an address say its subnet.
fn prefix(first: u32, last: u32) -> u32 {
    if first >> 8 == last >> 8 { 24 } else { 16 }
}

/// The first address of the subnet, which is the gateway's and nobody else's.
fn gateway(first: u32, last: u32) -> u32 {
    let bits = 32 - prefix(first, last);
    (first >> bits << bits) + 1
}
