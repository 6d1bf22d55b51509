//! Listening TCP sockets of this machine: /proc/net/tcp and /proc/net/tcp6, see proc(5). Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// State `TCP_LISTEN`, in hexadecimal.
const LISTENS: &str = "0A";

/// Listening TCP socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Address that the socket is bound to.
    pub address: SocketAddr,
    /// UID of the owner.
    pub user: u32,
    /// Inode number of the socket, which links in /proc/PID/fd show.
    pub inode: u64,
}

impl Listener {
    /// Returns whether the socket may be the one that accepts connections to this address.
    pub fn takes(&self, address: SocketAddr) -> bool {
        let ip = self.address.ip();
        self.address.port() == address.port()
            && (ip.is_unspecified() || ip.to_canonical() == address.ip().to_canonical())
    }

    /// Returns the loopback address at which the socket can be reached, or `None` if it is bound to another address.
    pub fn local(&self) -> Option<SocketAddr> {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        ip.is_loopback().then(|| SocketAddr::new(ip, self.address.port()))
    }
}

/// Parses one of the files, and returns the listening sockets in it.
pub fn parse(file: &str) -> impl Iterator<Item = Listener> {
    file.lines().skip(1).filter_map(line)
}

fn line(line: &str) -> Option<Listener> {
    let mut fields = line.split_ascii_whitespace();
    let (local, state) = (fields.nth(1)?, fields.nth(1)?);
    if state != LISTENS {
        return None;
    }
    let (ip, port) = local.split_once(':')?;
    let address = SocketAddr::new(address(ip)?, u16::from_str_radix(port, 16).ok()?);
    let user = fields.nth(3)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some(Listener { address, user, inode })
}

/// Parses an address: 32-bit words in the byte order of this machine, whose bytes are in network order.
fn address(text: &str) -> Option<IpAddr> {
    let word = |place: usize| {
        let text = text.get(place * 8..place * 8 + 8)?;
        Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes())
    };
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (place, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(place)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    #[test]
    #[cfg(target_endian = "little")]
    fn sockets_that_listen_are_known_with_their_owners() {
        let file = format!(
            "{HEAD}   0: 0100007F:094B 00000000:0000 0A 00000000:00000000 00:00000000 00000000   105        0 32100 1 0 100 0 0 10 0\n   \
             1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 20 1 0 100 0 0 10 0\n   \
             2: 0100007F:094B 0100007F:C001 01 00000000:00000000 00:00000000 00000000   105        0 40 1 0 100 0 0 10 0\n"
        );
        let found: Vec<_> = parse(&file).collect();
        let etcd = Listener { address: "127.0.0.1:2379".parse().unwrap(), user: 105, inode: 32100 };
        assert_eq!(found[0], etcd);
        assert_eq!(found.len(), 2);
        let at = |text: &str| text.parse().unwrap();
        assert!(
            etcd.takes(at("127.0.0.1:2379"))
                && !etcd.takes(at("127.0.0.2:2379"))
                && !etcd.takes(at("127.0.0.1:1"))
        );
        assert!(found[1].takes(at("127.0.0.1:22")));
        assert_eq!(found[1].local(), Some(at("127.0.0.1:22")));
        let six = format!(
            "{HEAD}   0: 00000000000000000000000000000000:094B 00000000000000000000000000000000:0000 0A 0:0 00:0 0 7 0 8 1\n   \
             1: 00000000000000000000000001000000:094B 00000000000000000000000000000000:0000 0A 0:0 00:0 0 7 0 9 1\n   \
             2: B80D0120000000000000000001000000:094B 00000000000000000000000000000000:0000 0A 0:0 00:0 0 7 0 9 1\n"
        );
        let found: Vec<_> = parse(&six).collect();
        assert_eq!(
            found.iter().map(Listener::local).collect::<Vec<_>>(),
            [Some(at("[::1]:2379")), Some(at("[::1]:2379")), None]
        );
        assert!(found[0].takes(at("127.0.0.1:2379")) && !found[1].takes(at("127.0.0.1:2379")));
    }

    proptest! {
        #[test]
        fn whatever_is_there_is_read_or_passed_over(file in "[0-9A-F: \\n]{0,300}", any: String) {
            let _ = parse(&file).count() + parse(&any).count();
        }
    }
}
