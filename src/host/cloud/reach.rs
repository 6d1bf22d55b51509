//! Decides at which of the addresses that its guest reports the host reaches a VM. Pure.
//!
//! A guest may report anything, so an address counts only if the host sees the VM there: the kernel's neighbour
//! table, which decides where packets go, must have one of the hardware addresses for it that the settings assign
//! to the VM (`vm.networks`). Traffic is never forwarded to an unverified address, so a false report cannot
//! redirect it to the host itself, to another VM, or to any other machine.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::instance::Member;
use super::settings::{Pool, Settings};
use super::wanted::Family;
use crate::addresses::Subnet;
use crate::sys::neighbours::Seen;

/// Addresses of one VM and family that are looked up at most, so that a guest that reports a thousand addresses
/// does not fill the host's neighbour table.
const MOST: usize = 8;

/// Neighbour of the host at each address.
pub type Neighbours = BTreeMap<IpAddr, Seen>;

/// Input of the decision.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'g> {
    /// Settings with all pools, not only those of one load balancer.
    pub settings: &'g Settings,
    /// Latest result of looking up the candidates.
    pub neighbours: &'g Neighbours,
}

impl Ground<'_> {
    /// Returns the addresses at which the host should look for a VM; none if its hardware addresses are unknown.
    pub fn candidates(&self, member: &Member) -> Vec<(IpAddr, Subnet)> {
        if member.hardware.is_empty() {
            return Vec::new();
        }
        self.told(member)
    }

    /// Returns the addresses that the guest reports and that are in a subnet to which some pool may forward; at most
    /// `MOST` of each family.
    fn told(&self, member: &Member) -> Vec<(IpAddr, Subnet)> {
        let forward_to = |address: IpAddr| {
            let subnets = self.settings.pools.iter().flat_map(|pool| &pool.forward_to);
            subnets.into_iter().any(|subnet| subnet.contains(address))
        };
        let of = |is_ipv4: bool| {
            let all = member.addresses().filter(move |(address, _)| address.is_ipv4() == is_ipv4);
            all.filter(|(address, _)| forward_to(*address)).take(MOST)
        };
        of(true).chain(of(false)).collect()
    }

    /// Returns the addresses at which the host reaches a VM for a load balancer with these families and pools: for
    /// each family, the first address at which the host sees the VM.
    ///
    /// # Errors
    /// A message for the cluster, if there is no such address.
    pub fn reached(
        &self,
        member: &Member,
        families: &[Family],
        pools: &[&Pool],
    ) -> Result<Vec<(IpAddr, Subnet)>, String> {
        let (mut reached, mut problem) = (Vec::new(), None);
        let told = self.told(member);
        for family in families {
            let of_family = told.iter().filter(|(address, _)| Family::of(*address) == *family);
            let allowed = of_family.filter_map(|told| within(*told, pools));
            let found = allowed.into_iter().find(|(address, _)| match self.check(member, *address) {
                Ok(()) => true,
                Err(why) => {
                    problem.get_or_insert(why);
                    false
                }
            });
            reached.extend(found);
        }
        if reached.is_empty() {
            let words = || "it has no address in a subnet that the host may forward to".to_owned();
            return Err(problem.unwrap_or_else(words));
        }
        Ok(reached)
    }

    /// Checks that the host sees the VM at this address.
    fn check(&self, member: &Member, address: IpAddr) -> Result<(), String> {
        if self.settings.pools.iter().any(|pool| pool.has(address)) {
            return Err(format!("its address {address} is one of the host's for load balancers"));
        }
        if member.hardware.is_empty() {
            let words = "the host does not know its hardware addresses, and so cannot verify its IP address; \
                         the host's administrator has to set vm.networks";
            return Err(words.to_owned());
        }
        match self.neighbours.get(&address) {
            Some(Seen::At(hardware)) if member.hardware.contains(hardware) => Ok(()),
            Some(Seen::At(_)) => Err(format!("the host sees another machine at its address {address}")),
            Some(Seen::Own) => Err(format!("its address {address} is one of the host itself")),
            Some(Seen::OffLink) => Err(format!("its address {address} is on no link of the host")),
            Some(Seen::Nobody) | None => Err(format!("no machine answers at its address {address}")),
        }
    }
}

