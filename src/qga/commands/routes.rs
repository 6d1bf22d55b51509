//! Command that lists routes.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;

use crate::guest::routes;
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Pending, Run};
use crate::sys::routes::{Route4, Route6};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[Command {
    name: "guest-network-get-route",
    role: Some(Role::Status),
    since: "9.1",
    returns: "[{iface, destination, metric, flags, refcnt, use, version (4 or 6)}], with {gateway, mask, mtu, window, \
              irtt} in IPv4 and {desprefixlen, source, srcprefixlen, nexthop} in IPv6",
    summary: "The routes of IPv4 and IPv6.",
    differences: "Numbers of IPv6 are never negative: qemu-ga gives flags and metrics from 2^31 on with their sign. \
                  Without IPv6 in the kernel there are the routes of IPv4, and no error.",
    run: Run::Later(get_route),
    ..Command::USUAL
}];

/// Route in the form of QEMU's schema, where the prefixes are strings.
#[derive(Serialize)]
#[serde(untagged)]
enum Route {
    Four {
        iface: String,
        destination: Ipv4Addr,
        metric: i64,
        gateway: Ipv4Addr,
        mask: Ipv4Addr,
        irtt: i64,
        flags: u32,
        refcnt: i64,
        r#use: i64,
        window: i64,
        mtu: i64,
        version: u8,
    },
    Six {
        iface: String,
        destination: Ipv6Addr,
        metric: u32,
        flags: u32,
        refcnt: u32,
        r#use: u32,
        desprefixlen: String,
        source: Ipv6Addr,
        srcprefixlen: String,
        nexthop: Ipv6Addr,
        version: u8,
    },
}

/// Implements `guest-network-get-route`.
pub fn get_route<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        let (four, six) = routes::list(&call.context.guest).await?;
        let all = four.into_iter().map(four_reply).chain(six.into_iter().map(six_reply));
        Reply::value(&all.collect::<Vec<_>>())
    })
}

fn four_reply(route: Route4) -> Route {
    Route::Four {
        iface: route.interface,
        destination: route.destination,
        metric: route.metric,
        gateway: route.gateway,
        mask: route.mask,
        irtt: route.round_trip,
        flags: route.flags,
        refcnt: route.references,
        r#use: route.uses,
        window: route.window,
        mtu: route.mtu,
        version: 4,
    }
}

fn six_reply(route: Route6) -> Route {
    Route::Six {
        iface: route.interface,
        destination: route.destination,
        metric: route.metric,
        flags: route.flags,
        refcnt: route.references,
        r#use: route.uses,
        desprefixlen: route.destination_prefix.to_string(),
        source: route.source,
        srcprefixlen: route.source_prefix.to_string(),
        nexthop: route.next_hop,
        version: 6,
    }
}
