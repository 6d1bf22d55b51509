//! The routes of both families.

use std::io;

use crate::guest::Guest;
use crate::sys::blocking;
use crate::sys::routes::{self, Route4, Route6};

/// The main routing tables, in the kernel's order. Without IPv6 in the kernel there are none of that.
///
/// # Errors
/// If the routes of IPv4 cannot be read.
pub async fn list(guest: &Guest) -> io::Result<(Vec<Route4>, Vec<Route6>)> {
    let root = guest.root.clone();
    blocking::run(move || {
        let four = root.read("/proc/net/route")?;
        let six = root.read("/proc/net/ipv6_route").unwrap_or_default();
        Ok((routes::parse4(&String::from_utf8_lossy(&four)), routes::parse6(&String::from_utf8_lossy(&six))))
    })
    .await
}
