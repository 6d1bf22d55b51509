//! `guestctl ls`: VMs, one on each line. To add a column: its variant of [`Column`], and its arms in `cell` and `order`.

use std::cmp::Ordering;
use std::time::SystemTime;

use clap::ValueEnum;

use super::client::{self, Client, answer};
use super::print::Printer;
use super::{Error, json, words};
pub use crate::labels::selector::Selector;
use crate::text::colours::{Colours, Style};
use crate::text::{self, wildcard};
use crate::wire::proto::v1::{GetHostStatusRequest, HostStatus, VirtualMachine};

/// Options of the list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct List {
    /// Names of VMs, and patterns of names; empty for all VMs.
    pub names: Vec<String>,
    /// Labels that the VMs must have; empty for all VMs.
    pub selector: Selector,
    /// Column that rows are sorted by; `None` means by name.
    pub sort: Option<Column>,
    /// True to show more columns.
    pub wide: bool,
    /// True to show labels.
    pub show_labels: bool,
}

/// What is shown of a VM, in the order of the columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "a column is called as its head")]
pub enum Column {
    Name,
    Cluster,
    Power,
    Agent,
    Hostname,
    Os,
    Version,
    Since,
    Heard,
    Callback,
    Addresses,
    Node,
    Zone,
    Kernel,
    BootId,
    Dial,
    Reason,
    Labels,
}

impl Column {
    fn is_for_wide(self) -> bool {
        matches!(
            self,
            Self::Heard
                | Self::Callback
                | Self::Addresses
                | Self::Node
                | Self::Zone
                | Self::Kernel
                | Self::BootId
                | Self::Dial
        )
    }

    /// Returns whether the column shows a part of a guest's state, which a list contains only on request.
    fn is_of_state(self) -> bool {
        matches!(self, Self::Addresses | Self::Node | Self::Zone)
    }

    fn head(self) -> String {
        let name = self.to_possible_value().map(|value| value.get_name().to_uppercase());
        name.unwrap_or_default().replace('-', " ")
    }

    fn cell(self, vm: &VirtualMachine, now: SystemTime) -> String {
        let guest = vm.guest.as_ref();
        let of_guest = |value: Option<&String>| text::or_dash(value.map_or("", String::as_str));
        match self {
            Self::Name => vm.name.clone(),
            Self::Cluster => text::or_dash(&vm.cluster),
            Self::Power => words::power(vm.power()).to_owned(),
            Self::Agent => words::session(vm.session()).to_owned(),
            Self::Hostname => of_guest(guest.map(|guest| &guest.host_name)),
            Self::Os => {
                let system = guest.and_then(|guest| guest.operating_system.as_ref());
                of_guest(system.map(|system| match system.pretty_name.as_str() {
                    "" => &system.name,
                    _ => &system.pretty_name,
                }))
            }
            Self::Version => of_guest(guest.map(|guest| &guest.agent_version)),
            Self::Since => words::age(vm.since.as_ref(), now),
            Self::Heard => words::age(vm.last_heard.as_ref(), now),
            Self::Callback => words::callback(vm.callback()).to_owned(),
            Self::Addresses => text::or_dash(&addresses(vm).join(",")),
            Self::Node => text::or_dash(node(vm)),
            Self::Zone => text::or_dash(zone(vm)),
            Self::Kernel => of_guest(guest.map(|guest| &guest.kernel_release)),
            Self::BootId => of_guest(guest.map(|guest| &guest.boot_id)),
            Self::Dial => vm.dial.clone(),
            Self::Reason => words::reasons(vm),
            Self::Labels => text::or_dash(&words::labels(vm).join(",")),
        }
    }

    /// Compares two VMs by this column. Unknown values come last. Ages are compared as times, the most recent
    /// first.
    fn order(self, one: &VirtualMachine, other: &VirtualMachine, now: SystemTime) -> Ordering {
        let time = |vm: &VirtualMachine| {
            let time = if self == Self::Since { vm.since } else { vm.last_heard };
            time.map(|time| (time.seconds, time.nanos))
        };
        match self {
            // `None` is less than any time.
            Self::Since | Self::Heard => time(other).cmp(&time(one)),
            _ => {
                let (one, other) = (self.cell(one, now), self.cell(other, now));
                let unknown = |cell: &str| cell.is_empty() || cell == "-";
                unknown(&one).cmp(&unknown(&other)).then_with(|| text::natural_order(&one, &other))
            }
        }
    }
}

/// Lists VMs, and warns of settings that are not in force.
///
/// # Errors
/// Fails if the daemon does not answer, it does not know a named VM, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, list: &List) -> Result<(), Error> {
    let with_state = list.wide || printer.is_for_programs() || list.sort.is_some_and(Column::is_of_state);
    let shown = show(printer, client::vms(&mut client, with_state).await?, list);
    let status = answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
    if let Some(words) = warning(&status, SystemTime::now()) {
        printer.warn(&words);
    }
    shown
}

