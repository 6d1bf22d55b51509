//! Verbs that concern all nodes: several nodes are called at a time, and their answers are merged.

use futures_util::{StreamExt as _, stream};

use super::access::ApiServer;
use super::pods::Place;
use super::{Error, exec, pods, with};
use crate::ctl::client::{self, Client};
use crate::ctl::print::Printer;
use crate::ctl::topology::Host;
use crate::ctl::trust::{self, HostHalf};
use crate::ctl::{Error as Failure, audit, nodes, topology};
use crate::wire::proto::v1::{GetHostStatusRequest, SessionState, VirtualMachine};

/// Nodes that are called at the same time.
const AT_A_TIME: usize = 16;

/// Answers of the nodes, with their names.
pub type Answers<T> = Vec<(String, Result<T, Failure>)>;

/// Calls the host half of each node.
///
/// # Errors
/// Fails if the nodes cannot be listed.
pub async fn each<T>(
    server: &ApiServer,
    work: impl AsyncFn(Client) -> Result<T, Failure>,
) -> Result<Answers<T>, Error> {
    let work = &work;
    each_place(server, async |place| with(server, place, async |daemon| work(daemon.admin()).await).await)
        .await
}

async fn each_place<T>(
    server: &ApiServer,
    work: impl AsyncFn(&Place) -> Result<T, Failure>,
) -> Result<Answers<T>, Error> {
    let work = &work;
    let asking = pods::of_nodes(server).await?.into_iter().map(|(node, place)| async move {
        let answer = match place {
            Ok(place) => work(&place).await,
            Err(error) => Err(error.into()),
        };
        (node, answer)
    });
    Ok(stream::iter(asking).buffered(AT_A_TIME).collect().await)
}

/// Separates the successful answers from the failures. Returns the number of failures, of which the user is
/// warned.
fn split<T>(printer: &mut Printer, answers: Answers<T>) -> Result<(Vec<(String, T)>, usize), Failure> {
    let (mut said, mut failed) = (Vec::new(), Vec::new());
    for (node, answer) in answers {
        match answer {
            Ok(answer) => said.push((node, answer)),
            Err(error) => failed.push((node, error)),
        }
    }
    if said.is_empty()
        && let Some((_, error)) = failed.pop()
    {
        return Err(error);
    }
    for (node, error) in &failed {
        printer.warn(&format!("node {node}: {error}"));
    }
    Ok((said, failed.len()))
}

/// Fails if a node did not answer, so that programs notice.
fn complete(failed: usize) -> Result<(), Failure> {
    if failed == 0 { Ok(()) } else { Err(Error::Incomplete(failed).into()) }
}

/// Merges the VMs of a namespace, or of all, sorted by name. Two nodes know a VM while it is migrated.
fn merge(lists: impl IntoIterator<Item = Vec<VirtualMachine>>, scope: Option<&str>) -> Vec<VirtualMachine> {
    let mut vms: Vec<_> = lists.into_iter().flatten().filter(|vm| is_in(&vm.name, scope)).collect();
    let rank = |vm: &VirtualMachine| (vm.name.clone(), vm.session() != SessionState::Connected);
    vms.sort_by_cached_key(rank);
    vms.dedup_by(|later, kept| later.name == kept.name);
    vms
}

/// Returns whether the VM of this name is in the requested namespace.
pub fn is_in(name: &str, scope: Option<&str>) -> bool {
    scope.is_none_or(|scope| name.split_once('/').is_some_and(|(namespace, _)| namespace == scope))
}

/// Carries out `guestctl nodes`.
pub async fn nodes(server: &ApiServer, printer: &mut Printer, scope: Option<&str>) -> Result<(), Failure> {
    let answers = each(server, async |mut client| client::vms(&mut client, true).await).await?;
    let (said, failed) = split(printer, answers)?;
    nodes::show(printer, merge(said.into_iter().map(|(_, vms)| vms), scope))?;
    complete(failed)
}

/// Carries out `guestctl topology`.
pub async fn topology(server: &ApiServer, printer: &mut Printer, scope: Option<&str>) -> Result<(), Failure> {
    let asking = async |mut client: Client| {
        let status = client::answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
        Ok((status.topology, client::vms(&mut client, false).await?))
    };
    let (said, failed) = split(printer, each(server, asking).await?)?;
    let (mut hosts, mut lists) = (Vec::new(), Vec::new());
    for (name, (topology, vms)) in said {
        hosts.push(Host { name, topology });
        lists.push(vms);
    }
    topology::show(printer, &hosts, &merge(lists, scope))?;
    complete(failed)
}

/// Carries out `guestctl trust ls`.
pub async fn keys(server: &ApiServer, printer: &mut Printer, scope: Option<&str>) -> Result<(), Failure> {
    let (said, failed) = split(printer, each(server, trust::keys).await?)?;
    let (mut halves, mut guests) = (Vec::new(), Vec::new());
    for (node, keys) in said {
        halves.push(HostHalf { node, host_key: keys.host_key, ca_key: keys.ca_key });
        // Keys of VMs that a node no longer lists have no namespace.
        guests.extend(keys.guests.into_iter().filter(|key| is_in(&key.name, scope)));
    }
    guests.sort_by(|one, other| (&one.name, &one.uuid).cmp(&(&other.name, &other.uuid)));
    trust::show_all(printer, &halves, &guests)?;
    complete(failed)
}

/// Carries out `guestctl audit`.
pub async fn audit(server: &ApiServer, printer: &mut Printer, query: &audit::Query) -> Result<(), Failure> {
    let asking = async |place: &Place| Ok(records(server, place, query).await?);
    let (said, failed) = split(printer, each_place(server, asking).await?)?;
    audit::show(printer, query, said.into_iter().flat_map(|(_, records)| records).collect())?;
    complete(failed)
}

/// Carries out `guestctl audit` for one node.
pub async fn audit_of(
    server: &ApiServer,
    printer: &mut Printer,
    query: &audit::Query,
    place: &Place,
) -> Result<(), Failure> {
    audit::show(printer, query, records(server, place, query).await?)
}

/// Returns the records of a node: their file is in its pod, where guestctl reads it.
async fn records(
    server: &ApiServer,
    place: &Place,
    query: &audit::Query,
) -> Result<Vec<audit::Dated>, Error> {
    let mut arguments = vec!["audit".to_owned(), "--output=json".to_owned()];
    arguments.extend(query.since.map(|since| format!("--since={}s", since.as_secs())));
    arguments.extend(query.vm.as_ref().map(|vm| format!("--vm={vm}")));
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let json = exec::output(server, place, &arguments).await?;
    let read = audit::read_calls(&json, &place.node);
    read.map_err(|error| Error::not_started(place, format!("its records cannot be read: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_two_nodes_know_is_shown_once_as_the_one_knows_it_that_has_it() {
        let vm = |name: &str, session: SessionState| VirtualMachine {
            name: name.into(),
            session: session.into(),
            ..VirtualMachine::default()
        };
        let lists = || {
            let one = vec![vm("b/x", SessionState::Connected), vm("a/x", SessionState::Connecting)];
            [one, vec![vm("a/x", SessionState::Connected)]]
        };
        let all = merge(lists(), None);
        let names: Vec<_> = all.iter().map(|vm| (vm.name.as_str(), vm.session())).collect();
        assert_eq!(names, [("a/x", SessionState::Connected), ("b/x", SessionState::Connected)]);
        assert_eq!(merge(lists(), Some("b")).len(), 1);
        assert!(!is_in("ab/x", Some("a")) && !is_in("x", Some("a")) && is_in("x", None));
    }
}
