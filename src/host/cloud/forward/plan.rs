//! What is to be forwarded: from which address and port of the host to which nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::super::wanted::Protocol;
use crate::addresses::{Range, Subnet};
use crate::sys::connections::Destination;

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Each address, protocol and port once.
    pub services: Vec<Forwarded>,
    /// Interfaces whose addresses in these ranges are this program's to give and to take.
    pub interfaces: BTreeMap<String, Interface>,
    /// What else interfaces had from this program and are not to have any more, whatever the settings say of them now.
    pub gone: Given,
}

/// Addresses that interfaces have from this program, by their names.
pub type Given = BTreeMap<String, BTreeSet<IpAddr>>;

/// One port of one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forwarded {
    /// The load balancer: letters a–z and digits.
    pub id: String,
    /// The address of the host.
    pub address: IpAddr,
    /// What is spoken there.
    pub protocol: Protocol,
    /// The port of the host.
    pub port: u16,
    /// The port of the nodes.
    pub node_port: u16,
    /// Healthy nodes, and the subnets that they are in; all of the address's family.
    pub targets: Vec<(IpAddr, Subnet)>,
    /// Who may send to it; none: everybody.
    pub sources: Option<Vec<Subnet>>,
    /// One client's connections go to the same node, as long as that is healthy.
    pub sticks: bool,
}

/// The load balancers by their addresses, protocols and ports.
pub type Owners = BTreeMap<Destination, String>;

/// What an interface of the host is to have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Other addresses in these are taken away from it.
    pub ranges: Vec<Range>,
    /// The addresses.
    pub addresses: BTreeSet<IpAddr>,
}

impl Plan {
    /// Whether it needs no rules.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.interfaces.is_empty()
    }

    /// Whose each address, protocol and port is.
    pub fn owners(&self) -> Owners {
        let of = |one: &Forwarded| ((one.address, one.protocol.number(), one.port), one.id.clone());
        self.services.iter().map(of).collect()
    }

    /// The same by the interfaces.
    pub fn given_to(&self) -> Given {
        let of = |(name, interface): (&String, &Interface)| (name.clone(), interface.addresses.clone());
        self.interfaces.iter().map(of).filter(|(_, addresses)| !addresses.is_empty()).collect()
    }

    /// The addresses that are given to interfaces: nothing but what is forwarded is to be found at them.
    pub fn given(&self) -> BTreeSet<IpAddr> {
        self.interfaces.values().flat_map(|interface| interface.addresses.iter().copied()).collect()
    }
}
