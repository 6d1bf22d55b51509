//! Configuration that a cluster requests for the load balancer of one Service: parsed from a request, and
//! validated. Pure. Contradictory requests are refused here; `meet` decides whether a valid one can be satisfied.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::addresses::{self, Subnet};
use crate::wire::proto::v1;

/// Longest name of a Service or a namespace, in bytes.
const LONGEST_NAME: usize = 63;
/// Longest UID in bytes.
const LONGEST_UID: usize = 64;
/// Longest name of a network, in bytes.
const LONGEST_NETWORK: usize = 253;
const MOST_PORTS: usize = 128;
/// Lowest port of a node that the host forwards to: lower ports belong to the services of the node or machine
/// itself.
pub const LOWEST_NODE_PORT: u16 = 1024;
const MOST_BACKENDS: usize = 1024;
const MOST_SOURCES: usize = 64;
/// Longest session affinity in seconds: one day.
const LONGEST_AFFINITY: u32 = 86_400;
/// Greatest thresholds of a health check; below, its greatest times in seconds.
const MOST_TRIES: u32 = 100;
const LONGEST_PERIOD: u32 = 3600;

/// Reference to a Service of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Service {
    /// Namespace in the guest cluster.
    pub namespace: String,
    /// Name within the namespace.
    pub name: String,
    /// UID, which distinguishes it from earlier Services of the same name.
    pub uid: String,
}

/// Source of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ipam {
    /// Pool of addresses that the host administers.
    Pool,
    /// DHCP, by the program that announces the address.
    Dhcp,
}

/// Party that makes an address reachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Announcing {
    /// kube-vip in the cluster.
    KubeVip,
    /// Another program in the cluster, or none at all.
    None,
    /// This host half, which also forwards the traffic.
    Host,
}

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// Transport protocol of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "they say it all")]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// Port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name of the port in the Service; may be empty.
    pub name: String,
    /// Transport protocol. The same number with another protocol is another port.
    pub protocol: Protocol,
    /// Port at the load balancer's address.
    pub port: u16,
    /// Port on the nodes; 0 if there is none.
    pub node_port: u16,
}

/// Health check that agents make on their nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Node port that is checked.
    pub node_port: u16,
    /// Successful attempts in a row after which a node counts as healthy.
    pub success_threshold: u32,
    /// Failed attempts in a row after which it counts as failed.
    pub failure_threshold: u32,
    /// Seconds between two attempts.
    pub period_seconds: u32,
    /// Timeout of one attempt in seconds.
    pub timeout_seconds: u32,
}

/// Requested configuration of a load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Source of the address; cannot change later.
    pub ipam: Ipam,
    /// Network that the address must belong to; empty: any.
    pub network: String,
    /// Requested addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// Requested families, the preferred one first.
    pub families: Vec<Family>,
    /// True if it needs an address of every family; otherwise some may be missing.
    pub all_families: bool,
    /// Ports of the Service; never empty.
    pub ports: Vec<Port>,
    /// Service whose address it shares.
    pub share: Option<Service>,
    /// Party that announces the address.
    pub announcing: Announcing,
    /// Health check of the nodes, if any.
    pub check: Option<Check>,
    /// True if only nodes with endpoints take its traffic.
    pub local: bool,
    /// Port at which nodes report over HTTP whether they have endpoints; 0: they do not.
    pub local_port: u16,
    /// Lasting identifiers of the VMs that take its traffic; if empty, all VMs that are Nodes do.
    pub backends: Vec<String>,
    /// Subnets of the clients that may send to it; if empty, all may.
    pub sources: Vec<String>,
    /// Seconds for which a client stays with the same node; 0: not at all.
    pub affinity_seconds: u32,
}

impl From<&v1::ServiceReference> for Service {
    fn from(reference: &v1::ServiceReference) -> Self {
        let v1::ServiceReference { namespace, name, uid } = reference.clone();
        Self { namespace, name, uid }
    }
}

impl From<&Service> for v1::ServiceReference {
    fn from(service: &Service) -> Self {
        let Service { namespace, name, uid } = service.clone();
        Self { namespace, name, uid }
    }
}

impl Family {
    /// Returns the family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    /// Reports whether this is IPv4.
    pub fn is_ipv4(self) -> bool {
        self == Self::Ipv4
    }

    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        if self.is_ipv4() { "IPv4" } else { "IPv6" }
    }
}

