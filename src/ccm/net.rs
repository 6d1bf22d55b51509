//! Addresses with prefixes, in the notation of agents and settings. Pure.

use std::net::IpAddr;
use std::str::FromStr;

/// Address and length of its prefix, such as `192.0.2.7/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Net {
    /// Address of the interface.
    pub address: IpAddr,
    /// Length of the prefix, at most 32 or 128.
    pub prefix: u8,
}

/// Returns the number of bits of an address of this family.
fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl Net {
    /// Returns whether the prefix spans the whole address. Such an address was usually not added by the network's
    /// owner.
    pub fn is_single(self) -> bool {
        self.prefix == bits(self.address)
    }

    /// Returns whether an address is in the same network.
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(u32::from(32 - self.prefix.min(32))).unwrap_or_default();
                u32::from(own) & mask == u32::from(other) & mask
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(u32::from(128 - self.prefix.min(128))).unwrap_or_default();
                u128::from(own) & mask == u128::from(other) & mask
            }
            _ => false,
        }
    }
}

impl FromStr for Net {
    type Err = String;

    /// Parses an address. Without a prefix, the prefix spans the whole address.
    fn from_str(text: &str) -> Result<Self, String> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(one, two)| (one, Some(two)));
        let wrong = || format!("{text:?} is not an address with a prefix, such as 192.0.2.0/24");
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let prefix = match prefix {
            None => bits(address),
            Some(prefix) => prefix.parse().map_err(|_| wrong())?,
        };
        if prefix > bits(address) { Err(wrong()) } else { Ok(Self { address, prefix }) }
    }
}

/// Returns whether others on the network can reach this address.
pub fn is_usable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.segments()[0] & 0xffc0 == 0xfe80,
    };
    !(is_link_local || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn networks_contain_their_addresses_and_no_others() {
        for (net, inside, outside) in [
            ("192.0.2.7/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("0.0.0.0/0", "255.255.255.255", "::"),
            ("2001:db8::1/32", "2001:db8:ffff::", "2001:db9::"),
            ("::/0", "2001:db8::", "192.0.2.7"),
            ("2001:db8::7/128", "2001:db8::7", "2001:db8::8"),
        ] {
            let parsed: Net = net.parse().unwrap();
            assert!(parsed.contains(inside.parse().unwrap()), "{net} {inside}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{net} {outside}");
        }
        for wrong in ["", "/", "192.0.2.7/33", "192.0.2.7/-1", "::/129", "192.0.2/24", "a/1", "192.0.2.7/"] {
            assert!(wrong.parse::<Net>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_only_the_link_or_the_guest_itself_reaches_is_not_usable() {
        for address in [
            "127.0.0.1",
            "169.254.1.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(!is_usable(address.parse().unwrap()), "{address}");
        }
        for address in ["192.0.2.7", "10.0.0.1", "2001:db8::1", "fd00::1"] {
            assert!(is_usable(address.parse().unwrap()), "{address}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_or_refused(text in "\\PC{0,40}") {
            if let Ok(net) = text.parse::<Net>() {
                prop_assert!(net.contains(net.address));
            }
        }
    }
}