/// Writes those of these VMs that the options select.
///
/// # Errors
/// Fails if no VM that is selected by its labels has one of the names, after the others were written; also if
/// standard output cannot be written.
pub fn show(printer: &mut Printer, mut vms: Vec<VirtualMachine>, list: &List) -> Result<(), Error> {
    let now = SystemTime::now();
    vms.retain(|vm| list.selector.matches(&vm.labels));
    let missing = list.names.iter().filter(|name| !vms.iter().any(|vm| wildcard::matches(name, &vm.name)));
    let missing: Vec<_> = missing.cloned().collect();
    if !list.names.is_empty() {
        vms.retain(|vm| list.names.iter().any(|name| wildcard::matches(name, &vm.name)));
    }
    if let Some(column) = list.sort {
        vms.sort_by(|one, other| column.order(one, other, now));
    }
    let values: Vec<_> = vms.iter().cloned().map(json::Vm::from).collect();
    let colours = printer.colours();
    printer.value(&values, || rows(&vms, list, now, colours))?;
    match missing.as_slice() {
        [] => Ok(()),
        names if list.selector.is_empty() => Err(Error::NoneListed(names.join(", "))),
        names => Err(Error::NoneSelected(names.join(", "), list.selector.to_string())),
    }
}

fn warning(status: &HostStatus, now: SystemTime) -> Option<String> {
    let age = words::age(status.settings_since.as_ref(), now);
    let settings = (!status.settings_problem.is_empty()).then(|| {
        format!("the settings are invalid, and those of {age} ago stay in force: {}", status.settings_problem)
    });
    let backend = status.backend_problems.iter().cloned();
    let all: Vec<_> = settings.into_iter().chain(backend).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

fn rows(vms: &[VirtualMachine], list: &List, now: SystemTime, colours: Colours) -> String {
    let reasons = vms.iter().any(|vm| !words::reasons(vm).is_empty());
    let is_shown = |column: &Column| match column {
        Column::Reason => reasons,
        Column::Labels => list.show_labels,
        column => list.wide || !column.is_for_wide(),
    };
    let columns: Vec<_> = Column::value_variants().iter().copied().filter(is_shown).collect();
    let head = columns.iter().map(|column| column.head()).collect::<Vec<_>>();
    let cells = |vm: &VirtualMachine| columns.iter().map(|column| column.cell(vm, now)).collect();
    let rows: Vec<_> = std::iter::once(head).chain(vms.iter().map(cells)).collect();
    text::painted_table(&rows, |row, column, cell| {
        let vm = row.checked_sub(1).and_then(|number| vms.get(number));
        match (vm, columns.get(column)) {
            (None, _) => colours.paint(Style::Bold, cell),
            (Some(vm), Some(Column::Agent)) => words::session_style(vm.session())
                .map_or_else(|| cell.to_owned(), |style| colours.paint(style, cell)),
            _ => cell.to_owned(),
        }
    })
}

/// Returns the name of the guest's Node.
fn node(vm: &VirtualMachine) -> &str {
    let node = vm.state.as_ref().and_then(|state| state.node.as_ref());
    node.map_or("", |node| &node.name)
}

/// Returns the zone that the guest has been informed of.
fn zone(vm: &VirtualMachine) -> &str {
    let topology = vm.state.as_ref().and_then(|state| state.topology.as_ref());
    topology.map_or("", |topology| &topology.zone)
}

/// Returns the addresses of interfaces that are up, without prefixes and without link-local addresses.
fn addresses(vm: &VirtualMachine) -> Vec<&str> {
    let interfaces = vm.state.iter().flat_map(|state| &state.interfaces);
    let addresses = interfaces.filter(|interface| interface.running).flat_map(|one| &one.addresses);
    let bare = addresses.map(|address| address.split('/').next().unwrap_or(address));
    bare.filter(|address| !address.to_ascii_lowercase().starts_with("fe80:")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost_types::Timestamp;

    use crate::wire::proto::v1::{GuestState, NetworkInterface, SessionState};

    fn sorted(vms: &[VirtualMachine], column: Column) -> Vec<&str> {
        let mut vms: Vec<_> = vms.iter().collect();
        vms.sort_by(|one, other| column.order(one, other, SystemTime::now()));
        vms.into_iter().map(|vm| vm.name.as_str()).collect()
    }

    #[test]
    fn columns_sort_as_people_read_them() {
        let vm = |name: &str, cluster: &str, since: Option<i64>, session: SessionState| VirtualMachine {
            name: name.to_owned(),
            cluster: cluster.to_owned(),
            since: since.map(|seconds| Timestamp { seconds, nanos: 0 }),
            session: session.into(),
            ..VirtualMachine::default()
        };
        let vms = [
            vm("web-10", "", Some(100), SessionState::Connected),
            vm("web-2", "b", None, SessionState::Refused),
            vm("db", "a", Some(900_000), SessionState::Connected),
        ];
        assert_eq!(sorted(&vms, Column::Name), ["db", "web-2", "web-10"]);
        assert_eq!(sorted(&vms, Column::Cluster), ["db", "web-2", "web-10"], "what is not known comes last");
        assert_eq!(sorted(&vms, Column::Since), ["db", "web-10", "web-2"]);
        assert_eq!(sorted(&vms, Column::Agent), ["web-10", "db", "web-2"], "others stay in their order");
    }

    #[test]
    fn labels_are_a_column_on_request() {
        let vm = |name: &str, labels: &[(&str, &str)]| VirtualMachine {
            name: name.to_owned(),
            labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            ..VirtualMachine::default()
        };
        let vms = [vm("db", &[("tier", "db"), ("gpu", "")]), vm("web", &[])];
        let ends = |list: &List| {
            let table = rows(&vms, list, SystemTime::now(), Colours::Left);
            table.lines().map(|line| line.rsplit("  ").next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let list = List { show_labels: true, ..List::default() };
        assert_eq!(ends(&list), ["LABELS", "gpu=,tier=db", "-"]);
        assert_eq!(ends(&List { wide: true, ..List::default() })[0], "DIAL");
        assert_eq!(sorted(&vms, Column::Labels), ["db", "web"]);
    }

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
