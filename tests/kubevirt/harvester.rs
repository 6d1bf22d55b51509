//! Harvester's load-balancer controller and webhook, as far as load balancers of guest clusters need them: one task that looks at all
//! of them again and again. It gives addresses of the pool that matches, keeps an object until its address is given back, and says in
//! the condition `Ready` why it has none.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::api::Api;
use crate::client::{MERGE, call};
use crate::model::objects::{Kind, is_deleted, items, key, namespace, text};

pub const BALANCERS: &str = "/apis/loadbalancer.harvesterhci.io/v1beta1/loadbalancers";
const POOLS: &str = "/apis/loadbalancer.harvesterhci.io/v1beta1/ippools";
const FINALIZER: &str = "wrangler.cattle.io/harvester-lb-controller";
const OURS: &str = "loadbalancer.harvesterhci.io";
const PACE: Duration = Duration::from_millis(40);

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
        let (held, api) = (Arc::new(AtomicBool::new(false)), api.clone());
        let holds = Arc::clone(&held);
        let task = tokio::spawn(async move {
            loop {
                if !holds.load(Ordering::SeqCst) {
                    pass(&api).await;
                }
                tokio::time::sleep(PACE).await;
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
    let total = number(last) - number(first) + 1;
    let pool = json!({
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "IPPool",
        "metadata": { "name": name },
        "spec": {
            "ranges": [{ "subnet": format!("{first}/24"), "rangeStart": first, "rangeEnd": last }],
            "selector": {
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

/// Whether a change was made.
async fn merge(api: &Api, path: &str, change: &Value) -> bool {
    let answer = call(api, Method::PATCH, path, MERGE, Some(change)).await;
    answer.is_ok_and(|(status, _)| status.is_success())
}

async fn pass(api: &Api) {
    for balancer in api.list(BALANCERS).await {
        // What is refused is tried again.
        let mut change = look(api, &balancer).await;
        if change.is_object() {
            change["metadata"]["resourceVersion"] = balancer["metadata"]["resourceVersion"].clone();
            let _ = merge(api, &path(&balancer), &change).await;
        }
    }
}

/// What is to be changed of a load balancer now.
async fn look(api: &Api, balancer: &Value) -> Value {
    let has_finalizer = items(&balancer["metadata"]["finalizers"]).any(|one| one == FINALIZER);
    if is_deleted(balancer) {
        if has_finalizer {
            give_back(api, balancer).await;
            return json!({ "metadata": { "finalizers": null } });
        }
        return Value::Null;
    }
    let annotations = &balancer["metadata"]["annotations"];
    let cluster = text(&annotations[format!("{OURS}/cluster")]);
    let network = match text(&annotations[format!("{OURS}/network")]) {
        "" => first_network(api, namespace(balancer), cluster).await,
        network => network.to_owned(),
    };
    let written =
        json!({ format!("{OURS}/network"): network, format!("{OURS}/namespace"): namespace(balancer) });
    if !has_finalizer || annotations[format!("{OURS}/network")] != written[format!("{OURS}/network")] {
        return json!({ "metadata": { "finalizers": [FINALIZER], "annotations": written } });
    }
    if !text(&balancer["status"]["allocatedAddress"]["ip"]).is_empty() {
        return Value::Null;
    }
    if balancer["spec"]["ipam"] == "dhcp" {
        return json!({ "status": { "allocatedAddress": { "ip": "0.0.0.0" }, "conditions": ready("True", "") } });
    }
    match allocate(api, balancer, &network, cluster).await {
        Ok((ip, pool)) => {
            let allocated =
                json!({ "ip": ip, "ipPool": pool, "mask": "255.255.255.0", "gateway": "0.0.0.0" });
            json!({ "status": { "allocatedAddress": allocated, "conditions": ready("True", "") } })
        }
        Err(why) if balancer["status"]["conditions"][0]["message"] == why => Value::Null,
        Err(why) => json!({ "status": { "conditions": ready("False", &why) } }),
    }
}

fn ready(status: &str, message: &str) -> Value {
    json!([{ "type": "Ready", "status": status, "message": message }])
}

async fn first_network(api: &Api, space: &str, cluster: &str) -> String {
    let all = api.list(&Kind::Vmi.within(space)).await;
    let mut of =
        all.iter().filter(|vmi| vmi["metadata"]["labels"]["guestcluster.harvesterhci.io/name"] == cluster);
    let name = of.find_map(|vmi| {
        items(&vmi["spec"]["networks"]).find_map(|one| one["multus"]["networkName"].as_str())
    });
    name.unwrap_or_default().to_owned()
}

/// An address for a load balancer: the one that it had before, else the next one.
async fn allocate(
    api: &Api,
    balancer: &Value,
    network: &str,
    cluster: &str,
) -> Result<(String, String), String> {
    let wanted = text(&balancer["spec"]["ipPool"]);
    let is = |of: &Value, one: &str| of == "*" || of == one;
    let matches = |pool: &&Value| {
        let selector = &pool["spec"]["selector"];
        let has =
            |one: &Value| is(&one["namespace"], namespace(balancer)) && is(&one["guestCluster"], cluster);
        text(&selector["network"]) == network && items(&selector["scope"]).any(has)
    };
    let pools = api.list(POOLS).await;
    let pool = if wanted.is_empty() {
        pools.iter().find(matches)
    } else {
        pools.iter().find(|pool| pool["metadata"]["name"] == wanted)
    };
    let pool = pool.ok_or_else(|| {
        format!("no matched IPPool with requirement &{{Network:{network} Cluster:{cluster}}}")
    })?;
    let name = text(&pool["metadata"]["name"]).to_owned();
    let (range, own) = (&pool["spec"]["ranges"][0], key(balancer));
    let of = |field: &str| -> BTreeMap<String, String> {
        serde_json::from_value(pool["status"][field].clone()).unwrap_or_default()
    };
    let (allocated, history) = (of("allocated"), of("allocatedHistory"));
    let all = (number(text(&range["rangeStart"]))..=number(text(&range["rangeEnd"]))).map(Ipv4Addr::from);
    let free: Vec<String> =
        all.map(|ip| ip.to_string()).filter(|ip| allocated.get(ip).is_none_or(|of| *of == own)).collect();
    let had = free.iter().find(|ip| history.get(*ip) == Some(&own) || allocated.get(*ip) == Some(&own));
    let last = number(text(&pool["status"]["lastAllocated"]));
    let next = had.or_else(|| free.iter().find(|ip| number(ip) > last)).or_else(|| free.first());
    let ip = next.ok_or_else(|| format!("fail to get ip from pool {name}, error: no available IP"))?.clone();
    let available = free.len() - 1;
    let status = json!({ "allocated": { ip.clone(): own }, "lastAllocated": ip, "available": available });
    let change = json!({
        "metadata": { "resourceVersion": pool["metadata"]["resourceVersion"] }, "status": status,
    });
    let is_given = merge(api, &format!("{POOLS}/{name}"), &change).await;
    if is_given { Ok((ip, name)) } else { Err("the pool has changed".to_owned()) }
}

async fn give_back(api: &Api, balancer: &Value) {
    let given = &balancer["status"]["allocatedAddress"];
    let (ip, name) = (text(&given["ip"]), text(&given["ipPool"]));
    if name.is_empty() {
        return;
    }
    let path = format!("{POOLS}/{name}");
    let Some(pool) = api.get(&path).await else { return };
    if pool["status"]["allocated"][ip] == key(balancer) {
        let available = pool["status"]["available"].as_u64().unwrap_or_default() + 1;
        let status = json!({
            "allocated": { ip: null }, "allocatedHistory": { ip: key(balancer) }, "available": available,
        });
        let _ = merge(api, &path, &json!({ "status": status })).await;
    }
}
