//! Decides whether a cluster can have the load balancer that it requests for a Service, and with which addresses.
//! Pure.
//!
//! ```text
//!  wanted ──contradicts what there is──▶ refused: an error of the call; nothing is kept
//!    └──network, sharing, ports, pools──▶ met: the record's addresses
//!                └──not possible now──▶ failed: what there was before stays in force, and it is tried again
//! ```

use std::net::IpAddr;

use tokio::time::Instant;

use super::book::{Book, Lack};
use super::record::{Held, Record};
use super::settings::{Pool, Settings};
use super::wanted::{Announcing, Family, Ipam, Port, Service, Wanted};

/// Reason why a request cannot be satisfied now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// CamelCase word for programs.
    pub reason: &'static str,
    /// Message for people of the cluster, without any information on other clusters.
    pub message: String,
}

impl Failure {
    /// Creates a failure with this reason and message.
    pub fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// Checks that `wanted` does not contradict an existing load balancer: neither the source of its address (`ipam`)
/// nor its network can change.
///
/// # Errors
/// A message for people, if it does.
pub fn check_change(ipam: Ipam, network: &str, wanted: &Wanted) -> Result<(), String> {
    let name = |ipam| match ipam {
        Ipam::Pool => "pool",
        Ipam::Dhcp => "dhcp",
    };
    if ipam != wanted.ipam {
        return Err(format!(
            "its address comes from ipam {}, which cannot become {}; delete the Service and create it again",
            name(ipam),
            name(wanted.ipam)
        ));
    }
    if network != wanted.network {
        return Err(format!(
            "its network is {network:?}, which cannot become {:?}; delete the Service and create it again",
            wanted.network
        ));
    }
    Ok(())
}

/// Input of the decisions.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'g> {
    /// Index of all load balancers.
    pub book: &'g Book,
    /// Settings of the pools and clusters.
    pub settings: &'g Settings,
    /// Current time, which decides which addresses rest.
    pub now: Instant,
}

