//! `guestctl network`: the interfaces and routes of a guest.

use serde::Serialize;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::text;
use crate::wire::proto::v1::{self, ListInterfacesRequest, ListRoutesRequest};

/// Network interface for programs.
#[derive(Debug, Serialize)]
struct Interface {
    name: String,
    hardware_address: String,
    running: bool,
    addresses: Vec<String>,
    counters: Option<Counters>,
}

#[derive(Debug, Serialize)]
struct Counters {
    received_bytes: u64,
    received_packets: u64,
    received_errors: u64,
    received_dropped: u64,
    sent_bytes: u64,
    sent_packets: u64,
    sent_errors: u64,
    sent_dropped: u64,
}

/// Route for programs.
#[derive(Debug, Serialize)]
struct Route {
    interface: String,
    destination: String,
    gateway: String,
    metric: i64,
}

impl From<v1::InterfaceOfGuest> for Interface {
    fn from(one: v1::InterfaceOfGuest) -> Self {
        let counters = one.counters.map(|counters| Counters {
            received_bytes: counters.received_bytes,
            received_packets: counters.received_packets,
            received_errors: counters.received_errors,
            received_dropped: counters.received_dropped,
            sent_bytes: counters.sent_bytes,
            sent_packets: counters.sent_packets,
            sent_errors: counters.sent_errors,
            sent_dropped: counters.sent_dropped,
        });
        let v1::InterfaceOfGuest { name, hardware_address, running, addresses, .. } = one;
        Self { name, hardware_address, running, addresses, counters }
    }
}

/// Shows the interfaces of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn interfaces(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListInterfacesRequest { name: name.clone() };
    let found = answer(daemon.network().list_interfaces(request), &name, SOON).await?.interfaces;
    let values: Vec<_> = found.into_iter().map(Interface::from).collect();
    Ok(printer.value(&values, || {
        let head = ["NAME", "STATE", "HARDWARE ADDRESS", "RECEIVED", "SENT", "ADDRESSES"];
        let mut rows = vec![head.map(str::to_owned)];
        for one in &values {
            let bytes = |count: fn(&Counters) -> u64| {
                one.counters.as_ref().map_or("-".to_owned(), |counters| text::size(count(counters)))
            };
            rows.push([
                one.name.clone(),
                if one.running { "up" } else { "down" }.to_owned(),
                text::or_dash(&one.hardware_address),
                bytes(|counters| counters.received_bytes),
                bytes(|counters| counters.sent_bytes),
                text::or_dash(&one.addresses.join(" ")),
            ]);
        }
        text::table(&rows)
    })?)
}

/// Shows the routes of a guest.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn routes(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListRoutesRequest { name: name.clone() };
    let found = answer(daemon.network().list_routes(request), &name, SOON).await?.routes;
    let value = |one: v1::Route| Route {
        interface: one.interface,
        destination: one.destination,
        gateway: one.gateway,
        metric: one.metric,
    };
    let values: Vec<_> = found.into_iter().map(value).collect();
    Ok(printer.value(&values, || {
        let mut rows = vec![["DESTINATION", "GATEWAY", "INTERFACE", "METRIC"].map(str::to_owned)];
        for one in &values {
            rows.push([
                one.destination.clone(),
                text::or_dash(&one.gateway),
                one.interface.clone(),
                one.metric.to_string(),
            ]);
        }
        text::table(&rows)
    })?)
}
