//! `guestctl ls`: all VMs, one on each line.

use crate::text;
use std::time::SystemTime;

use super::client::{self, Client, answer};
use super::print::Printer;
use super::{Error, json, words};
use crate::wire::proto::v1::{GetHostStatusRequest, HostStatus, VirtualMachine};

/// Lists all VMs, `wide` with more columns. Warns of settings that are not in force.
///
/// # Errors
/// If the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, wide: bool) -> Result<(), Error> {
    let with_state = wide || printer.is_for_programs();
    show(printer, &client::vms(&mut client, with_state).await?, wide)?;
    let status = answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
    if let Some(words) = warning(&status, SystemTime::now()) {
        printer.warn(&words);
    }
    Ok(())
}

/// Writes a list of VMs.
///
/// # Errors
/// If standard output cannot be written.
pub fn show(printer: &mut Printer, vms: &[VirtualMachine], wide: bool) -> Result<(), Error> {
    let values: Vec<_> = vms.iter().cloned().map(json::Vm::from).collect();
    Ok(printer.value(&values, || rows(vms, wide, SystemTime::now()))?)
}

fn warning(status: &HostStatus, now: SystemTime) -> Option<String> {
    let age = words::age(status.settings_since.as_ref(), now);
    let settings = (!status.settings_problem.is_empty())
        .then(|| format!("the settings of {age} ago are in force: {}", status.settings_problem));
    let backend = status.backend_problems.iter().cloned();
    let all: Vec<_> = settings.into_iter().chain(backend).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

fn rows(vms: &[VirtualMachine], wide: bool, now: SystemTime) -> String {
    let reasons = vms.iter().any(|vm| !words::reasons(vm).is_empty());
    let mut head = vec!["NAME", "CLUSTER", "POWER", "AGENT", "HOSTNAME", "OS", "VERSION", "SINCE"];
    if wide {
        head.extend(["HEARD", "CALLBACK", "ADDRESSES", "NODE", "ZONE", "KERNEL", "BOOT ID", "DIAL"]);
    }
    head.push(if reasons { "REASON" } else { "" });
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for vm in vms {
        let guest = vm.guest.clone().unwrap_or_default();
        let system = guest.operating_system.unwrap_or_default();
        let mut row = vec![
            vm.name.clone(),
            text::or_dash(&vm.cluster),
            words::power(vm.power()).to_owned(),
            words::session(vm.session()).to_owned(),
            text::or_dash(&guest.host_name),
            text::or_dash(if system.pretty_name.is_empty() { &system.name } else { &system.pretty_name }),
            text::or_dash(&guest.agent_version),
            words::age(vm.since.as_ref(), now),
        ];
        if wide {
            row.extend([
                words::age(vm.last_heard.as_ref(), now),
                words::callback(vm.callback()).to_owned(),
                text::or_dash(&addresses(vm).join(",")),
                text::or_dash(node(vm)),
                text::or_dash(zone(vm)),
                text::or_dash(&guest.kernel_release),
                text::or_dash(&guest.boot_id),
                vm.dial.clone(),
            ]);
        }
        row.push(words::reasons(vm));
        rows.push(row);
    }
    text::table(&rows)
}

/// The Node that the guest is.
fn node(vm: &VirtualMachine) -> &str {
    let node = vm.state.as_ref().and_then(|state| state.node.as_ref());
    node.map_or("", |node| &node.name)
}

/// Where the guest knows that it is.
fn zone(vm: &VirtualMachine) -> &str {
    let topology = vm.state.as_ref().and_then(|state| state.topology.as_ref());
    topology.map_or("", |topology| &topology.zone)
}

/// Those of interfaces that run, without their prefixes; none that is link-local.
fn addresses(vm: &VirtualMachine) -> Vec<&str> {
    let interfaces = vm.state.iter().flat_map(|state| &state.interfaces);
    let addresses = interfaces.filter(|interface| interface.running).flat_map(|one| &one.addresses);
    let bare = addresses.map(|address| address.split('/').next().unwrap_or(address));
    bare.filter(|address| !address.to_ascii_lowercase().starts_with("fe80:")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::{GuestState, NetworkInterface};

    #[test]
    fn addresses_that_others_can_use() {
        let interface = |running, addresses: &[&str]| NetworkInterface {
            running,
            addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
            ..NetworkInterface::default()
        };
        let interfaces = vec![
            interface(true, &["192.0.2.7/24", "2001:db8::7/64", "fe80::1/64"]),
            interface(false, &["192.0.2.8/24"]),
            interface(true, &["198.51.100.1"]),
        ];
        let state = Some(GuestState { interfaces, ..GuestState::default() });
        let vm = VirtualMachine { state: state.map(Box::new), ..VirtualMachine::default() };
        assert_eq!(addresses(&vm), ["192.0.2.7", "2001:db8::7", "198.51.100.1"]);
    }
}
