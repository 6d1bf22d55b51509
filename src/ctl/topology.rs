//! `guestctl topology`: where this host and each VM are, and whether the guests know.

use std::time::SystemTime;

use serde::Serialize;

use super::client::{self, Client, answer};
use super::print::Printer;
use super::{Error, places, words};
use crate::text;
use crate::wire::proto::v1::{
    GetHostStatusRequest, SessionState, Topology, TopologyStanding, VirtualMachine,
};

#[derive(Debug, Serialize)]
struct All {
    host: Option<places::Place>,
    /// Hosts of a cluster; empty without a cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hosts: Vec<OneHost>,
    virtual_machines: Vec<One>,
}

#[derive(Debug, Serialize)]
struct OneHost {
    name: String,
    topology: Option<places::Place>,
}

impl From<&Host> for OneHost {
    fn from(host: &Host) -> Self {
        Self { name: host.name.clone(), topology: host.topology.clone().map(places::Place::from) }
    }
}

#[derive(Debug, Serialize)]
struct One {
    name: String,
    session: &'static str,
    state: &'static str,
    topology: Option<places::Standing>,
}

/// Shows the topology.
///
/// # Errors
/// Fails if the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer) -> Result<(), Error> {
    let status = answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
    let host = Host { name: "(this host)".to_owned(), topology: status.topology };
    show(printer, &[host], &client::vms(&mut client, false).await?)
}

/// Topology of a host.
#[derive(Debug)]
pub struct Host {
    /// Name of the host here.
    pub name: String,
    /// Topology, if the host has one.
    pub topology: Option<Topology>,
}

/// Writes where hosts and their VMs are.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn show(printer: &mut Printer, hosts: &[Host], vms: &[VirtualMachine]) -> Result<(), Error> {
    let one = |vm: &VirtualMachine| One {
        name: vm.name.clone(),
        session: words::session(vm.session()),
        state: state(vm),
        topology: vm.topology.clone().map(places::Standing::from),
    };
    // A single host shows its own topology; in a cluster that of each host is shown.
    let (this, others) = match hosts {
        [host] if host.name.starts_with('(') => (Some(host), &[][..]),
        all => (None, all),
    };
    let all = All {
        host: this.and_then(|host| host.topology.clone()).map(places::Place::from),
        hosts: others.iter().map(OneHost::from).collect(),
        virtual_machines: vms.iter().map(one).collect(),
    };
    Ok(printer.value(&all, || rows(hosts, vms, SystemTime::now()))?)
}

/// Returns in one word whether the guest knows its topology.
fn state(vm: &VirtualMachine) -> &'static str {
    let standing = vm.topology.clone().unwrap_or_default();
    match vm.session() {
        SessionState::Connected if !standing.problem.is_empty() => "problem",
        SessionState::Connected if standing.wanted.is_some() && standing.wanted == standing.acknowledged => {
            "current"
        }
        SessionState::Connected => "telling",
        _ => "no-session",
    }
}

fn rows(hosts: &[Host], vms: &[VirtualMachine], now: SystemTime) -> String {
    let mut rows = vec![
        ["NAME", "STATE", "REGION", "ZONE", "HOST", "LABELS", "KNOWN FOR", "PROBLEM"].map(str::to_owned),
    ];
    let row = |name: String, state: &str, at: &Topology, since: String, problem: String| {
        let labels = text::or_dash(&places::labels(at).join(","));
        let place = [&at.region, &at.zone, &at.host].map(|value| text::or_dash(value));
        let [region, zone, host] = place;
        [name, state.to_owned(), region, zone, host, labels, since, problem]
    };
    let nowhere = Topology::default();
    for Host { name, topology } in hosts {
        let topology = topology.as_ref().unwrap_or(&nowhere);
        rows.push(row(name.clone(), "-", topology, "-".to_owned(), String::new()));
    }
    for vm in vms {
        let TopologyStanding { acknowledged, since, problem, .. } = vm.topology.clone().unwrap_or_default();
        let since = words::age(since.as_ref(), now);
        rows.push(row(vm.name.clone(), state(vm), acknowledged.as_ref().unwrap_or(&nowhere), since, problem));
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_know() {
        let at = |zone: &str| {
            let labels = [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())].into();
            Some(Topology { region: "eu".into(), zone: zone.into(), host: "h".into(), labels })
        };
        let vm = |name: &str, session: SessionState, acknowledged, problem: &str| VirtualMachine {
            name: name.into(),
            session: session.into(),
            topology: Some(TopologyStanding {
                wanted: at("z"),
                acknowledged,
                problem: problem.into(),
                since: None,
            }),
            ..VirtualMachine::default()
        };
        let vms = [
            vm("a", SessionState::Connected, at("z"), ""),
            vm("b", SessionState::Connected, at("y"), ""),
            vm("c", SessionState::Connected, None, "why"),
            vm("d", SessionState::Connecting, at("z"), ""),
        ];
        assert_eq!(
            rows(&[Host { name: "(this host)".into(), topology: at("z") }], &vms, SystemTime::UNIX_EPOCH),
            "NAME         STATE       REGION  ZONE  HOST  LABELS   KNOWN FOR  PROBLEM\n\
             (this host)  -           eu      z     h     a=1,b=2  -\n\
             a            current     eu      z     h     a=1,b=2  -\n\
             b            telling     eu      y     h     a=1,b=2  -\n\
             c            problem     -       -     -     -        -          why\n\
             d            no-session  eu      z     h     a=1,b=2  -\n"
        );
    }
}
