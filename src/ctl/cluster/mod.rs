//! `guestctl` for a cluster, from anywhere that reaches its API server: as `guestctl --kubeconfig`, or as the plugin
//! `kubectl guestlet`.
//!
//! ```text
//!  ls ──────────────── list ──▶ Guests
//!
//!  info, ping, … ───── get ───▶ Guest ──status.host──▶ pod of that node ─┐
//!  volumes ─────────── get ───▶ Lease ──holder───────▶ its pod ──────────┼─ pods/exec ─▶ guestctl proxy ─▶ admin socket
//!  doctor, watch, … ── list ──▶ the pods of all nodes ───────────────────┘
//! ```
//!
//! What is said over that stream is what a guestctl in the pod would say on its socket, so that a verb is the same wherever it
//! is asked. Who may do so is up to Kubernetes: whoever may use pods/exec in guestlet's namespace is root there. To add a verb:
//! its arm in `target`.

mod access;
mod api;
mod doctor;
mod error;
mod exec;
mod guests;
mod nodes;
mod pods;
mod proxies;
mod target;
mod watching;

pub use access::Access;
pub use error::Error;

use access::ApiServer;
use pods::Place;
use target::{Target, complete, target};

use super::client::{self, Daemon};
use super::print::{Format, Printer};
use super::{Verb, ls, machine, one};
use crate::wire::proto::v1::VirtualMachine;

/// The namespace of a name that was typed without, where nothing else says it.
const DEFAULT: &str = "default";

/// Does it, in the cluster that is meant.
///
/// # Errors
/// If it cannot be done; see [`super::Error::exit_code`].
pub async fn run(access: Access, format: Format, mut verb: Verb) -> Result<(), super::Error> {
    let mut printer = Printer::new(format);
    let server = access.api_server().await?;
    let namespace = access.namespace.clone().or_else(|| server.namespace.clone());
    complete(&mut verb, namespace.as_deref().unwrap_or(DEFAULT));
    let scope = namespace.filter(|_| !access.all_namespaces);
    if let Some(node) = &access.node {
        let place = pods::of_node(&server, node, "").await?;
        return there(&server, &place, &mut printer, verb).await;
    }
    let place = match target(&verb)? {
        Target::Guests { wide } => {
            let guests = guests::list(&server, scope.as_deref()).await?;
            let vms: Vec<_> = guests.iter().map(guests::vm).collect();
            return ls::show(&mut printer, &vms, wide);
        }
        Target::Guest(_) if matches!(verb, Verb::Watch(_)) => {
            return everywhere(&server, &mut printer, verb, None).await;
        }
        Target::Guest(name) => {
            let (namespace, short) = name.split_once('/').unwrap_or((DEFAULT, &name));
            let guest = guests::find(&server, namespace, short).await?;
            let place = pods::of_node(&server, &guest.status.host, &name).await?;
            let done = there(&server, &place, &mut printer, verb).await;
            return done.map_err(|error| guests::explained(error, &guest));
        }
        Target::Leader => pods::leader(&server).await?,
        Target::Nodes => return everywhere(&server, &mut printer, verb, scope.as_deref()).await,
    };
    there(&server, &place, &mut printer, verb).await
}

/// The VMs of the namespace that is meant, or of all.
///
/// # Errors
/// If the API server cannot be asked.
pub async fn vms(access: &Access) -> Result<Vec<VirtualMachine>, Error> {
    let server = access.api_server().await?;
    let scope = access.namespace.clone().or_else(|| server.namespace.clone());
    let guests = guests::list(&server, scope.filter(|_| !access.all_namespaces).as_deref()).await?;
    Ok(guests.iter().map(guests::vm).collect())
}

/// Does it with all nodes.
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

/// Does it with the daemon in a pod, as guestctl there would.
async fn there(
    server: &ApiServer,
    place: &Place,
    printer: &mut Printer,
    verb: Verb,
) -> Result<(), super::Error> {
    match verb {
        Verb::Doctor => {
            let asked = with(server, place, async |daemon| super::doctor::ask(daemon.admin()).await).await;
            super::doctor::tell(printer, &super::doctor::findings(None, asked))
        }
        Verb::Audit(query) => nodes::audit_of(server, printer, &query, place).await,
        Verb::Machine { name, action: machine::Action::FreezeAround(around) } => {
            let ask = async |step| {
                let asking = async |daemon: Daemon| machine::freeze::step(&daemon, &name, &step).await;
                with(server, place, asking).await
            };
            machine::around::run(printer, &name, &around, ask).await
        }
        Verb::Machine { name, action: machine::Action::Logs(wish) } => {
            let ask = async |request| {
                let asking = async |daemon: Daemon| machine::journal::read(&daemon, &name, request).await;
                with(server, place, asking).await
            };
            machine::journal::run(printer, &name, &wish, ask).await
        }
        verb => with(server, place, async |daemon| one(daemon, printer, verb).await).await,
    }
}

/// Does `work` with the daemon in a pod.
async fn with<T>(
    server: &ApiServer,
    place: &Place,
    work: impl AsyncFnOnce(Daemon) -> Result<T, super::Error>,
) -> Result<T, super::Error> {
    let (running, mut ends) = exec::start(server, place, &["proxy"]).await?;
    // The daemon speaks first, as every server of HTTP/2 may.
    let begun = tokio::time::timeout(client::ANSWER_DEADLINE, exec::begun(&mut ends)).await;
    begun.map_err(|_| super::Error::Silent)?.map_err(|_| super::Error::Closed)?;
    match client::over(ends, work).await {
        Err(super::Error::Closed) => Err(match running.failure().await {
            Some(error) => error.into(),
            None => super::Error::Closed,
        }),
        done => done,
    }
}
