//! TCP: listeners on all addresses, and connections with a peer that may vanish without a word.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Keepalive settings: seconds of silence before the first probe, and seconds between two probes.
const IDLE: u32 = 10;
const INTERVAL: u32 = 5;
/// Number of unanswered probes after which the connection is closed.
const PROBES: u32 = 3;
/// Time in milliseconds after which a peer that does not acknowledge data counts as unreachable.
const UNACKNOWLEDGED: u32 = 20_000;

/// Breaks the connection some 25 s after its peer is no longer there.
///
/// # Errors
/// If the kernel refuses it.
pub fn notice_silence(stream: &impl AsFd) -> io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &IDLE)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &INTERVAL)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED)?;
    Ok(())
}

/// Listens at an address; `[::]` means all addresses of IPv6 and IPv4, whatever `net.ipv6.bindv6only` says, and those of IPv4
/// alone where the kernel has no IPv6.
///
/// # Errors
/// If the address cannot be had.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match bind(address) {
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && has_no_ipv6(&error) => {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        outcome => outcome,
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        let socket = TcpSocket::new_v6()?;
        setsockopt(&socket, sockopt::Ipv6V6Only, &(address.ip() != Ipv6Addr::UNSPECIFIED))?;
        socket
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Returns whether the error means that the kernel has no IPv6 (`ipv6.disable=1`), or this network namespace
/// has none.
fn has_no_ipv6(error: &io::Error) -> bool {
    let errors = [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL].map(|errno| errno as i32);
    error.raw_os_error().is_some_and(|code| errors.contains(&code))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn all_addresses_are_those_of_both_families() {
        let all = listen("[::]:0".parse().unwrap()).unwrap();
        let port = all.local_addr().unwrap().port();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok());
        if all.local_addr().unwrap().is_ipv6() {
            assert!(TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.is_ok());
        }
        // An address of one family is that alone.
        let one = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = one.local_addr().unwrap().port();
        assert!(TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.is_err());
        let taken = listen(one.local_addr().unwrap()).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn only_a_kernel_without_ipv6_lacks_it() {
        let is = |errno: Errno| has_no_ipv6(&io::Error::from_raw_os_error(errno as i32));
        assert!(is(Errno::EAFNOSUPPORT) && is(Errno::EADDRNOTAVAIL));
        assert!(!is(Errno::EADDRINUSE) && !is(Errno::EACCES));
    }
}
