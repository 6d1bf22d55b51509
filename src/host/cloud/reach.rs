//! Where the host reaches a VM, among the addresses that its guest tells. Pure.
//!
//! A guest may tell anything, so an address counts only if the host sees the VM at it: its kernel's neighbour table, by which packets
//! go, has one of the hardware addresses there that the settings name as the VM's (`vm.networks`). What is not seen is not
//! forwarded to, so that neither the host itself, nor another VM, nor anybody else is reached by a lie.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::instance::Member;
use super::settings::{Pool, Settings};
use super::wanted::Family;
use crate::addresses::Subnet;
use crate::sys::neighbours::Seen;

/// Addresses of one VM and family that are looked at: a guest that tells a thousand does not fill the host's neighbour table.
const MOST: usize = 8;

/// Who is at which address, as the host sees it.
pub type Neighbours = BTreeMap<IpAddr, Seen>;

/// What decides.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'g> {
    /// All of them.
    pub settings: &'g Settings,
    /// Who is where.
    pub neighbours: &'g Neighbours,
}

impl Ground<'_> {
    /// The addresses that a VM might be reached at, for the host to look who is there; none of a VM whose hardware addresses are
    /// not known.
    pub fn candidates(&self, member: &Member) -> Vec<(IpAddr, Subnet)> {
        if member.hardware.is_empty() {
            return Vec::new();
        }
        self.told(member)
    }

    /// The addresses that its guest tells and that are in some subnet that the host may forward to.
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

    /// Where the host reaches a VM for a load balancer whose addresses are of these families and pools: the first address of each
    /// family that the VM is seen at.
    ///
    /// # Errors
    /// In words for its cluster, if there is none.
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

    /// That a VM has an address.
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

/// An address with its subnet, if the host may forward to it from one of these pools. Whatever a guest says, its subnet is no larger
/// than where its host forwards to.
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
        // The next one of several may be its own.
        let several = member(&["10.0.0.8/24", "10.0.0.7/24"], &[MINE]);
        let seen = [("10.0.0.8", at("52:54:00:00:00:02")), ("10.0.0.7", at(MINE))];
        assert_eq!(reached(&several, &seen).unwrap(), ["10.0.0.7"]);
        // What its guest says of its hardware address proves nothing.
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
