//! Commands about the network.

use std::net::IpAddr;

use serde::Serialize;

use crate::guest::network::{self, Address, Interface};
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Outcome, Run};
use crate::sys::rtnetlink::message::Statistics;

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[Command {
    name: "guest-network-get-interfaces",
    role: Some(Role::Status),
    since: "1.1",
    returns: "[{name, hardware-address?, ip-addresses[{ip-address, ip-address-type, prefix}]?, statistics?}]",
    summary: "Network interfaces with their addresses and counters.",
    differences: "The time it takes grows with the number of interfaces, not with its square.",
    run: Run::Now(get_interfaces),
    ..Command::USUAL
}];

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct InterfaceReply {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hardware_address: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ip_addresses: Vec<AddressReply>,
    #[serde(skip_serializing_if = "Option::is_none")]
    statistics: Option<StatisticsReply>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct AddressReply {
    ip_address: IpAddr,
    ip_address_type: &'static str,
    prefix: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct StatisticsReply {
    rx_bytes: u64,
    rx_packets: u64,
    rx_errs: u64,
    rx_dropped: u64,
    tx_bytes: u64,
    tx_packets: u64,
    tx_errs: u64,
    tx_dropped: u64,
}

/// Implements `guest-network-get-interfaces`.
pub fn get_interfaces(call: &Call<'_>) -> Outcome {
    call.arguments.none()?;
    let interfaces = network::interfaces()?;
    Reply::value(&interfaces.into_iter().map(interface).collect::<Vec<_>>())
}

fn interface(interface: Interface) -> InterfaceReply {
    // As with qemu-ga, only interfaces that have an address come with counters.
    let counters = interface.statistics.filter(|_| !interface.addresses.is_empty());
    InterfaceReply {
        name: interface.name,
        hardware_address: interface.link_address.as_deref().map(hardware_address),
        ip_addresses: interface.addresses.iter().map(address).collect(),
        statistics: counters.as_ref().map(statistics),
    }
}

/// Formats a hardware address: as in qemu-ga, the first six bytes of any link-layer address.
fn hardware_address(link_address: &[u8]) -> String {
    let mut bytes = [0; 6];
    for (byte, given) in bytes.iter_mut().zip(link_address) {
        *byte = *given;
    }
    network::hardware_address(bytes)
}

fn address(address: &Address) -> AddressReply {
    AddressReply {
        ip_address: address.ip,
        ip_address_type: if address.ip.is_ipv4() { "ipv4" } else { "ipv6" },
        prefix: address.prefix,
    }
}

fn statistics(statistics: &Statistics) -> StatisticsReply {
    StatisticsReply {
        rx_bytes: statistics.receive_bytes,
        rx_packets: statistics.receive_packets,
        rx_errs: statistics.receive_errors,
        rx_dropped: statistics.receive_dropped,
        tx_bytes: statistics.transmit_bytes,
        tx_packets: statistics.transmit_packets,
        tx_errs: statistics.transmit_errors,
        tx_dropped: statistics.transmit_dropped,
    }
}
