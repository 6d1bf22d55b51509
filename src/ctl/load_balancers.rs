//! `guestctl lb` and `guestctl pools`: load balancers of clusters, and the pools of their addresses.

use serde::Serialize;

use super::Error;
use super::client::{Client, answer};
use super::print::Printer;
use crate::text;
use crate::wire::proto::v1::load_balancer::State;
use crate::wire::proto::v1::{
    AddressPool, Announcing, ClusterLoadBalancer, ListAddressPoolsRequest, ListClusterLoadBalancersRequest,
    LoadBalancer, RemoveClusterLoadBalancerRequest,
};

/// Operation on load balancers.
#[derive(Debug, Clone)]
pub enum Action {
    /// List load balancers.
    List {
        /// Cluster that the list is limited to.
        cluster: Option<String>,
        /// True to show more columns.
        wide: bool,
    },
    /// Release a load balancer.
    Remove {
        /// Cluster of the load balancer.
        cluster: String,
        /// UID of the Service.
        uid: String,
    },
    /// List the address pools.
    Pools,
}

/// Load balancer for programs. Keys are part of the interface: add, never change.
#[derive(Debug, Serialize)]
struct Value {
    cluster: String,
    namespace: String,
    service: String,
    uid: String,
    name: String,
    state: &'static str,
    reason: String,
    message: String,
    addresses: Vec<String>,
    ports: Vec<String>,
    network: String,
    announcing: &'static str,
    healthy: u32,
    failing: Vec<Failing>,
    orphan: bool,
}

/// Node that takes no traffic, for programs.
#[derive(Debug, Serialize)]
struct Failing {
    vm: String,
    uuid: String,
    problem: String,
}

/// Address pool for programs.
#[derive(Debug, Serialize)]
struct Pool {
    name: String,
    ranges: Vec<String>,
    network: String,
    clusters: Vec<String>,
    size: u64,
    taken: u64,
    forward_to: Vec<String>,
    interface: String,
}

/// All address pools for programs.
#[derive(Debug, Serialize)]
struct Pools {
    pools: Vec<Pool>,
    problems: Vec<String>,
}

/// Released load balancer, for programs.
#[derive(Debug, Serialize)]
struct Removed {
    removed: String,
}

/// Carries out an operation on load balancers.
///
/// # Errors
/// Fails if the operation fails, the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, action: Action) -> Result<(), Error> {
    match action {
        Action::List { cluster, wide } => {
            let request = ListClusterLoadBalancersRequest { cluster: cluster.unwrap_or_default() };
            let all = answer(client.list_cluster_load_balancers(request), "").await?.load_balancers;
            let values: Vec<_> = all.into_iter().map(Value::from).collect();
            printer.value(&values, || rows(&values, wide))?;
        }
        Action::Remove { cluster, uid } => {
            let service_uid = uid.clone();
            let request = RemoveClusterLoadBalancerRequest { cluster, service_uid };
            let call = async { client.remove_cluster_load_balancer(request).await.map_err(said) };
            answer(call, "").await?;
            let words = format!("{uid}: released\n");
            printer.value(&Removed { removed: uid }, || words)?;
        }
        Action::Pools => {
            let found = answer(client.list_address_pools(ListAddressPoolsRequest {}), "").await?;
            let pools = found.pools.into_iter().map(Pool::from).collect();
            let pools = Pools { pools, problems: found.problems };
            printer.value(&pools, || pools_table(&pools))?;
        }
    }
    Ok(())
}

/// Changes `NOT_FOUND` to a code that does not mean a missing VM: here a load balancer was not found, and the
/// daemon's message says so.
fn said(status: tonic::Status) -> tonic::Status {
    match status.code() {
        tonic::Code::NotFound => tonic::Status::failed_precondition(status.message()),
        _ => status,
    }
}

impl From<ClusterLoadBalancer> for Value {
    fn from(one: ClusterLoadBalancer) -> Self {
        let told: LoadBalancer = one.load_balancer.unwrap_or_default();
        let state = match told.state() {
            State::Unspecified => "unknown",
            State::Pending => "pending",
            State::Ready => "ready",
            State::Failed => "failed",
            State::Releasing => "releasing",
        };
        let announcing = match told.announcing() {
            Announcing::Unspecified => "",
            Announcing::KubeVip => "kube-vip",
            Announcing::None => "none",
            Announcing::Host => "host",
        };
        let service = told.service.unwrap_or_default();
        let failing = told.failing.into_iter().map(|one| Failing {
            vm: one.vm_name,
            uuid: one.vm_uid,
            problem: one.problem,
        });
        Self {
            cluster: one.cluster,
            namespace: service.namespace,
            service: service.name,
            uid: service.uid,
            name: told.name,
            state,
            reason: told.reason,
            message: told.message,
            addresses: told.addresses.into_iter().map(|held| held.address).collect(),
            ports: one.ports,
            network: told.network,
            announcing,
            healthy: told.healthy,
            failing: failing.collect(),
            orphan: one.orphan,
        }
    }
}

impl From<AddressPool> for Pool {
    fn from(pool: AddressPool) -> Self {
        let AddressPool { name, ranges, network, clusters, size, taken, forward_to, interface } = pool;
        Self { name, ranges, network, clusters, size, taken, forward_to, interface }
    }
}

fn rows(all: &[Value], wide: bool) -> String {
    let mut head = vec!["CLUSTER", "SERVICE", "ADDRESSES", "PORTS", "BY", "STATE", "NODES"];
    if wide {
        head.extend(["UID", "PROBLEM"]);
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for one in all {
        let nodes = usize::try_from(one.healthy).unwrap_or(usize::MAX).saturating_add(one.failing.len());
        let state =
            if one.orphan { format!("{}, its cluster has no VM", one.state) } else { one.state.to_owned() };
        let mut row = vec![
            one.cluster.clone(),
            format!("{}/{}", one.namespace, one.service),
            text::or_dash(&one.addresses.join(",")),
            text::or_dash(&one.ports.join(",")),
            one.announcing.to_owned(),
            state,
            format!("{}/{nodes}", one.healthy),
        ];
        if wide {
            let failing = one.failing.iter().map(|node| format!("{}: {}", node.vm, node.problem));
            let problems: Vec<_> = Some(one.message.clone())
                .filter(|words| !words.is_empty())
                .into_iter()
                .chain(failing)
                .collect();
            row.extend([one.uid.clone(), text::or_dash(&problems.join("; "))]);
        }
        rows.push(row);
    }
    text::table(&rows)
}

fn pools_table(pools: &Pools) -> String {
    let head = ["NAME", "TAKEN", "OF", "RANGES", "CLUSTERS", "NETWORK", "FORWARDS TO"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for pool in &pools.pools {
        let clusters = if pool.clusters.is_empty() { "all".to_owned() } else { pool.clusters.join(",") };
        rows.push(vec![
            pool.name.clone(),
            pool.taken.to_string(),
            pool.size.to_string(),
            pool.ranges.join(","),
            clusters,
            text::or_dash(&pool.network),
            text::or_dash(&pool.forward_to.join(",")),
        ]);
    }
    let problems = pools.problems.iter().map(|problem| format!("\n{problem}\n"));
    text::table(&rows) + &problems.collect::<String>()
}
