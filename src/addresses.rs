//! IP addresses as settings and requests write them: ranges and subnets. Pure.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Range of addresses of one family, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    first: IpAddr,
    last: IpAddr,
}

/// Network in CIDR notation, without bits set in its host part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subnet {
    address: IpAddr,
    prefix: u8,
}

/// Returns the address as a number; within one family, numbers have the order of the addresses.
pub fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

/// Returns the address with this number in the family of `like`; none if the number is too large for it.
pub fn with_number(like: IpAddr, number: u128) -> Option<IpAddr> {
    Some(match like {
        IpAddr::V4(_) => Ipv4Addr::from(u32::try_from(number).ok()?).into(),
        IpAddr::V6(_) => Ipv6Addr::from(number).into(),
    })
}

/// Parses one address. An IPv4 address in the form of an IPv6 one is refused, because it would be a second name
/// for the same address.
///
/// # Errors
/// A message for the user, if the text is not an address.
pub fn parse(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text
        .parse()
        .map_err(|_| format!("{text:?} is not an IP address; write it like 192.0.2.7 or 2001:db8::7"))?;
    if let IpAddr::V6(address) = address
        && address.to_ipv4_mapped().is_some()
    {
        return Err(format!("{text:?} is an IPv4-mapped IPv6 address; write it like 192.0.2.7"));
    }
    Ok(address)
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl Range {
    /// Creates the range from one address to another.
    ///
    /// # Errors
    /// A message for the user, if the addresses are of different families, or the last one comes before the first.
    pub fn new(first: IpAddr, last: IpAddr) -> Result<Self, String> {
        if first.is_ipv4() != last.is_ipv4() {
            return Err(format!("{first} and {last} are not of the same address family"));
        }
        if first > last {
            return Err(format!("{last} comes before {first}"));
        }
        Ok(Self { first, last })
    }

    /// Parses `first-last`, a single address, or a subnet. Of an IPv4 subnet, the network address and the broadcast
    /// address are left out. Of an IPv6 subnet, the first address is left out, which is that of its routers.
    ///
    /// # Errors
    /// A message for the user, if the text is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some((first, last)) = text.split_once('-') {
            return Self::new(parse(first.trim())?, parse(last.trim())?);
        }
        if !text.contains('/') {
            let address = parse(text)?;
            return Self::new(address, address);
        }
        let subnet = Subnet::parse(text)?;
        let Self { first, last } = subnet.range();
        let (inner_first, inner_last) = match first {
            IpAddr::V4(_) if subnet.prefix < 31 => (number(first) + 1, number(last) - 1),
            IpAddr::V6(_) if subnet.prefix < 127 => (number(first) + 1, number(last)),
            _ => return Ok(Self { first, last }),
        };
        let inner = |number| with_number(first, number).unwrap_or(first);
        Self::new(inner(inner_first), inner(inner_last))
    }

    /// Returns the first address of the range.
    pub fn first(&self) -> IpAddr {
        self.first
    }

    /// Returns the last address of the range.
    pub fn last(&self) -> IpAddr {
        self.last
    }

    /// Returns whether the addresses of the range are IPv4.
    pub fn is_ipv4(&self) -> bool {
        self.first.is_ipv4()
    }

    /// Returns the number of addresses in the range, or the largest `u128` if there are more.
    pub fn len(&self) -> u128 {
        (number(self.last) - number(self.first)).saturating_add(1)
    }

    /// Returns false: a range has its first address at least.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns whether the range contains an address.
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.is_ipv4() && (self.first..=self.last).contains(&address)
    }

    /// Returns whether the two ranges have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.is_ipv4() == other.is_ipv4() && self.first <= other.last && other.first <= self.last
    }
}

impl fmt::Display for Range {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return write!(formatter, "{}", self.first);
        }
        write!(formatter, "{}-{}", self.first, self.last)
    }
}

impl Subnet {
    /// Returns the subnet with a prefix of this length that contains an address.
    ///
    /// # Errors
    /// A message for the user, if the prefix is longer than an address of this family.
    pub fn of(address: IpAddr, prefix: u8) -> Result<Self, String> {
        let most = bits(address);
        if prefix > most {
            return Err(format!("a prefix of {address} has at most {most} bits"));
        }
        let rest = u32::from(most - prefix);
        let cleared = number(address).checked_shr(rest).and_then(|kept| kept.checked_shl(rest)).unwrap_or(0);
        Ok(Self { address: with_number(address, cleared).unwrap_or(address), prefix })
    }

