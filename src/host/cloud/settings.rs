//! What the settings say of load balancers, as this module uses it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::access::Pattern;
use crate::addresses::{Range, Subnet};

/// Load balancers of a cluster for which nothing is said: no cluster takes all addresses of a host by mistake.
const USUAL_LOAD_BALANCERS: u32 = 1024;

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The pools, in the order in which they are written.
    pub pools: Vec<Pool>,
    /// What clusters may, by their names; one that is not named may do everything.
    pub clusters: BTreeMap<String, Policy>,
    /// The networks of VMs: by their lasting identifiers, and by hardware addresses in lower case.
    pub networks: BTreeMap<String, BTreeMap<String, String>>,
    /// The names of the networks that each cluster's VMs are attached to.
    pub of_clusters: BTreeMap<String, BTreeSet<String>>,
    /// When what a cluster has is given back by itself, of which no VM exists any more; none: never.
    pub release_after: Option<Duration>,
}

/// Addresses that clusters get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its addresses; no two of all pools overlap.
    pub ranges: Vec<Range>,
    /// The network that they belong to, if that is said.
    pub network: Option<String>,
    /// The clusters that may have them; none: all.
    pub clusters: Option<Vec<Pattern>>,
    /// The greatest is tried first.
    pub priority: u32,
    /// Where the host half may forward to; empty: it forwards nothing from these addresses.
    pub forward_to: Vec<Subnet>,
    /// The interface of the host that is to have its addresses while something is forwarded from them.
    pub interface: Option<String>,
    /// Ports that nothing is forwarded from.
    pub reserved_ports: Vec<u16>,
}

/// What one cluster may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Most load balancers, if that is said.
    pub load_balancers: Option<u32>,
    /// Names of VMs that may ask for them; none: all.
    pub controllers: Option<Vec<String>>,
}

impl Settings {
    /// Whether this VM may ask for load balancers of its cluster.
    fn may_ask(&self, cluster: &str, vm: &str) -> bool {
        let names = self.clusters.get(cluster).and_then(|policy| policy.controllers.as_ref());
        names.is_none_or(|names| names.iter().any(|name| name == vm))
    }

    /// That this VM may ask for load balancers of its cluster.
    ///
    /// # Errors
    /// In words for its cluster, if it may not.
    pub fn check_asker(&self, cluster: &str, vm: &str) -> Result<(), String> {
        if self.may_ask(cluster, vm) {
            return Ok(());
        }
        let words = "this VM may not request load balancers; see controllers in the settings of the host";
        Err(words.to_owned())
    }

    /// That a cluster may have one more load balancer than these.
    ///
    /// # Errors
    /// In words for the cluster, if it may not.
    pub fn check_count(&self, cluster: &str, has: usize) -> Result<(), String> {
        let most = self.most(cluster);
        if has < most {
            return Ok(());
        }
        Err(format!("the cluster has {has} load balancers, and may have at most {most}"))
    }

    /// How many load balancers a cluster may have.
    fn most(&self, cluster: &str) -> usize {
        let most = self.clusters.get(cluster).and_then(|policy| policy.load_balancers);
        usize::try_from(most.unwrap_or(USUAL_LOAD_BALANCERS)).unwrap_or(usize::MAX)
    }

    /// Whether VMs of the cluster are attached to a network.
    pub fn has_network(&self, cluster: &str, network: &str) -> bool {
        self.of_clusters.get(cluster).is_some_and(|networks| networks.contains(network))
    }

    /// The pool of this name.
    pub fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// Whether anything is forwarded from any pool.
    pub fn forwards(&self) -> bool {
        self.pools.iter().any(Pool::forwards)
    }

    /// The pools that a load balancer of a cluster may have its address from, in the order in which they are tried: those whose
    /// scope has the cluster, and of those the ones of the network that is asked for, or, if none is, of no network or of one
    /// that the cluster's VMs are attached to.
    pub fn eligible(&self, cluster: &str, network: &str, forwarded: bool) -> Vec<&Pool> {
        let has_network = |pool: &Pool| match (&pool.network, network) {
            (None, "") => true,
            (Some(of), "") => self.has_network(cluster, of),
            (of, asked) => of.as_deref() == Some(asked),
        };
        let has_cluster = |pool: &Pool| {
            pool.clusters.as_ref().is_none_or(|names| names.iter().any(|one| one.matches(cluster)))
        };
        let mut found: Vec<_> = self
            .pools
            .iter()
            .filter(|pool| pool.forwards() == forwarded && has_cluster(pool) && has_network(pool))
            .collect();
        found.sort_by_key(|pool| std::cmp::Reverse(pool.priority));
        found
    }
}

impl Pool {
    /// Whether the host half forwards from its addresses. Nobody else announces those.
    pub fn forwards(&self) -> bool {
        !self.forward_to.is_empty()
    }

    /// Whether an address is one of its.
    pub fn has(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address))
    }

    /// How many addresses it has of a family.
    pub fn size(&self, ipv4: bool) -> u128 {
        let of_family = self.ranges.iter().filter(|range| range.is_ipv4() == ipv4);
        of_family.fold(0, |sum, range| sum.saturating_add(range.len()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A pool with these ranges, for all clusters.
    pub fn pool(name: &str, ranges: &[&str]) -> Pool {
        Pool {
            name: name.into(),
            ranges: ranges.iter().map(|range| Range::parse(range).unwrap()).collect(),
            network: None,
            clusters: None,
            priority: 0,
            forward_to: Vec::new(),
            interface: None,
            reserved_ports: Vec::new(),
        }
    }

    #[test]
    fn pools_are_tried_whose_scope_and_network_match() {
        let of = |names: &[&str]| Some(names.iter().map(|name| name.parse().unwrap()).collect());
        let pools = vec![
            pool("all", &["192.0.2.1"]),
            Pool { clusters: of(&["dev", "team-*"]), priority: 5, ..pool("some", &["192.0.2.2"]) },
            Pool { network: Some("lan".into()), priority: 9, ..pool("lan", &["192.0.2.3"]) },
            Pool { forward_to: vec![Subnet::parse("10.0.0.0/8").unwrap()], ..pool("nat", &["192.0.2.4"]) },
        ];
        let of_clusters = [("dev".to_owned(), BTreeSet::from(["lan".to_owned()]))].into();
        let settings = Settings { pools, of_clusters, ..Settings::default() };
        for (cluster, network, forwarded, expected) in [
            ("dev", "", false, vec!["lan", "some", "all"]),
            ("team-7", "", false, vec!["some", "all"]),
            ("prod", "", false, vec!["all"]),
            ("dev", "lan", false, vec!["lan"]),
            ("dev", "wan", false, vec![]),
            ("prod", "", true, vec!["nat"]),
        ] {
            let found = settings.eligible(cluster, network, forwarded);
            let names: Vec<_> = found.iter().map(|pool| pool.name.as_str()).collect();
            assert_eq!(names, expected, "{cluster} {network}");
        }
    }
}