impl Protocol {
    /// Returns the name in rules and messages, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// Returns the protocol number in IP headers.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// Validates the Service that a request names; `what` is the name of the field.
///
/// # Errors
/// A message for people, if a part of it is missing or invalid.
pub fn service(found: Option<v1::ServiceReference>, what: &str) -> Result<Service, String> {
    let service = service_of_before(found, what)?;
    if service.uid.is_empty() {
        return Err(format!("{what}.uid is missing"));
    }
    Ok(service)
}

/// Validates a reference that a host half has reported before. Unlike for [`service`], its UID may be empty.
///
/// # Errors
/// The errors of [`service`].
pub fn service_of_before(found: Option<v1::ServiceReference>, what: &str) -> Result<Service, String> {
    let v1::ServiceReference { namespace, name, uid } = found.ok_or_else(|| format!("{what} is missing"))?;
    for (field, text) in [("namespace", &namespace), ("name", &name)] {
        if !is_label(text) {
            return Err(format!(
                "{what}.{field} is not a Kubernetes name of at most {LONGEST_NAME} characters"
            ));
        }
    }
    let is_good =
        uid.len() <= LONGEST_UID && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !is_good {
        return Err(format!("{what}.uid is not a UID: use at most {LONGEST_UID} letters, digits and \"-\""));
    }
    Ok(Service { namespace, name, uid })
}

fn is_label(text: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    text.len() <= LONGEST_NAME
        && ends(text.bytes().next())
        && ends(text.bytes().last())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

impl Wanted {
    /// Parses and validates a request.
    ///
    /// # Errors
    /// A message for people, if a field is invalid.
    pub fn read(request: v1::EnsureLoadBalancerRequest) -> Result<(Service, Self), String> {
        let of = service(request.service.clone(), "service")?;
        let ipam = match request.ipam() {
            v1::Ipam::Unspecified | v1::Ipam::Pool => Ipam::Pool,
            v1::Ipam::Dhcp => Ipam::Dhcp,
        };
        let announcing = match request.announcing() {
            v1::Announcing::Unspecified => return Err("announcing is missing".to_owned()),
            v1::Announcing::KubeVip => Announcing::KubeVip,
            v1::Announcing::None => Announcing::None,
            v1::Announcing::Host => Announcing::Host,
        };
        if request.network.len() > LONGEST_NETWORK {
            return Err(format!("network has more than {LONGEST_NETWORK} characters"));
        }
        let families = families(&request)?;
        let addresses = wanted_addresses(&request.addresses, &families)?;
        let ports = ports(&request.ports, announcing)?;
        let check = request.health_check.map(|found| check(found, &ports)).transpose()?;
        let share = request.share_with.clone().map(|found| service(Some(found), "share_with")).transpose()?;
        if share.is_some() && !addresses.is_empty() {
            return Err(
                "addresses cannot be requested while sharing the address of another Service".to_owned()
            );
        }
        let local_port = port(request.health_check_node_port, true, "health_check_node_port")?;
        if request.local_traffic && announcing == Announcing::Host {
            if local_port == 0 {
                let words =
                    "health_check_node_port is missing, at which nodes report whether they have endpoints";
                return Err(words.to_owned());
            }
            of_nodes(local_port, "health_check_node_port")?;
        }
        if request.backends.len() > MOST_BACKENDS {
            return Err(format!("backends has more than {MOST_BACKENDS} entries"));
        }
        if request.backends.iter().any(|uid| uid.is_empty() || uid.len() > LONGEST_UID) {
            return Err(format!(
                "backends has an entry that is not an identifier of at most {LONGEST_UID} characters"
            ));
        }
        if request.affinity_seconds > LONGEST_AFFINITY {
            return Err(format!("affinity_seconds is more than {LONGEST_AFFINITY}"));
        }
        let backends: BTreeSet<_> = request.backends.into_iter().collect();
        let wanted = Self {
            ipam,
            network: request.network,
            addresses,
            families,
            all_families: request.all_families,
            ports,
            share,
            announcing,
            check,
            local: request.local_traffic,
            local_port: if request.local_traffic { local_port } else { 0 },
            backends: backends.into_iter().collect(),
            sources: sources(&request.source_ranges)?,
            affinity_seconds: request.affinity_seconds,
        };
        Ok((of, wanted))
    }

    /// Reports whether the load balancer has a port with this protocol and number.
    pub fn has_port(&self, other: &Port) -> bool {
        self.ports.iter().any(|port| (port.protocol, port.port) == (other.protocol, other.port))
    }
}

fn families(request: &v1::EnsureLoadBalancerRequest) -> Result<Vec<Family>, String> {
    let mut found = Vec::new();
    for family in request.families() {
        let family = match family {
            v1::IpFamily::Unspecified => return Err("families has an entry that is not a family".to_owned()),
            v1::IpFamily::Ipv4 => Family::Ipv4,
            v1::IpFamily::Ipv6 => Family::Ipv6,
        };
        if found.contains(&family) {
            return Err(format!("families has {} twice", family.name()));
        }
        found.push(family);
    }
    // The iterator above skips unknown values.
    if found.is_empty() || found.len() != request.families.len() {
        return Err("families must have one or two entries".to_owned());
    }
    Ok(found)
}

fn wanted_addresses(found: &[String], families: &[Family]) -> Result<Vec<IpAddr>, String> {
    let mut asked: Vec<IpAddr> = Vec::new();
    for text in found {
        let address = addresses::parse(text).map_err(|problem| format!("addresses: {problem}"))?;
        let family = Family::of(address);
        if !families.contains(&family) {
            return Err(format!("addresses has {address}, and families does not have {}", family.name()));
        }
        if asked.iter().any(|other| Family::of(*other) == family) {
            return Err(format!("addresses has more than one of {}", family.name()));
        }
        asked.push(address);
    }
    Ok(asked)
}

fn port(found: u32, may_be_0: bool, what: &str) -> Result<u16, String> {
    match u16::try_from(found) {
        Ok(port) if may_be_0 || port > 0 => Ok(port),
        _ => Err(format!("{what} = {found} is not a port")),
    }
}

/// Checks that the host may forward to, or probe, this port of a node: low ports belong to the node's own
/// services.
fn of_nodes(port: u16, what: &str) -> Result<(), String> {
    if port < LOWEST_NODE_PORT {
        return Err(format!(
            "{what} = {port} is less than {LOWEST_NODE_PORT}, and this host does not forward to such ports"
        ));
    }
    Ok(())
}

fn ports(found: &[v1::ServicePort], announcing: Announcing) -> Result<Vec<Port>, String> {
    if found.is_empty() || found.len() > MOST_PORTS {
        return Err(format!("ports must have 1 to {MOST_PORTS} entries"));
    }
    let (mut ports, mut seen) = (Vec::new(), BTreeSet::new());
    for one in found {
        let protocol = match one.protocol.as_str() {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            "SCTP" => Protocol::Sctp,
            _ => return Err("ports has a protocol that is not TCP, UDP or SCTP".to_owned()),
        };
        let is_host = announcing == Announcing::Host;
        if is_host && protocol == Protocol::Sctp {
            return Err("ports has SCTP, which this host does not forward".to_owned());
        }
        if one.name.len() > LONGEST_NAME {
            return Err(format!("ports has a name with more than {LONGEST_NAME} characters"));
        }
        let number = port(one.port, false, "ports.port")?;
        if !seen.insert((protocol, number)) {
            return Err(format!("ports has {} {number} twice", protocol.name().to_ascii_uppercase()));
        }
        let node_port = port(one.node_port, !is_host, "ports.node_port")?;
        if is_host {
            of_nodes(node_port, "ports.node_port")?;
        }
        ports.push(Port { name: one.name.clone(), protocol, port: number, node_port });
    }
    Ok(ports)
}

fn check(found: v1::HealthCheck, ports: &[Port]) -> Result<Check, String> {
    let named = ports.iter().find(|one| u32::from(one.port) == found.port && one.protocol == Protocol::Tcp);
    let Some(named) = named else {
        return Err(format!("health_check.port = {} is not a TCP port of the Service", found.port));
    };
    if named.node_port == 0 {
        return Err(format!("health_check.port = {} has no node port that could be checked", found.port));
    }
    let bounded = |value: u32, usual: u32, most: u32, what: &str| match value {
        0 => Ok(usual),
        value if value <= most => Ok(value),
        value => Err(format!("health_check.{what} = {value} is more than {most}")),
    };
    let period_seconds = bounded(found.period_seconds, 5, LONGEST_PERIOD, "period_seconds")?;
    let usual = period_seconds.min(3);
    Ok(Check {
        node_port: named.node_port,
        success_threshold: bounded(found.success_threshold, 1, MOST_TRIES, "success_threshold")?,
        failure_threshold: bounded(found.failure_threshold, 3, MOST_TRIES, "failure_threshold")?,
        period_seconds,
        timeout_seconds: bounded(found.timeout_seconds, usual, period_seconds, "timeout_seconds")?,
    })
}

fn sources(found: &[String]) -> Result<Vec<String>, String> {
    if found.len() > MOST_SOURCES {
        return Err(format!("source_ranges has more than {MOST_SOURCES} entries"));
    }
    let subnet = |text: &String| match Subnet::parse_interface(text) {
        Ok((_, subnet)) => Ok(subnet),
        Err(problem) => Err(format!("source_ranges: {problem}")),
    };
    let subnets: BTreeSet<_> = found.iter().map(subnet).collect::<Result<_, _>>()?;
    Ok(subnets.into_iter().map(|subnet| subnet.to_string()).collect())
}

#[cfg(test)]
pub(super) mod tests;
