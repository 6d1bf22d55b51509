//! One try of a check: a TCP connection to the node's own address, which is closed as soon as it is established.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::guest::network::{self, Interface};
use crate::guest::probes::judge::Family;
use crate::guest::topology::{Desk, Node};

/// Time for which the addresses of the interfaces are cached.
const FRESH: Duration = Duration::from_secs(1);

/// Tries to connect once; the error is for people.
pub async fn attempt(address: SocketAddr, within: Duration) -> Result<(), String> {
    match timeout(within, TcpStream::connect(address)).await {
        Ok(Ok(stream)) if is_with_itself(&stream) => Err(format!("connection to {address} refused")),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            Err(format!("connection to {address} refused"))
        }
        Ok(Err(error)) => Err(format!("connection to {address} failed: {error}")),
        Err(_) => Err(format!("connection to {address} is not answered within {} s", within.as_secs_f32())),
    }
}

/// Returns whether a socket is connected to itself. Where no process listens on an ephemeral port, the kernel may
/// choose that very port for the local end, and TCP then connects the socket with itself.
fn is_with_itself(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(local), Ok(peer)) => local == peer,
        // A peer that has hung up at once was there.
        _ => false,
    }
}

/// Addresses of this node, which may change while it runs.
#[derive(Debug)]
pub struct Addresses {
    topology: Arc<Desk>,
    /// Addresses of IPv4 and of IPv6, and the time when they were determined.
    known: Option<(Instant, [Result<IpAddr, String>; 2])>,
}

impl Addresses {
    /// Creates the addresses of this machine, which is the Node that `topology` knows, if any.
    pub fn new(topology: Arc<Desk>) -> Self {
        Self { topology, known: None }
    }

    /// Returns the address of a family at which node ports answer, or the reason why there is none.
    pub fn of(&mut self, family: Family) -> Result<IpAddr, String> {
        let now = Instant::now();
        let known = match self.known.take() {
            Some((since, found)) if now.duration_since(since) < FRESH => (since, found),
            _ => (now, self.find()),
        };
        let found = known.1[usize::from(family == Family::V6)].clone();
        self.known = Some(known);
        found
    }

    fn find(&self) -> [Result<IpAddr, String>; 2] {
        let node = self.topology.standing().node;
        let interfaces = network::interfaces();
        [Family::V4, Family::V6].map(|family| choose(family, node.as_deref(), &interfaces))
    }
}

/// Returns the first of the Node's internal addresses that this machine has, because kube-proxy may be set to
/// serve node ports on those only. Without one, returns the first global address of an interface that is up.
fn choose(
    family: Family,
    node: Option<&Node>,
    interfaces: &io::Result<Vec<Interface>>,
) -> Result<IpAddr, String> {
    let interfaces =
        interfaces.as_ref().map_err(|error| format!("cannot list the node's addresses: {error}"))?;
    let all = || {
        let usable = interfaces.iter().filter(|interface| interface.running && !interface.loopback);
        let addresses = usable.flat_map(|interface| &interface.addresses).map(|address| address.ip);
        addresses.filter(|address| is_of(family, *address))
    };
    let told = node.map(|node| node.addresses.as_slice()).unwrap_or_default();
    let mut internal = told.iter().filter_map(|told| told.strip_prefix("InternalIP ")?.parse().ok());
    let number = if family == Family::V4 { 4 } else { 6 };
    internal
        .find(|internal| all().any(|address| address == *internal))
        .or_else(|| all().next())
        .ok_or_else(|| format!("this node has no IPv{number} address"))
}

fn is_of(family: Family, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            family == Family::V4
                && !(address.is_loopback() || address.is_link_local() || address.is_unspecified())
        }
        IpAddr::V6(address) => {
            family == Family::V6
                && !(address.is_loopback() || address.is_unicast_link_local() || address.is_unspecified())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::network::Address;

    fn interface(name: &str, addresses: &[&str]) -> Interface {
        let address = |text: &&str| Address { ip: text.parse().unwrap(), prefix: 24 };
        Interface {
            name: name.to_owned(),
            link_address: None,
            loopback: name == "lo",
            running: !name.starts_with("down"),
            addresses: addresses.iter().map(address).collect(),
            statistics: None,
        }
    }

    fn node(addresses: &[&str]) -> Node {
        Node { addresses: addresses.iter().map(|&one| one.to_owned()).collect(), ..Node::default() }
    }

    #[test]
    fn the_address_is_the_nodes_own_else_the_first_global_one() {
        let interfaces = Ok(vec![
            interface("lo", &["127.0.0.1", "::1", "198.51.100.1"]),
            interface("down0", &["192.0.2.1"]),
            interface("eth0", &["169.254.0.7", "192.0.2.7", "fe80::7", "2001:db8::7"]),
            interface("eth1", &["203.0.113.7", "2001:db8:1::7"]),
        ]);
        let [nobody, second, elsewhere, named] = [
            node(&[]),
            node(&["Hostname n", "InternalIP 203.0.113.7", "InternalIP 2001:db8:1::7"]),
            node(&["InternalIP 192.0.2.250", "ExternalIP 203.0.113.7"]),
            node(&["InternalIP n"]),
        ];
        for (node, v4, v6) in [
            (None, "192.0.2.7", "2001:db8::7"),
            (Some(&nobody), "192.0.2.7", "2001:db8::7"),
            (Some(&second), "203.0.113.7", "2001:db8:1::7"),
            (Some(&elsewhere), "192.0.2.7", "2001:db8::7"),
            (Some(&named), "192.0.2.7", "2001:db8::7"),
        ] {
            for (family, expected) in [(Family::V4, v4), (Family::V6, v6)] {
                assert_eq!(choose(family, node, &interfaces).unwrap().to_string(), expected, "{node:?}");
            }
        }
        let alone = Ok(vec![interface("lo", &["127.0.0.1", "::1"]), interface("eth0", &["fe80::7"])]);
        assert_eq!(choose(Family::V6, None, &alone).unwrap_err(), "this node has no IPv6 address");
        let unknown = Err(io::Error::other("full"));
        assert!(choose(Family::V4, None, &unknown).unwrap_err().contains("cannot list"));
    }

    #[tokio::test]
    async fn only_somebody_who_listens_is_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        attempt(address, Duration::from_secs(5)).await.unwrap();
        drop(listener);
        let problem = attempt(address, Duration::from_secs(5)).await.unwrap_err();
        assert_eq!(problem, format!("connection to {address} refused"));
    }

    #[tokio::test]
    async fn a_connection_with_itself_is_nobodys() {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let own = socket.local_addr().unwrap();
        assert!(is_with_itself(&socket.connect(own).await.unwrap()));
    }
}
