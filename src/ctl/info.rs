//! `guestctl info NAME`: everything that is known of one VM.

use std::time::SystemTime;

use super::client::{Client, answer};
use super::print::{Printer, table};
use super::{Error, json, words};
use crate::wire::proto::v1::{GetVirtualMachineRequest, VirtualMachine};

/// Shows one VM.
///
/// # Errors
/// If it is unknown, the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = GetVirtualMachineRequest { name: name.clone() };
    let vm = answer(client.get_virtual_machine(request), &name).await?;
    Ok(printer.value(&json::Vm::from(vm.clone()), || rows(&vm, SystemTime::now()))?)
}

fn rows(vm: &VirtualMachine, now: SystemTime) -> String {
    let session = words::session(vm.session());
    let mut lines = vec![
        ("Name", vm.name.clone()),
        ("UUID", vm.uuid.clone()),
        ("Cluster", words::or_dash(&vm.cluster)),
        ("Power", words::power(vm.power()).to_owned()),
        ("Agent", format!("{session} for {}", words::age(vm.since.as_ref(), now))),
    ];
    if !vm.reason.is_empty() {
        lines.push(("Reason", vm.reason.clone()));
    }
    lines.extend([
        ("Dialled at", vm.dial.clone()),
        ("Sessions", vm.sessions.to_string()),
        (
            "Last heard",
            vm.last_heard
                .as_ref()
                .map_or("never".to_owned(), |time| format!("{} ago", words::age(Some(time), now))),
        ),
    ]);
    if let Some(guest) = &vm.guest {
        let system = guest.operating_system.clone().unwrap_or_default();
        lines.extend([
            ("Host name", words::or_dash(&guest.host_name)),
            ("System", words::or_dash(&system.pretty_name)),
            ("Kernel", format!("{} {}", words::or_dash(&guest.kernel_release), guest.machine)),
            ("Machine ID", words::or_dash(&guest.machine_id)),
            ("Boot ID", words::or_dash(&guest.boot_id)),
            ("DMI UUID", words::or_dash(&guest.dmi_uuid)),
            ("Agent version", words::or_dash(&guest.agent_version)),
            ("Capabilities", words::or_dash(&guest.capabilities.join(", "))),
        ]);
    }
    table(&lines.into_iter().map(|(key, value)| [format!("{key}:"), value]).collect::<Vec<_>>())
}
