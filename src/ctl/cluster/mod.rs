//! `guestctl` for a cluster, from anywhere that reaches its API server: as `guestctl --kubeconfig`, or as the
//! plugin `kubectl guestlet`.
//!
//! ```text
//!  ls ──────────────── list ──▶ Guests, selected by their labels
//!
//!  info, ping, … ───── get ───▶ Guest ──status.host──▶ pod of that node ─┐
//!  volumes ─────────── get ───▶ Lease ──holder───────▶ its pod ──────────┼─ pods/exec ─▶ guestctl proxy ─▶ admin socket
//!  doctor, watch, … ── list ──▶ the pods of all nodes ───────────────────┘
//!
//!  console ─────────── get ───▶ KubeVirt's console of the VM
//! ```
//!
//! The stream carries the same data that a guestctl in the pod would exchange with the socket, so that a verb
//! behaves the same wherever it is run. Permissions are up to Kubernetes: a user who may use pods/exec in
//! guestlet's namespace is root there. To add a verb: its arm in `target`.

mod access;
mod api;
mod console;
mod doctor;
mod error;
mod exec;
mod guests;
mod nodes;
mod pods;
mod proxies;
mod target;
mod watching;
mod way;

pub use access::Access;
pub use error::Error;
pub use way::{Line, Way};

use access::ApiServer;
use pods::Place;
use target::{Target, complete, narrow, target};

use super::client::Daemon;
use super::door::Door;
use super::print::{Format, Printer};
use super::{Verb, at, cp, ls};
use crate::wire::proto::v1::VirtualMachine;

/// Default namespace of a name that was typed without one.
const DEFAULT: &str = "default";

/// Carries out a verb in the selected cluster.
///
/// # Errors
/// Fails if the verb fails; see [`super::Error::exit_code`].
pub async fn run(access: Access, format: Format, mut verb: Verb) -> Result<(), super::Error> {
    let mut printer = Printer::new(format);
    let server = access.api_server().await?;
    let namespace = access.namespace.clone().or_else(|| server.namespace.clone());
    complete(&mut verb, namespace.as_deref().unwrap_or(DEFAULT));
    if let Verb::Console { name, .. } = &verb {
        return console::run(&server, name).await;
    }
    let scope = namespace.filter(|_| !access.all_namespaces);
    let scope = match &mut verb {
        Verb::Ls(list) => narrow(list, scope),
        _ => scope,
    };
    if let Verb::Copy(job) = &verb {
        return copy(&access, server, &mut printer, job).await;
    }
    if let Some(node) = &access.node {
        let place = pods::of_node(&server, node, "").await?;
        return there(server, place, &mut printer, verb).await;
    }
    match target(&verb)? {
        Target::Guests(list) => {
            let guests = guests::selected(&server, scope.as_deref(), &list.selector).await?;
            ls::show(&mut printer, guests.iter().map(guests::vm).collect(), &list)
        }
        Target::Guest(_) if matches!(verb, Verb::Watch(_)) => {
            everywhere(&server, &mut printer, verb, None).await
        }
        Target::Guest(name) => {
            let way = Way::to_guest(server, name);
            match at(&Door::Pod(way.clone()), &mut printer, verb).await {
                Err(error) => Err(way.explained(error).await),
                done => done,
            }
        }
        Target::Leader => {
            let place = pods::leader(&server).await?;
            there(server, place, &mut printer, verb).await
        }
        Target::Nodes => everywhere(&server, &mut printer, verb, scope.as_deref()).await,
    }
}

/// Copies files from and to guests, wherever they run at the time, or all on one node.
async fn copy(
    access: &Access,
    server: ApiServer,
    printer: &mut Printer,
    job: &cp::Job,
) -> Result<(), super::Error> {
    let Some(node) = &access.node else {
        let doors = |name: &str| Door::Pod(Way::to_guest(server.clone(), name.to_owned()));
        return cp::run(&doors, printer, job).await;
    };
    let place = pods::of_node(&server, node, "").await?;
    cp::run(&|_| Door::Pod(Way::to_pod(server.clone(), place.clone())), printer, job).await
}

/// Lists the VMs of the selected namespace, or of all.
///
/// # Errors
/// Fails if the API server cannot be reached.
pub async fn vms(access: &Access) -> Result<Vec<VirtualMachine>, Error> {
    let server = access.api_server().await?;
    let scope = access.namespace.clone().or_else(|| server.namespace.clone());
    let guests = guests::list(&server, scope.filter(|_| !access.all_namespaces).as_deref()).await?;
    Ok(guests.iter().map(guests::vm).collect())
}

/// Carries out a verb that concerns all nodes.
async fn everywhere(
    server: &ApiServer,
    printer: &mut Printer,
    verb: Verb,
    scope: Option<&str>,
) -> Result<(), super::Error> {
    match verb {
        Verb::Nodes => nodes::nodes(server, printer, scope).await,
        Verb::Topology => nodes::topology(server, printer, scope).await,
        Verb::Trust(_) => nodes::keys(server, printer, scope).await,
        Verb::Audit(query) => nodes::audit(server, printer, &query).await,
        Verb::Watch(filter) => watching::run(server, printer, filter, scope).await,
        Verb::Doctor => doctor::run(server, printer, scope).await,
        _ => Err(Error::NeedsNode("this").into()),
    }
}

/// Carries out a verb with the daemon in a pod, as guestctl in that pod would.
async fn there(
    server: ApiServer,
    place: Place,
    printer: &mut Printer,
    verb: Verb,
) -> Result<(), super::Error> {
    match verb {
        Verb::Doctor => {
            let asked = with(&server, &place, async |daemon| super::doctor::ask(daemon.admin()).await).await;
            super::doctor::tell(printer, &super::doctor::findings(None, asked))
        }
        Verb::Audit(query) => nodes::audit_of(&server, printer, &query, &place).await,
        verb => at(&Door::Pod(Way::to_pod(server, place)), printer, verb).await,
    }
}

/// Runs `work` with the daemon in a pod.
async fn with<T>(
    server: &ApiServer,
    place: &Place,
    work: impl AsyncFnOnce(Daemon) -> Result<T, super::Error>,
) -> Result<T, super::Error> {
    Way::to_pod(server.clone(), place.clone()).dial().await?.over(work).await
}
