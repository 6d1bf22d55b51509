//! Parsers of /proc/net/route and `/proc/net/ipv6_route`: the kernel's main routing tables.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A route of IPv4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route4 {
    /// Outgoing interface, such as `eth0`; `*` for a route that rejects packets.
    pub interface: String,
    /// Destination network.
    pub destination: Ipv4Addr,
    /// Gateway; 0.0.0.0 if there is none.
    pub gateway: Ipv4Addr,
    /// Flags `RTF_*` of linux/route.h.
    pub flags: u32,
    /// Reference count, always 0.
    pub references: i64,
    /// Use count, always 0.
    pub uses: i64,
    /// The smaller it is, the rather it is taken.
    pub metric: i64,
    /// The part of the destination that counts.
    pub mask: Ipv4Addr,
    /// Bytes of a packet; 0 for the interface's own.
    pub mtu: i64,
    /// TCP window in bytes; 0 for the usual.
    pub window: i64,
    /// Initial round trip time in milliseconds; 0 for the usual.
    pub round_trip: i64,
}

/// A route of IPv6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route6 {
    /// Outgoing interface.
    pub interface: String,
    /// Destination network.
    pub destination: Ipv6Addr,
    /// Prefix length of the destination.
    pub destination_prefix: u32,
    /// Source network.
    pub source: Ipv6Addr,
    /// Prefix length of the source.
    pub source_prefix: u32,
    /// Next hop; :: if there is none.
    pub next_hop: Ipv6Addr,
    /// The smaller it is, the rather it is taken.
    pub metric: u32,
    /// Reference count.
    pub references: u32,
    /// Number of lookups, where the kernel counts them.
    pub uses: u32,
    /// Flags `RTF_*` of `linux/ipv6_route.h`.
    pub flags: u32,
}

/// Parses the routes of /proc/net/route. Lines of another form, such as the header, are skipped.
pub fn parse4(file: &str) -> Vec<Route4> {
    file.lines().filter_map(line4).collect()
}

/// Parses the routes of `/proc/net/ipv6_route`. Lines of another form are skipped.
pub fn parse6(file: &str) -> Vec<Route6> {
    file.lines().filter_map(line6).collect()
}

fn line4(line: &str) -> Option<Route4> {
    let mut fields = line.split_ascii_whitespace();
    let mut next = || fields.next();
    Some(Route4 {
        interface: next()?.to_owned(),
        destination: address4(next()?)?,
        gateway: address4(next()?)?,
        flags: hexadecimal(next()?)?,
        references: next()?.parse().ok()?,
        uses: next()?.parse().ok()?,
        metric: next()?.parse().ok()?,
        mask: address4(next()?)?,
        mtu: next()?.parse().ok()?,
        window: next()?.parse().ok()?,
        round_trip: next()?.parse().ok()?,
    })
}

fn line6(line: &str) -> Option<Route6> {
    let mut fields = line.split_ascii_whitespace();
    let mut next = || fields.next();
    Some(Route6 {
        destination: address6(next()?)?,
        destination_prefix: hexadecimal(next()?)?,
        source: address6(next()?)?,
        source_prefix: hexadecimal(next()?)?,
        next_hop: address6(next()?)?,
        metric: hexadecimal(next()?)?,
        references: hexadecimal(next()?)?,
        uses: hexadecimal(next()?)?,
        flags: hexadecimal(next()?)?,
        interface: next()?.to_owned(),
    })
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

/// The four bytes as the machine's own number has them in memory.
fn address4(text: &str) -> Option<Ipv4Addr> {
    if text.len() == 8 { hexadecimal(text).map(|number| Ipv4Addr::from(number.to_ne_bytes())) } else { None }
}

fn address6(text: &str) -> Option<Ipv6Addr> {
    if text.len() == 32 { u128::from_str_radix(text, 16).ok().map(Ipv6Addr::from) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPTURED_4: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t1400\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t-1\t00FFFFFF\t0\t65535\t300
eth0\t0002\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t000200C0\n";

    const CAPTURED_6: &str = "\
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fd000000000000000000000000000001 00000400 00000002 00000000 00000003     eth0
00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000002 00000000 80200001       lo
fd00 40\n";

    #[test]
    #[cfg(target_endian = "little")]
    fn ipv4() {
        let routes = parse4(CAPTURED_4);
        assert_eq!(routes.len(), 2);
        assert_eq!(
            routes[0],
            Route4 {
                interface: "eth0".to_owned(),
                destination: Ipv4Addr::UNSPECIFIED,
                gateway: Ipv4Addr::new(192, 0, 2, 1),
                flags: 3,
                references: 0,
                uses: 0,
                metric: 100,
                mask: Ipv4Addr::UNSPECIFIED,
                mtu: 1400,
                window: 0,
                round_trip: 0,
            }
        );
        assert_eq!(routes[1].destination, Ipv4Addr::new(192, 0, 2, 0));
        assert_eq!(routes[1].mask, Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!((routes[1].metric, routes[1].window, routes[1].round_trip), (-1, 65535, 300));
    }

    #[test]
    fn ipv6() {
        let routes = parse6(CAPTURED_6);
        assert_eq!(routes.len(), 3);
        assert_eq!(routes[0].destination, "fd00::".parse::<Ipv6Addr>().unwrap());
        assert_eq!((routes[0].destination_prefix, routes[0].metric), (64, 256));
        assert_eq!(routes[1].next_hop, "fd00::1".parse::<Ipv6Addr>().unwrap());
        assert_eq!((routes[2].destination_prefix, routes[2].flags), (128, 0x8020_0001));
        assert_eq!((routes[2].metric, routes[2].interface.as_str()), (u32::MAX, "lo"));
    }
}
