//! Routes of IPv4 and IPv6.

use std::io;

use crate::guest::Guest;
use crate::sys::blocking;
use crate::sys::routes::{self, Route4, Route6};

/// Returns the main routing tables, in the kernel's order. The IPv6 table is empty if the kernel lacks IPv6.
///
/// # Errors
/// If the IPv4 routes cannot be read.
pub async fn list(guest: &Guest) -> io::Result<(Vec<Route4>, Vec<Route6>)> {
    let root = guest.root.clone();
    blocking::run(move || {
        let four = root.read("/proc/net/route")?;
        let six = root.read("/proc/net/ipv6_route").unwrap_or_default();
        Ok((routes::parse4(&String::from_utf8_lossy(&four)), routes::parse6(&String::from_utf8_lossy(&six))))
    })
    .await
}
