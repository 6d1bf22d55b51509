//! Checks whether a cluster may be given the address that Harvester has assigned to its load balancer. Pure.
//!
//! If no network is requested, Harvester chooses one by names. It takes addresses from its global pool whatever
//! the network of that pool is. Before version 1.9, its webhooks replaced the requested network by another one.
//! Therefore no address is passed on before it is known to belong to a network of the cluster, or to the pool for
//! all clusters.

use std::collections::{BTreeMap, BTreeSet};

use super::super::instance::is_global;
use super::super::meet::Failure;
use super::object::{Address, Object};
use crate::host::backends::kubevirt::balancers::{Pool, PoolScope, PoolSelector};

/// Input of the checks.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'g> {
    /// Networks that VMs of the cluster are attached to; `None` until they are known.
    pub networks: Option<&'g BTreeSet<String>>,
    /// Pools by name; `None` until they are known.
    pub pools: Option<&'g BTreeMap<String, Pool>>,
}

/// Reason why an address is not passed on to its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doubt {
    /// The check is not possible yet: this is still unknown.
    Unknown(&'static str),
    /// The cluster must not get the address.
    Refused(Failure),
}

impl Ground<'_> {
    /// Checks the network of a load balancer, and the pool of its address if it has one.
    ///
    /// # Errors
    /// If its cluster must not get the address, with a message that names nothing of others; or if that is unknown
    /// yet.
    pub fn check(self, object: &Object) -> Result<(), Doubt> {
        let address = object.address();
        if matches!(address, Address::None(_)) {
            return Ok(());
        }
        let networks = self.networks.ok_or(Doubt::Unknown("the networks of the cluster's VMs"))?;
        let asked = object.wanted.as_ref().map(|wanted| wanted.network.as_str()).unwrap_or_default();
        let is_own = |network: &str| network.is_empty() || networks.contains(network);
        let network = object.network();
        if !asked.is_empty() && network != asked {
            return Err(differs(object, asked, network));
        }
        if !is_own(network) {
            return Err(foreign(object, network));
        }
        let Address::Has(address, pool) = address else { return Ok(()) };
        if !is_global(address) {
            let words = format!("the host has given it {address}, which is unusable");
            return Err(Doubt::Refused(Failure::new("AddressUnusable", words)));
        }
        if pool.is_empty() {
            return Ok(());
        }
        let pools = self.pools.ok_or(Doubt::Unknown("the pools of addresses"))?;
        // A deleted pool no longer says anything about its network.
        let Some(selector) = pools.get(&pool).map(|pool| &pool.spec.selector) else { return Ok(()) };
        let of_pool = selector.network.as_str();
        if !asked.is_empty() && !of_pool.is_empty() && of_pool != asked {
            return Err(differs(object, asked, of_pool));
        }
        if is_own(of_pool) || is_for_all(selector) { Ok(()) } else { Err(foreign(object, of_pool)) }
    }
}

/// Reports whether a pool is Harvester's global one. The administrator of the host provides it for every cluster,
/// and the network that it names may be the cluster's own under another name.
fn is_for_all(selector: &PoolSelector) -> bool {
    let is_any = |scope: &PoolScope| {
        [&scope.project, &scope.namespace, &scope.guest_cluster].into_iter().all(|word| word == "*")
    };
    matches!(&selector.scope[..], [scope] if is_any(scope))
}

fn foreign(object: &Object, network: &str) -> Doubt {
    tracing::debug!(
        cluster = object.cluster,
        name = object.name(),
        network,
        "an address of a network that the cluster's VMs are not attached to"
    );
    let words = "the host has given it an address of a network that no VM of this cluster is attached to, so \
                 it is not used; attach the VMs to a network that the host has a pool (IPPool) for, or \
                 request such a network, and recreate the Service";
    Doubt::Refused(Failure::new("NetworkNotOfCluster", words))
}

