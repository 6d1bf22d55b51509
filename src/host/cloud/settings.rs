//! Settings of load balancers in the form that this module uses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::access::Pattern;
use crate::addresses::{Range, Subnet};

/// Limit for a cluster without one in the settings, so that no cluster takes all addresses of a host by mistake.
const USUAL_LOAD_BALANCERS: u32 = 1024;

/// Settings of load balancers on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Pools in the order of the settings.
    pub pools: Vec<Pool>,
    /// Policies by the names of clusters. A cluster that is not named has only the usual limit.
    pub clusters: BTreeMap<String, Policy>,
    /// Networks of the VMs' interfaces, by lasting identifier and by hardware address in lower case.
    pub networks: BTreeMap<String, BTreeMap<String, String>>,
    /// Names of the networks that each cluster's VMs are attached to.
    pub of_clusters: BTreeMap<String, BTreeSet<String>>,
    /// Time after which the load balancers of a cluster without any VM are released; `None`: never.
    pub release_after: Option<Duration>,
}

/// Pool of addresses for load balancers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Name by which records and people refer to the pool.
    pub name: String,
    /// Address ranges of the pool, which overlap with no other range of any pool.
    pub ranges: Vec<Range>,
    /// Network that the addresses belong to, if it is configured.
    pub network: Option<String>,
    /// Patterns of the clusters that may use it; `None`: all.
    pub clusters: Option<Vec<Pattern>>,
    /// Priority: pools with a greater number are tried first.
    pub priority: u32,
    /// Subnets to which the host half may forward; if empty, it forwards nothing from these addresses.
    pub forward_to: Vec<Subnet>,
    /// Interface of the host that gets the addresses from which something is forwarded.
    pub interface: Option<String>,
    /// Ports that are never forwarded.
    pub reserved_ports: Vec<u16>,
}

/// Permissions and limits of one cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Largest number of load balancers, if it is configured.
    pub load_balancers: Option<u32>,
    /// Names of the VMs that may request load balancers; `None`: all.
    pub controllers: Option<Vec<String>>,
}

impl Settings {
    /// Reports whether this VM may request load balancers of its cluster.
    fn may_ask(&self, cluster: &str, vm: &str) -> bool {
        let names = self.clusters.get(cluster).and_then(|policy| policy.controllers.as_ref());
        names.is_none_or(|names| names.iter().any(|name| name == vm))
    }

    /// Checks that this VM may request load balancers of its cluster.
    ///
    /// # Errors
    /// A message for the cluster, if it may not.
    pub fn check_asker(&self, cluster: &str, vm: &str) -> Result<(), String> {
        if self.may_ask(cluster, vm) {
            return Ok(());
        }
        let words = "this VM may not request load balancers; see controllers in the settings of the host";
        Err(words.to_owned())
    }

    /// Checks that a cluster that already `has` so many load balancers may have another one.
    ///
    /// # Errors
    /// A message for the cluster, if it may not.
    pub fn check_count(&self, cluster: &str, has: usize) -> Result<(), String> {
        let most = self.most(cluster);
        if has < most {
            return Ok(());
        }
        Err(format!("the cluster has {has} load balancers, and may have at most {most}"))
    }

    /// Returns how many load balancers a cluster may have.
    fn most(&self, cluster: &str) -> usize {
        let most = self.clusters.get(cluster).and_then(|policy| policy.load_balancers);
        usize::try_from(most.unwrap_or(USUAL_LOAD_BALANCERS)).unwrap_or(usize::MAX)
    }

    /// Reports whether VMs of the cluster are attached to a network.
    pub fn has_network(&self, cluster: &str, network: &str) -> bool {
        self.of_clusters.get(cluster).is_some_and(|networks| networks.contains(network))
    }

    /// Returns the pool of this name.
    pub fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// Reports whether the host half forwards from any pool.
    pub fn forwards(&self) -> bool {
        self.pools.iter().any(Pool::forwards)
    }

    /// Returns the pools from which a load balancer of a cluster may get its address, in the order in which they are
    /// tried. They must admit the cluster. If a network is requested, they must be of that one; otherwise, of no
    /// network or of one that the cluster's VMs are attached to.
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
    /// Reports whether the host half forwards from the addresses of this pool. Only the host announces such addresses.
    pub fn forwards(&self) -> bool {
        !self.forward_to.is_empty()
    }

    /// Reports whether an address belongs to this pool.
    pub fn has(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address))
    }

    /// Returns the number of addresses of one family in this pool.
    pub fn size(&self, ipv4: bool) -> u128 {
        let of_family = self.ranges.iter().filter(|range| range.is_ipv4() == ipv4);
        of_family.fold(0, |sum, range| sum.saturating_add(range.len()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Builds a pool with these ranges, for all clusters.
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
