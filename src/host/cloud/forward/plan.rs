//! Plan of what is forwarded from which address and port of the host to which nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::super::wanted::Protocol;
use crate::addresses::{Range, Subnet};
use crate::sys::connections::Destination;

/// Complete target state of the kernel for this program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Ports to forward; each address, protocol and port occurs once.
    pub services: Vec<Forwarded>,
    /// Interfaces by name. This program adds and removes their addresses in the given ranges.
    pub interfaces: BTreeMap<String, Interface>,
    /// Other addresses that interfaces have had from this program and must lose, whatever the present settings say.
    pub gone: Given,
}

/// Addresses that interfaces have from this program, by the names of the interfaces.
pub type Given = BTreeMap<String, BTreeSet<IpAddr>>;

/// Forwarded port of one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forwarded {
    /// Identifier of the load balancer: letters a–z and digits.
    pub id: String,
    /// Address on the host.
    pub address: IpAddr,
    /// Transport protocol of the port.
    pub protocol: Protocol,
    /// Port on the host.
    pub port: u16,
    /// Port on the nodes.
    pub node_port: u16,
    /// Healthy nodes with their subnets; all of the same family as the address.
    pub targets: Vec<(IpAddr, Subnet)>,
    /// Subnets that may send to it; `None`: all may.
    pub sources: Option<Vec<Subnet>>,
    /// True if all connections of a client go to the same node, for as long as that is healthy.
    pub sticks: bool,
}

/// Load balancers by address, protocol and port.
pub type Owners = BTreeMap<Destination, String>;

/// Target state of one interface of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Ranges that this program owns: any other address in them is removed from the interface.
    pub ranges: Vec<Range>,
    /// Addresses that the interface is to have.
    pub addresses: BTreeSet<IpAddr>,
}

impl Plan {
    /// Reports whether the plan needs no rules.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.interfaces.is_empty()
    }

    /// Returns the load balancer of each address, protocol and port.
    pub fn owners(&self) -> Owners {
        let of = |one: &Forwarded| ((one.address, one.protocol.number(), one.port), one.id.clone());
        self.services.iter().map(of).collect()
    }

    /// Returns the addresses that interfaces get, by the names of the interfaces.
    pub fn given_to(&self) -> Given {
        let of = |(name, interface): (&String, &Interface)| (name.clone(), interface.addresses.clone());
        self.interfaces.iter().map(of).filter(|(_, addresses)| !addresses.is_empty()).collect()
    }

    /// Returns all addresses that interfaces get. Only forwarded ports may be reachable at them.
    pub fn given(&self) -> BTreeSet<IpAddr> {
        self.interfaces.values().flat_map(|interface| interface.addresses.iter().copied()).collect()
    }
}
