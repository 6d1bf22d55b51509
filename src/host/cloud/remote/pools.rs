//! Pools of the host cluster: finds the pool with a requested address, and describes pools for people. Pure.
//!
//! Harvester chooses addresses by itself and offers no way to request one. It assigns a particular address only if
//! that is the only one of a pool, or if the same load balancer had it before.

use std::net::IpAddr;

use super::super::meet::Failure;
use super::super::wanted::{Service, Wanted};
use super::object;
use super::plan::Plan;
use crate::addresses::{self, Range, Subnet};
use crate::host::backends::kubevirt::balancers::{Pool, PoolRange, PoolScope};
use crate::wire::proto::v1;

/// Returns the name of the pool from which Harvester will assign the requested address to this Service.
///
/// # Errors
/// If no pool that the cluster may use has the address, it is in use, or Harvester may choose another one.
pub fn of(plan: &Plan<'_>, service: &Service, wanted: &Wanted, asked: IpAddr) -> Result<String, Failure> {
    let Some(pools) = &plan.balancers.pools else {
        return Err(Failure::new(
            "PoolsUnknown",
            "the pools of addresses of the host have not been read yet",
        ));
    };
    let (namespace, label) = plan.cluster.split_once('/').unwrap_or_default();
    let fits = |pool: &&Pool| {
        let network = &pool.spec.selector.network;
        let has_network = match wanted.network.as_str() {
            "" => network.is_empty() || plan.settings.has_network(plan.cluster, network),
            asked => network == asked,
        };
        has_network
            && pool.spec.selector.scope.iter().any(|scope| has(scope, namespace, label))
            && pool.spec.ranges.iter().filter_map(range).any(|range| range.contains(asked))
    };
    let pool = pools.values().find(fits).ok_or_else(|| {
        let words = format!("{asked} is in no pool of addresses that this cluster may use for it");
        Failure::new("AddressOutsidePools", words)
    })?;
    let (status, text) = (&pool.status, asked.to_string());
    let own = format!("{namespace}/{}", object::name(label, service));
    if status.allocated.get(&text).is_some_and(|holder| *holder != own) {
        return Err(Failure::new("AddressInUse", format!("{asked} is in use")));
    }
    let had = |holder: &String| *holder == own;
    let is_given = status.total == 1
        || status.allocated.get(&text).is_some_and(had)
        || status.allocated_history.get(&text).is_some_and(had);
    let name = pool.metadata.name.clone().unwrap_or_default();
    if is_given {
        return Ok(name);
    }
    let words = format!(
        "the host chooses addresses by itself, so {asked} cannot be requested; that needs a pool (IPPool) \
         with only that address"
    );
    Err(Failure::new("AddressNotSelectable", words))
}

/// Reports whether a scope includes this cluster. A scope of a particular project never does, since
/// the namespaces of the project are unknown.
fn has(scope: &PoolScope, namespace: &str, cluster: &str) -> bool {
    let is = |of: &str, one: &str| of == "*" || of == one;
    is(&scope.project, "")
        && is(&scope.namespace, namespace)
        && (is(&scope.guest_cluster, cluster) || scope.guest_cluster.is_empty())
}

/// Parses the addresses of a range; returns `None` if it is invalid.
fn range(of: &PoolRange) -> Option<Range> {
    // Like Harvester, accept an address within the subnet instead of the subnet's own.
    let all = Subnet::parse_interface(&of.subnet).ok()?.1.range();
    let one = |text: &str, usual: IpAddr| {
        if text.is_empty() { Some(usual) } else { addresses::parse(text).ok() }
    };
    Range::new(one(&of.range_start, all.first())?, one(&of.range_end, all.last())?).ok()
}

/// Describes a pool for people.
pub fn told(pool: &Pool) -> v1::AddressPool {
    let text = |range: &PoolRange| match (range.range_start.as_str(), range.range_end.as_str()) {
        ("", "") => range.subnet.clone(),
        (first, last) => format!("{first}-{last}"),
    };
    let scope = |scope: &PoolScope| {
        let parts = [&scope.namespace, &scope.guest_cluster];
        parts.map(|part| if part.is_empty() { "*" } else { part }).join("/")
    };
    v1::AddressPool {
        name: pool.metadata.name.clone().unwrap_or_default(),
        ranges: pool.spec.ranges.iter().map(text).collect(),
        network: pool.spec.selector.network.clone(),
        clusters: pool.spec.selector.scope.iter().map(scope).collect(),
        size: pool.status.total,
        taken: pool.status.total.saturating_sub(pool.status.available),
        ..v1::AddressPool::default()
    }
}
