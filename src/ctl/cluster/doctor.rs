//! `guestctl doctor` for a cluster: findings about guestlet from the API server, and those of the doctors on
//! all nodes.

use std::collections::BTreeSet;

use super::access::ApiServer;
use super::{Error, guests, nodes, pods};
use crate::ctl::print::Printer;
use crate::ctl::{Error as Failure, doctor};
use crate::text::findings::Finding;
use crate::wire::guest_object::Guest;

/// Shows all findings, even if parts of the cluster do not answer.
///
/// # Errors
/// [`Failure::Wrong`] if something is wrong; also if standard output cannot be written.
pub async fn run(server: &ApiServer, printer: &mut Printer, scope: Option<&str>) -> Result<(), Failure> {
    let guests = guests::list(server, scope).await;
    if let Err(
        error
        @ (Error::Unreachable { .. } | Error::Late(_) | Error::Unauthorized(_) | Error::Credentials(..)),
    ) = &guests
    {
        return doctor::tell(printer, &[Finding::wrong("API server", error.to_string(), "")]);
    }
    let mut found = vec![
        Finding::good("API server", format!("{} answers", server.url)),
        of_guests(guests.as_deref()),
        controller(server).await,
    ];
    match nodes::each(server, doctor::ask).await {
        Ok(answers) => {
            let known: BTreeSet<_> = answers.iter().map(|(node, _)| node.clone()).collect();
            found.extend(guests.iter().flatten().filter_map(|guest| stray(guest, &known)));
            let answers = answers.into_iter().map(|(node, asked)| (node, of_node(asked))).collect();
            found.extend(gathered(answers).into_iter().filter(|finding| is_meant(finding, scope)));
        }
        Err(error) => found.push(Finding::wrong("nodes", error.to_string(), "")),
    }
    doctor::tell(printer, &found)
}

fn of_guests(guests: Result<&[Guest], &Error>) -> Finding {
    match guests {
        Ok(guests) => {
            let connected = guests.iter().filter(|guest| guest.status.session == "Connected").count();
            Finding::good("guests", format!("{connected} of {} connected", guests.len()))
        }
        Err(error) => Finding::wrong("guests", error.to_string(), ""),
    }
}

async fn controller(server: &ApiServer) -> Finding {
    match pods::leader(server).await {
        Ok(place) => Finding::good("controller", format!("{} on the node {} leads", place.pod, place.node)),
        Err(error) => Finding::wrong("controller", error.to_string(), ""),
    }
}

fn of_node(asked: Result<doctor::Asked, Failure>) -> Vec<Finding> {
    match asked {
        Err(Failure::Cluster(error)) => vec![Finding::wrong("guestlet-host", error.to_string(), "")],
        asked => doctor::findings(None, asked),
    }
}

/// Returns a finding if a guest is on a node without a host half, so that its object is stale.
fn stray(guest: &Guest, nodes: &BTreeSet<String>) -> Option<Finding> {
    let host = &guest.status.host;
    (!host.is_empty() && !nodes.contains(host)).then(|| {
        let says = format!("no pod of guestlet-node runs on its node {host}, so its Guest object is stale");
        let remedy = format!(
            "does that node have the label kubevirt.io/schedulable? kubectl get node {host} --show-labels"
        );
        Finding::wrong(&format!("VM {}", guests::name(guest)), says, remedy)
    })
}

/// Returns whether a finding is to be shown: for a VM, whether it is in the requested namespace.
fn is_meant(finding: &Finding, scope: Option<&str>) -> bool {
    finding.subject.strip_prefix("VM ").is_none_or(|name| nodes::is_in(name, scope))
}

/// Merges the findings of all nodes. One that all nodes have alike appears once; others name their node.
fn gathered(answers: Vec<(String, Vec<Finding>)>) -> Vec<Finding> {
    let count = answers.len();
    let mut groups: Vec<(Finding, Vec<String>)> = Vec::new();
    for (node, found) in answers {
        for finding in found {
            match groups.iter_mut().find(|(other, _)| *other == finding) {
                Some((_, nodes)) => nodes.push(node.clone()),
                None => groups.push((finding, vec![node.clone()])),
            }
        }
    }
    let named = |(finding, nodes): (Finding, Vec<String>)| {
        let is_of_all = nodes.len() == count && count > 1;
        let subject = match finding.subject.as_str() {
            vm if vm.starts_with("VM ") => vm.to_owned(),
            subject if is_of_all => format!("all nodes: {subject}"),
            subject => format!("{}: {subject}", nodes.join(", ")),
        };
        Finding { subject, ..finding }
    };
    groups.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_nodes_say_is_said_once() {
        let of = |node: &str, vm: &str, version: &str| {
            let found = vec![
                Finding::good("guestlet-host", version),
                Finding::note("KubeVirt", "the gate is off", "patch it"),
                Finding::good(vm, "connected"),
            ];
            (node.to_owned(), found)
        };
        let found = gathered(vec![of("n1", "VM a/x", "1"), of("n2", "VM a/y", "2"), of("n3", "VM b/z", "1")]);
        let subjects: Vec<_> = found.iter().map(|finding| finding.subject.as_str()).collect();
        let expected = [
            "n1, n3: guestlet-host",
            "all nodes: KubeVirt",
            "VM a/x",
            "n2: guestlet-host",
            "VM a/y",
            "VM b/z",
        ];
        assert_eq!(subjects, expected);
        assert!(
            is_meant(&found[2], Some("a"))
                && !is_meant(&found[5], Some("a"))
                && is_meant(&found[0], Some("a"))
        );
    }
}