    /// Parses `address/prefix`.
    ///
    /// # Errors
    /// A message for the user, if the text is not a subnet, or has bits set in its host part.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, subnet) = Self::parse_interface(text)?;
        if subnet.address != address {
            return Err(format!("{text:?} has host bits set; write {subnet}"));
        }
        Ok(subnet)
    }

    /// Parses an interface's address such as `192.0.2.7/24`: the address, and the subnet that it is in.
    ///
    /// # Errors
    /// A message for the user, if the text is not of this form.
    pub fn parse_interface(text: &str) -> Result<(IpAddr, Self), String> {
        let wrong = || format!("{text:?} is not a subnet; write it like 192.0.2.0/24 or 2001:db8::/64");
        let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
        if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let address = parse(address)?;
        Ok((address, Self::of(address, prefix.parse().map_err(|_| wrong())?)?))
    }

    /// Returns all addresses of the subnet.
    pub fn range(&self) -> Range {
        let rest = u32::from(bits(self.address) - self.prefix);
        let hosts = 1_u128.checked_shl(rest).map_or(u128::MAX, |hosts| hosts - 1);
        let last = with_number(self.address, number(self.address) | hosts).unwrap_or(self.address);
        Range { first: self.address, last }
    }

    /// Returns whether an address is in the subnet.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.range().contains(address)
    }

    /// Returns whether the addresses of the subnet are IPv4.
    pub fn is_ipv4(&self) -> bool {
        self.address.is_ipv4()
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_are_read_as_they_are_meant() {
        for (text, expected, length) in [
            ("192.0.2.7", "192.0.2.7", 1),
            ("192.0.2.7-192.0.2.9", "192.0.2.7-192.0.2.9", 3),
            ("192.0.2.0/29", "192.0.2.1-192.0.2.6", 6),
            ("192.0.2.4/31", "192.0.2.4-192.0.2.5", 2),
            ("192.0.2.4/32", "192.0.2.4", 1),
            ("0.0.0.0/0", "0.0.0.1-255.255.255.254", u128::from(u32::MAX) - 1),
            ("2001:db8::/126", "2001:db8::1-2001:db8::3", 3),
            ("2001:db8::1 - 2001:db8::2", "2001:db8::1-2001:db8::2", 2),
            ("::/0", "::1-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", u128::MAX),
        ] {
            let range = Range::parse(text).unwrap();
            assert_eq!((range.to_string().as_str(), range.len()), (expected, length), "{text}");
        }
        for (text, words) in [
            ("", "is not an IP address"),
            ("192.0.2.9-192.0.2.7", "comes before"),
            ("192.0.2.9-2001:db8::7", "not of the same address family"),
            ("192.0.2.9/24", "has host bits set; write 192.0.2.0/24"),
            ("192.0.2.0/33", "at most 32 bits"),
            ("192.0.2.0/+8", "is not a subnet"),
            ("192.0.2.0/", "is not a subnet"),
            ("::ffff:192.0.2.7", "is an IPv4-mapped IPv6 address"),
        ] {
            let problem = Range::parse(text).unwrap_err();
            assert!(problem.contains(words), "{text}: {problem}");
        }
    }

    proptest! {
        #[test]
        fn a_subnet_has_what_shares_its_prefix(address: u128, prefix in 0_u8..=128, other: u128) {
            let address = IpAddr::from(Ipv6Addr::from(address));
            prop_assume!(parse(&address.to_string()).is_ok());
            let subnet = Subnet::of(address, prefix).unwrap();
            prop_assert!(subnet.contains(address));
            let other = IpAddr::from(Ipv6Addr::from(other));
            let same = Subnet::of(other, prefix).unwrap() == subnet;
            prop_assert_eq!(subnet.contains(other), same);
        }

        #[test]
        fn whatever_is_read_is_written_as_it_is_read(text: String) {
            if let Ok(range) = Range::parse(&text) {
                let again = Range::parse(&range.to_string()).unwrap();
                prop_assert_eq!(again, range);
            }
        }
    }
}