fn differs(object: &Object, asked: &str, network: &str) -> Doubt {
    tracing::debug!(
        cluster = object.cluster,
        name = object.name(),
        asked,
        network,
        "an address of a network other than the requested one"
    );
    let words = format!(
        "the host has given it an address of a network other than {asked:?}, so it is not used; the host \
         needs a pool (IPPool) of that network for this cluster, and the Service has to be recreated"
    );
    Doubt::Refused(Failure::new("NetworkDiffers", words))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::object::tests::wanted;
    use super::super::object::{self, Object};
    use super::*;
    use crate::host::cloud::wanted::{Service, Wanted};

    /// Builds an object with an address, and with the network and pool that Harvester has written.
    fn given(asked: &str, network: &str, ip: &str, pool: &str) -> Object {
        let service = Service { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        let wanted = Wanted { network: asked.into(), ..wanted() };
        let mut made = object::new("ns/dev", &service, &wanted, None, None);
        made["metadata"]["annotations"]["loadbalancer.harvesterhci.io/network"] = json!(network);
        made["status"] = json!({ "allocatedAddress": { "ip": ip, "ipPool": pool } });
        Object::of(serde_json::from_value(made).unwrap()).unwrap()
    }

    fn pools() -> BTreeMap<String, Pool> {
        let pool = |(name, network, cluster): (&str, &str, &str)| {
            let scope = json!([{ "project": "*", "namespace": "*", "guestCluster": cluster }]);
            let pool = json!({
                "metadata": { "name": name },
                "spec": { "ranges": [], "selector": { "network": network, "scope": scope } },
            });
            (name.to_owned(), serde_json::from_value(pool).unwrap())
        };
        let all = [
            ("lan", "ns/lan", "dev"),
            ("wan", "ns/wan", "dev"),
            ("any", "", "dev"),
            ("global", "ns/wan", "*"),
        ];
        all.map(pool).into()
    }

    #[test]
    fn only_what_is_of_the_clusters_own_networks_is_handed_on() {
        let (own, pools) = (BTreeSet::from(["ns/lan".to_owned()]), pools());
        let ground = Ground { networks: Some(&own), pools: Some(&pools) };
        let reason = |asked: &str, network: &str, ip: &str, pool: &str| match ground
            .check(&given(asked, network, ip, pool))
        {
            Ok(()) => "",
            Err(Doubt::Refused(failure)) => {
                assert!(!failure.message.contains("ns/wan"), "nothing of others: {}", failure.message);
                failure.reason
            }
            Err(Doubt::Unknown(what)) => panic!("{what}"),
        };
        for (asked, network, ip, pool, expected) in [
            ("", "ns/lan", "192.0.2.7", "lan", ""),
            ("", "ns/lan", "192.0.2.7", "any", ""),
            ("", "", "192.0.2.7", "any", ""),
            ("", "ns/lan", "192.0.2.7", "gone", ""),
            // Harvester has confused another cluster's VMs with this one's.
            ("", "ns/wan", "192.0.2.7", "wan", "NetworkNotOfCluster"),
            ("", "ns/wan", "0.0.0.0", "", "NetworkNotOfCluster"),
            ("", "ns/lan", "192.0.2.7", "wan", "NetworkNotOfCluster"),
            // The global pool is for all clusters, but does not replace a requested network.
            ("", "ns/lan", "192.0.2.7", "global", ""),
            ("ns/lan", "ns/lan", "192.0.2.7", "global", "NetworkDiffers"),
            ("", "", "192.0.2.7", "wan", "NetworkNotOfCluster"),
            // A webhook has replaced the requested network by another one.
            ("ns/lan", "ns/wan", "192.0.2.7", "wan", "NetworkDiffers"),
            ("ns/lan", "", "192.0.2.7", "any", "NetworkDiffers"),
            ("ns/lan", "ns/lan", "192.0.2.7", "wan", "NetworkDiffers"),
            ("ns/lan", "ns/lan", "192.0.2.7", "any", ""),
            ("", "ns/lan", "127.0.0.1", "lan", "AddressUnusable"),
            // It has no address yet.
            ("", "ns/wan", "", "", ""),
        ] {
            assert_eq!(reason(asked, network, ip, pool), expected, "{asked:?} {network:?} {ip} {pool}");
        }
    }

    /// The VMs are attached only to the pod network.
    #[test]
    fn a_cluster_without_networks_gets_nothing_of_any() {
        let (none, pools) = (BTreeSet::new(), pools());
        let ground = Ground { networks: Some(&none), pools: Some(&pools) };
        assert!(matches!(
            ground.check(&given("", "ns/lan", "192.0.2.7", "lan")),
            Err(Doubt::Refused(failure)) if failure.reason == "NetworkNotOfCluster"
        ));
        assert_eq!(ground.check(&given("", "", "192.0.2.7", "any")), Ok(()));
    }

    #[test]
    fn nothing_is_handed_on_before_it_can_be_checked() {
        let own = BTreeSet::from(["ns/lan".to_owned()]);
        let object = given("", "ns/lan", "192.0.2.7", "lan");
        for networks in [None, Some(&own)] {
            let ground = Ground { networks, pools: None };
            assert!(matches!(ground.check(&object), Err(Doubt::Unknown(_))));
        }
    }
}