impl Ground<'_> {
    /// Chooses the addresses that a load balancer is to have of its own; none if it shares another's or uses DHCP.
    ///
    /// # Errors
    /// If it cannot have what is wanted.
    pub fn meet(&self, record: &Record, wanted: &Wanted) -> Result<Vec<Held>, Failure> {
        self.check(record, wanted)?;
        if wanted.share.is_some() || wanted.ipam == Ipam::Dhcp {
            return Ok(Vec::new());
        }
        self.addresses(record, wanted)
    }

    /// Checks everything but addresses: the network, sharing, ports, and who announces.
    ///
    /// # Errors
    /// The first reason why the load balancer cannot have what is wanted.
    pub fn check(&self, record: &Record, wanted: &Wanted) -> Result<(), Failure> {
        let Record { cluster, service, .. } = record;
        if !wanted.network.is_empty() && !self.settings.has_network(cluster, &wanted.network) {
            return Err(Failure::new(
                "UnknownNetwork",
                format!("no VM of this cluster is attached to a network {:?}", wanted.network),
            ));
        }
        if let Some(share) = &wanted.share {
            return self.share(record, wanted, share);
        }
        // Load balancers that share this one's address have their ports at the same address.
        for sharer in self.book.sharers(record).filter(|sharer| sharer.service.uid != service.uid) {
            let ports = sharer.met.iter().flat_map(|met| &met.ports);
            clash(wanted, ports, &sharer.service)?;
        }
        if wanted.ipam == Ipam::Dhcp && wanted.announcing != Announcing::KubeVip {
            return Err(Failure::new(
                "NoDhcp",
                "an address from DHCP can only be announced by kube-vip; use ipam pool",
            ));
        }
        Ok(())
    }

    /// Checks that a load balancer may share the address of another Service.
    fn share(&self, record: &Record, wanted: &Wanted, share: &Service) -> Result<(), Failure> {
        let named = format!("{}/{}", share.namespace, share.name);
        if share.uid == record.service.uid {
            return Err(Failure::new("SharesItself", "it cannot share its own address"));
        }
        if let Some(sharer) = self.book.sharers(record).next() {
            let Service { namespace, name, .. } = &sharer.service;
            let words = format!(
                "the Service {namespace}/{name} shares the address of this one, which therefore needs its own"
            );
            return Err(Failure::new("AddressShared", words));
        }
        let missing =
            || Failure::new("NoPrimary", format!("the Service {named} has no address that could be shared"));
        let primary = self.book.find(&record.cluster, &share.uid).ok_or_else(missing)?;
        let met = primary.met.as_ref().ok_or_else(missing)?;
        if met.share.is_some() {
            let words = format!("the Service {named} shares an address itself; name the one that has it");
            return Err(Failure::new("PrimaryShares", words));
        }
        if met.announcing != wanted.announcing {
            let words = format!("the address of the Service {named} is announced by another means");
            return Err(Failure::new("AnnouncingDiffers", words));
        }
        if met.ipam != wanted.ipam {
            let words = format!("the address of the Service {named} comes from another ipam");
            return Err(Failure::new("IpamDiffers", words));
        }
        let has = |family: &&Family| {
            met.ipam == Ipam::Dhcp && met.families.contains(family)
                || primary.addresses.iter().any(|held| Family::of(held.address) == **family)
        };
        let families = wanted.families.iter().filter(has).count();
        if families == 0 || wanted.all_families && families < wanted.families.len() {
            let words = format!("the Service {named} has no address of each family that is wanted");
            return Err(Failure::new("FamilyMissing", words));
        }
        clash(wanted, met.ports.iter(), &primary.service)?;
        for other in self.book.sharers(primary).filter(|other| other.id != record.id) {
            clash(wanted, other.met.iter().flat_map(|met| &met.ports), &other.service)?;
        }
        let pools = primary.addresses.iter().filter_map(|held| self.settings.pool(&held.pool));
        pools.into_iter().try_for_each(|pool| reserved(pool, wanted))
    }

    fn addresses(&self, record: &Record, wanted: &Wanted) -> Result<Vec<Held>, Failure> {
        let forwarded = wanted.announcing == Announcing::Host;
        let pools = self.settings.eligible(&record.cluster, &wanted.network, forwarded);
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for family in &wanted.families {
            match self.address(record, wanted, *family, &pools) {
                Ok(held) => found.push(held),
                Err(failure) => failures.push(failure),
            }
        }
        let asked_and_missed = |asked: &IpAddr| !found.iter().any(|held| held.address == *asked);
        let is_short =
            wanted.all_families || found.is_empty() || wanted.addresses.iter().any(asked_and_missed);
        match failures.into_iter().next() {
            Some(failure) if is_short => Err(failure),
            _ => Ok(found),
        }
    }

    fn address(
        &self,
        record: &Record,
        wanted: &Wanted,
        family: Family,
        pools: &[&Pool],
    ) -> Result<Held, Failure> {
        let asked = wanted.addresses.iter().copied().find(|asked| Family::of(*asked) == family);
        let mine = record.addresses.iter().find(|held| Family::of(held.address) == family);
        if let Some(mine) = mine.filter(|mine| asked.is_none_or(|asked| asked == mine.address)) {
            // An address stays usable even if its pool has been removed from the settings, or no longer admits the cluster.
            let pool = self.settings.pools.iter().find(|pool| pool.has(mine.address));
            let forwarded = wanted.announcing == Announcing::Host;
            if pool.map_or(!forwarded, |pool| pool.forwards() == forwarded && reserved(pool, wanted).is_ok())
            {
                return Ok(mine.clone());
            }
        }
        if let Some(asked) = asked {
            let outside = || {
                let words = format!("{asked} is in no pool of addresses that this cluster may use for it");
                Failure::new("AddressOutsidePools", words)
            };
            let pool = pools.iter().find(|pool| pool.has(asked)).ok_or_else(outside)?;
            reserved(pool, wanted)?;
            let is_mine = self.book.holder(asked) == Some(record.id.as_str());
            if !is_mine && !self.book.is_free(asked) {
                return Err(Failure::new("AddressInUse", format!("{asked} is in use")));
            }
            if !is_mine && self.book.rests(asked, &record.cluster, &record.service, self.now) {
                let words = format!(
                    "{asked} belonged to another Service until a moment ago; it is available in a minute"
                );
                return Err(Failure::new("AddressResting", words));
            }
            return Ok(Held { address: asked, pool: pool.name.clone() });
        }
        let name = family.name();
        let of_family: Vec<_> = pools.iter().filter(|pool| pool.size(family.is_ipv4()) > 0).collect();
        let mut failure = Failure::new(
            "NoPool",
            format!("there is no pool of {name} addresses that this cluster may use for it"),
        );
        for pool in of_family {
            if let Err(problem) = reserved(pool, wanted) {
                failure = problem;
                continue;
            }
            match self.book.pick(pool, family, &record.cluster, &record.service, self.now) {
                Ok(held) => return Ok(held),
                Err(Lack::Exhausted) => {
                    failure =
                        Failure::new("PoolExhausted", format!("the pool of {name} addresses has none left"));
                }
                Err(Lack::Blind) => {
                    let words = "the host cannot read which of its addresses are in use; its log says why";
                    return Err(Failure::new("RecordsUnreadable", words));
                }
            }
        }
        Err(failure)
    }
}

/// Checks that none of `ports`, which another Service has at the same address, is also among the wanted ones.
fn clash<'p>(
    wanted: &Wanted,
    mut ports: impl Iterator<Item = &'p Port>,
    of: &Service,
) -> Result<(), Failure> {
    let Some(port) = ports.find(|port| wanted.has_port(port)) else { return Ok(()) };
    let (protocol, number) = (port.protocol.name().to_ascii_uppercase(), port.port);
    let words =
        format!("the Service {}/{} has {protocol} port {number} at the same address", of.namespace, of.name);
    Err(Failure::new("PortInUse", words))
}

/// Checks that no wanted port is a reserved one, which the host never forwards.
///
/// # Errors
/// The first port that is reserved.
pub fn reserved(pool: &Pool, wanted: &Wanted) -> Result<(), Failure> {
    let is_reserved = |port: &&Port| pool.reserved_ports.contains(&port.port);
    match wanted.ports.iter().find(is_reserved).filter(|_| wanted.announcing == Announcing::Host) {
        None => Ok(()),
        Some(port) => {
            Err(Failure::new("PortReserved", format!("the host does not forward port {}", port.port)))
        }
    }
}

#[cfg(test)]
mod tests;
