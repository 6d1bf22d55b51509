//! `guestctl nodes`: the Kubernetes Nodes of the guests, as last reported by their agents.

use serde::Serialize;

use super::client::{self, Client};
use super::print::Printer;
use super::{Error, places, words};
use crate::labels::{REGION, ZONE};
use crate::text;
use crate::wire::proto::v1::{Node, VirtualMachine};

#[derive(Debug, Serialize)]
struct One {
    name: String,
    cluster: String,
    session: &'static str,
    node: places::Node,
}

/// Shows the Nodes; guests that are not nodes are left out.
///
/// # Errors
/// Fails if the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer) -> Result<(), Error> {
    show(printer, client::vms(&mut client, true).await?)
}

/// Writes the Nodes of these VMs, as far as their state is known.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn show(printer: &mut Printer, vms: Vec<VirtualMachine>) -> Result<(), Error> {
    let nodes: Vec<_> =
        vms.into_iter().filter_map(|mut vm| Some((vm.state.as_mut()?.node.take()?, vm))).collect();
    let one = |(node, vm): &(Node, VirtualMachine)| One {
        name: vm.name.clone(),
        cluster: vm.cluster.clone(),
        session: words::session(vm.session()),
        node: node.clone().into(),
    };
    let all: Vec<_> = nodes.iter().map(one).collect();
    Ok(printer.value(&all, || rows(&nodes))?)
}

fn rows(nodes: &[(Node, VirtualMachine)]) -> String {
    let head =
        ["NAME", "CLUSTER", "NODE", "READY", "REGION", "ZONE", "LABELS", "ADDRESSES", "TAINTS", "REASON"];
    let mut rows = vec![head.map(str::to_owned)];
    for (node, vm) in nodes {
        let label = |key: &str| text::or_dash(node.labels.get(key).map_or("", String::as_str));
        let addresses: Vec<_> =
            node.addresses.iter().filter_map(|address| Some(address.split_once(' ')?.1)).collect();
        let reasons = [node.reason.as_str(), node.ready_reason.as_str()];
        let reasons: Vec<_> = reasons.into_iter().filter(|reason| !reason.is_empty()).collect();
        rows.push([
            vm.name.clone(),
            text::or_dash(&vm.cluster),
            text::or_dash(&node.name),
            text::or_dash(&node.ready),
            label(REGION),
            label(ZONE),
            node.state.clone(),
            text::or_dash(&addresses.join(",")),
            text::or_dash(&node.taints.join(",")),
            reasons.join("; "),
        ]);
    }
    text::table(&rows)
}
