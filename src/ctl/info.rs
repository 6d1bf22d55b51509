//! `guestctl info NAME`: all that is known of one VM.

use crate::text;
use std::time::SystemTime;

use super::client::{Client, answer};
use super::print::Printer;
use super::recent::Bars;
use super::{Error, freezes, io_errors, json, places, words};
use crate::wire::proto::v1::{GetVirtualMachineRequest, RecentPoint, StateCut, VirtualMachine};

/// Shows one VM.
///
/// # Errors
/// Fails if it is unknown, the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = GetVirtualMachineRequest { name: name.clone() };
    let vm = answer(client.get_virtual_machine(request), &name).await?;
    Ok(printer.value(&json::Vm::from(vm.clone()), || rows(&vm, SystemTime::now(), Bars::of_locale()))?)
}

fn rows(vm: &VirtualMachine, now: SystemTime, bars: Bars) -> String {
    let session = words::session(vm.session());
    let mut lines =
        vec![("Name", vm.name.clone()), ("UUID", vm.uuid.clone()), ("Cluster", text::or_dash(&vm.cluster))];
    lines.extend(several("Labels", words::labels(vm)));
    lines.extend([
        ("Power", power(vm)),
        ("Agent", format!("{session} for {}", words::age(vm.since.as_ref(), now))),
    ]);
    if !vm.reason.is_empty() {
        lines.push(("Reason", vm.reason.clone()));
    }
    lines.extend(several(
        "Disk errors",
        vm.io_errors.iter().map(|error| io_errors::long_words(error, now)).collect(),
    ));
    lines.extend([
        ("Reached at", vm.dial.clone()),
        (
            "Guest's key",
            if vm.guest_key.is_empty() { "none: it uses no keys".to_owned() } else { vm.guest_key.clone() },
        ),
        ("Callback", callback(vm)),
        ("Sessions", vm.sessions.to_string()),
        (
            "Last heard",
            vm.last_heard
                .as_ref()
                .map_or("never".to_owned(), |time| format!("{} ago", words::age(Some(time), now))),
        ),
    ]);
    lines.extend(recent(vm, bars));
    if let Some(guest) = &vm.guest {
        let system = guest.operating_system.clone().unwrap_or_default();
        lines.extend([
            ("Host name", text::or_dash(&guest.host_name)),
            ("System", text::or_dash(&system.pretty_name)),
            ("Kernel", format!("{} {}", text::or_dash(&guest.kernel_release), guest.machine)),
            ("Machine ID", text::or_dash(&guest.machine_id)),
            ("Boot ID", text::or_dash(&guest.boot_id)),
            ("DMI UUID", text::or_dash(&guest.dmi_uuid)),
            ("Agent version", text::or_dash(&guest.agent_version)),
            ("Capabilities", text::or_dash(&guest.capabilities.join(", "))),
        ]);
    }
    if let Some(state) = &vm.state {
        let or_dash = |words: Vec<String>| if words.is_empty() { vec!["-".to_owned()] } else { words };
        let interfaces = state.interfaces.iter().map(|one| match one.hardware_address.as_str() {
            "" => words::interface(one),
            address => format!("{} [{address}]", words::interface(one)),
        });
        lines.extend(several("Interfaces", or_dash(interfaces.collect())));
        let file_systems = state.file_systems.iter().map(|one| words::file_system(Some(one)));
        lines.extend(several("File systems", or_dash(file_systems.collect())));
        lines.extend(several(
            "Users",
            or_dash(state.users.iter().map(|one| words::user(Some(one))).collect()),
        ));
        lines.extend(several(
            "Disks",
            or_dash(state.disks.iter().map(|one| words::disk(Some(one))).collect()),
        ));
        if state.topology.is_some() {
            lines.push(("Runs in", places::words(state.topology.as_ref())));
        }
        if state.node.is_some() {
            lines.push(("Node", places::node_words(state.node.as_ref())));
        }
        if state.health.is_some() {
            lines.push(("Health", places::health_words(state.health.as_ref())));
        }
        if let Some(freeze) = &state.freeze {
            lines.push(("Last freeze", freezes::words(freeze, now)));
        }
        if let Some(cut) = &vm.state_cut {
            lines.push(("Left out", left_out(cut)));
        }
        if vm.missed_events > 0 {
            lines.push(("Missed events", vm.missed_events.to_string()));
        }
    }
    let colon = |key: &str| if key.is_empty() { String::new() } else { format!("{key}:") };
    text::table(&lines.into_iter().map(|(key, value)| [colon(key), value]).collect::<Vec<_>>())
}

/// Puts each text on a line of its own; the first one gets the name.
fn several(name: &'static str, words: Vec<String>) -> impl Iterator<Item = (&'static str, String)> {
    std::iter::once(name).chain(std::iter::repeat("")).zip(words)
}

/// Formats the last 15 minutes, if metrics were requested in that time: bars of 20 s each, and the newest
/// value.
fn recent(vm: &VirtualMachine, bars: Bars) -> Vec<(&'static str, String)> {
    let Some(newest) = vm.recent.as_ref().and_then(|recent| recent.points.last()) else { return Vec::new() };
    let words = |name: &str, ratio: fn(&RecentPoint) -> Option<f32>| {
        let line = bars.line(vm.recent.as_ref(), ratio, 45);
        ratio(newest).map(|now| format!("{name:10} {line} {:3.0}%", now * 100.0))
    };
    let all = [
        words("processors", |point| point.cpu_ratio),
        words("memory", |point| point.memory_used_ratio),
        words("pressure", |point| point.waiting_ratio),
    ];
    several("Last 15 min", all.into_iter().flatten().collect()).collect()
}

/// Lists the parts of the state that were cut because it would take too many bytes.
fn left_out(cut: &StateCut) -> String {
    let several = |count: u32, words: &str| (count > 0).then(|| format!("{count} {words}"));
    let one = |is: bool, word: &str| is.then(|| word.to_owned());
    let parts = [
        several(cut.interfaces, "interfaces"),
        several(cut.file_systems, "file systems"),
        several(cut.users, "users"),
        several(cut.disks, "disks"),
        one(cut.topology, "where it runs"),
        one(cut.node, "the Node"),
        one(cut.health, "the health"),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    format!("{}; limits.state-bytes in the settings allows more", parts.join(", "))
}

fn power(vm: &VirtualMachine) -> String {
    let word = words::power(vm.power());
    if vm.power_problem.is_empty() { word.to_owned() } else { format!("{word}: {}", vm.power_problem) }
}

fn callback(vm: &VirtualMachine) -> String {
    let words = words::callback(vm.callback()).to_owned();
    if vm.callback_reason.is_empty() { words } else { format!("{words}: {}", vm.callback_reason) }
}