/// Returns an address with its subnet if one of these pools may forward to it. The subnet that a guest reports is
/// replaced by the permitted one if it is larger.
fn within((address, own): (IpAddr, Subnet), pools: &[&Pool]) -> Option<(IpAddr, Subnet)> {
    let subnets = pools.iter().flat_map(|pool| &pool.forward_to);
    let allowed = subnets.into_iter().find(|subnet| subnet.contains(address))?;
    let (first, last) = (own.range().first(), own.range().last());
    let is_within = allowed.contains(first) && allowed.contains(last);
    Some((address, if is_within { own } else { *allowed }))
}

#[cfg(test)]
mod tests {
    use super::super::instance::tests::{known, vm};
    use super::super::settings::tests::pool;
    use super::*;

    const MINE: &str = "52:54:00:00:00:01";

    fn member(addresses: &[&str], hardware: &[&str]) -> Member {
        let networks = hardware.iter().map(|&one| (one.to_owned(), "lan".to_owned())).collect();
        Member::of(&known(&vm("u"), addresses, "n"), Some(&networks)).unwrap()
    }

    fn reached(member: &Member, seen: &[(&str, Seen)]) -> Result<Vec<String>, String> {
        let nat = Pool {
            forward_to: ["10.0.0.0/24", "fd00::/64"].map(|text| Subnet::parse(text).unwrap()).into(),
            ..pool("nat", &["10.0.0.200-10.0.0.209"])
        };
        let settings = Settings { pools: vec![nat], ..Settings::default() };
        let neighbours =
            seen.iter().map(|(address, seen)| (address.parse().unwrap(), seen.clone())).collect();
        let ground = Ground { settings: &settings, neighbours: &neighbours };
        let found = ground.reached(member, &[Family::Ipv4, Family::Ipv6], &[&settings.pools[0]])?;
        Ok(found.into_iter().map(|(address, _)| address.to_string()).collect())
    }

    #[test]
    fn an_address_counts_only_where_the_host_sees_the_vm() {
        let at = |hardware: &str| Seen::At(hardware.to_owned());
        let honest = member(&["10.0.0.7/24", "fd00::7/64"], &[MINE]);
        let both = [("10.0.0.7", at(MINE)), ("fd00::7", at(MINE))];
        assert_eq!(reached(&honest, &both).unwrap(), ["10.0.0.7", "fd00::7"]);
        assert_eq!(reached(&honest, &both[1..]).unwrap(), ["fd00::7"]);
        for (address, seen, words) in [
            ("10.0.0.7/24", at("52:54:00:00:00:02"), "another machine at its address 10.0.0.7"),
            ("10.0.0.254/24", Seen::Own, "10.0.0.254 is one of the host itself"),
            ("10.0.0.9/24", Seen::OffLink, "on no link"),
            ("10.0.0.9/24", Seen::Nobody, "no machine answers at its address 10.0.0.9"),
            ("10.0.0.200/24", at(MINE), "10.0.0.200 is one of the host's for load balancers"),
            ("192.0.2.1/8", at(MINE), "no address in a subnet"),
        ] {
            let plain = address.split('/').next().unwrap();
            let problem = reached(&member(&[address], &[MINE]), &[(plain, seen)]).unwrap_err();
            assert!(problem.contains(words), "{address}: {problem}");
        }
        // If the first of several addresses belongs to another machine, a later one may be its own.
        let several = member(&["10.0.0.8/24", "10.0.0.7/24"], &[MINE]);
        let seen = [("10.0.0.8", at("52:54:00:00:00:02")), ("10.0.0.7", at(MINE))];
        assert_eq!(reached(&several, &seen).unwrap(), ["10.0.0.7"]);
        // The hardware address that the guest reports proves nothing.
        let unnamed = Member::of(&known(&vm("u"), &["10.0.0.7/24"], "n"), None).unwrap();
        assert!(reached(&unnamed, &both).unwrap_err().contains("vm.networks"));
    }

    #[test]
    fn a_guest_that_tells_many_addresses_has_a_few_looked_at() {
        let many: Vec<_> = (1..=50).map(|number| format!("10.0.0.{number}/24")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let nat =
            Pool { forward_to: vec![Subnet::parse("10.0.0.0/24").unwrap()], ..pool("nat", &["192.0.2.1"]) };
        let settings = Settings { pools: vec![nat], ..Settings::default() };
        let ground = Ground { settings: &settings, neighbours: &Neighbours::new() };
        assert_eq!(ground.candidates(&member(&many, &[MINE])).len(), MOST);
        let unnamed = Member::of(&known(&vm("u"), &many, "n"), None).unwrap();
        assert!(ground.candidates(&unnamed).is_empty());
    }
}
