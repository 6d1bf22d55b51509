//! `guestctl ls`: all VMs, one on each line.

use std::time::SystemTime;

use super::client::{Client, answer};
use super::print::{Printer, table};
use super::{Error, json, words};
use crate::wire::proto::v1::{ListVirtualMachinesRequest, VirtualMachine};

/// Lists all VMs.
///
/// # Errors
/// If the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer) -> Result<(), Error> {
    let list = answer(client.list_virtual_machines(ListVirtualMachinesRequest {}), "").await?;
    let vms = list.virtual_machines;
    let values: Vec<_> = vms.iter().cloned().map(json::Vm::from).collect();
    Ok(printer.value(&values, || rows(&vms, SystemTime::now()))?)
}

fn rows(vms: &[VirtualMachine], now: SystemTime) -> String {
    let reasons = vms.iter().any(|vm| !vm.reason.is_empty());
    let reason = if reasons { "REASON" } else { "" };
    let head = ["NAME", "CLUSTER", "POWER", "AGENT", "HOSTNAME", "OS", "VERSION", "SINCE", reason];
    let mut rows = vec![head.map(str::to_owned)];
    for vm in vms {
        let guest = vm.guest.clone().unwrap_or_default();
        let system = guest.operating_system.unwrap_or_default();
        rows.push([
            vm.name.clone(),
            words::or_dash(&vm.cluster),
            words::power(vm.power()).to_owned(),
            words::session(vm.session()).to_owned(),
            words::or_dash(&guest.host_name),
            words::or_dash(if system.pretty_name.is_empty() { &system.name } else { &system.pretty_name }),
            words::or_dash(&guest.agent_version),
            words::age(vm.since.as_ref(), now),
            vm.reason.clone(),
        ]);
    }
    table(&rows)
}
