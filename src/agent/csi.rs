//! Builds the CSI part of the agent from the settings and from the identity of this guest, which the host half
//! reports.
//!
//! Where the settings make the host part of the topology, the driver is registered with kubelet only once the host
//! is known, and again when the guest has moved to another host. Then it waits until the Node's label shows the
//! new host as well ([`crate::topology`] takes care of that), because kubelet unregisters a driver that
//! contradicts a label of its Node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::agent::{CsiMode, CsiSettings};
use crate::csi::{self, Identity};
use crate::guest::Guest;
use crate::guest::topology::Standing;
use crate::labels;
use crate::rpc::holder::Holder;
use crate::rpc::local;
use crate::supervise::Supervisor;
use crate::sys::{blocking, files};
use crate::wire::proto::v1::WhoAmIResponse;

/// Time for which the start waits for the labels of the Node.
const FIRST_LOOK: Duration = Duration::from_secs(3);
/// Time after a change of topology for which the probe fails: longer than the sidecars' liveness probes take to
/// fail, including their initial delay.
const STALE: Duration = Duration::from_secs(45);
/// Name of the file with the topology keys that were last offered to the sidecars.
const OFFERED: &str = "csi.json";

/// Handle that passes the identity of this guest to the CSI part.
#[derive(Debug, Clone)]
pub struct Teller(watch::Sender<Option<Identity>>);

impl Teller {
    /// Passes on the identity that the host half has reported.
    pub fn tell(&self, told: &WhoAmIResponse) {
        if let Some(identity) = identity(told) {
            keep(&self.0, identity);
        }
    }
}

/// Stores the identity; watchers are notified only if it has changed.
fn keep(known: &watch::Sender<Option<Identity>>, identity: Identity) {
    known.send_if_modified(|known| {
        let differs = known.as_ref() != Some(&identity);
        if differs {
            *known = Some(identity);
        }
        differs
    });
}

/// Starts serving kubelet and, over the callback of `holder`, the sidecars. The identity of this guest comes from
/// `folder`, where an earlier run has stored it, or from the host half. `has_node` means that the agent follows
/// the labels of the Node, so that they are known soon after the start.
pub fn start(
    settings: CsiSettings,
    has_node: bool,
    folder: &Path,
    guest: &Guest,
    holder: Holder,
    supervisor: &mut Supervisor,
) -> Teller {
    let teller = Teller(watch::Sender::new(None));
    if let Some(told) = local::remembered(folder) {
        teller.tell(&told);
    }
    let make_root = match settings.mode {
        CsiMode::Off => return teller,
        CsiMode::Auto => false,
        CsiMode::On => true,
    };
    let CsiSettings { driver, kubelet_root, node_socket, controller_socket, topology, .. } = settings;
    if let Some(key) = topology.iter().find(|key| *key != labels::HOST) {
        tracing::warn!("csi.topology: unknown key {key:?}; use {:?}", labels::HOST);
    }
    let known = if topology.iter().any(|key| key == labels::HOST) {
        let (offered, known) = watch::channel(None);
        let first_look = if has_node { FIRST_LOOK } else { Duration::ZERO };
        let work = offer(teller.0.subscribe(), guest.topology.changes(), offered, first_look);
        let shutdown = supervisor.shutdown();
        supervisor.spawn("csi topology", async move {
            shutdown.run_until_cancelled(work).await;
            shutdown.cancelled().await;
            Ok(())
        });
        known
    } else {
        teller.0.subscribe()
    };
    let kubelet_root = plain(&kubelet_root);
    let stale_until = stale_until(folder, &topology, supervisor);
    let settings = csi::Settings {
        driver,
        kubelet_root,
        make_root,
        node_socket,
        controller_socket,
        topology,
        stale_until,
    };
    let shutdown = supervisor.shutdown();
    let way = Arc::new(move || holder.caller());
    let work = csi::sockets::run(guest.clone(), settings, known, way, shutdown.clone());
    supervisor.spawn("csi", async move {
        if let Err(error) = work.await {
            tracing::error!("kubelet is no longer served: {error}");
        }
        shutdown.cancelled().await;
        Ok(())
    });
    teller
}

/// Returns until when sidecars that know a different topology may still run. They query the capabilities of the
/// driver only once, when they start. One that waits for something never notices that the agent was restarted: for
/// example a provisioner without topology, which waits for nodes that no longer lack it. So the probe fails for as
/// long as their liveness probes need to restart them.
fn stale_until(folder: &Path, topology: &[String], supervisor: &mut Supervisor) -> Option<Instant> {
    let (file, text) = (folder.join(OFFERED), serde_json::json!({ "topology": topology }).to_string());
    let before = files::read(&file);
    if before.as_deref() == Some(text.as_bytes()) {
        return None;
    }
    let until = before.is_some().then(|| Instant::now() + STALE);
    if until.is_some() {
        tracing::info!("csi.topology has changed: restarting the sidecars on this node");
    }
    let shutdown = supervisor.shutdown();
    supervisor.spawn("csi topology change", async move {
        // Written only then, so that an agent that is restarted before makes the probe fail again.
        let settled = tokio::time::sleep_until(until.unwrap_or_else(Instant::now));
        if shutdown.run_until_cancelled(settled).await.is_some()
            && let Err(error) = blocking::run(move || files::replace(&file, text.as_bytes())).await
        {
            tracing::warn!("cannot store the value of csi.topology: {error}");
        }
        shutdown.cancelled().await;
        Ok(())
    });
    until
}

/// Normalizes a path: no trailing or repeated slashes.
fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Converts the answer of the host half; returns `None` if it does not identify the VM.
fn identity(told: &WhoAmIResponse) -> Option<Identity> {
    let node_id = Some(&told.vm_uid).filter(|uid| !uid.is_empty())?.clone();
    let (vm_name, max_volumes) = (told.vm_name.clone(), told.max_volumes);
    Some(Identity { node_id, vm_name, max_volumes, topology: BTreeMap::new() })
}

/// Offers kubelet the identity of this guest together with its topology.
async fn offer(
    mut told: watch::Receiver<Option<Identity>>,
    mut standings: watch::Receiver<Standing>,
    offered: watch::Sender<Option<Identity>>,
    first_look: Duration,
) {
    let looked = Instant::now() + first_look;
    let mut complaint = None;
    loop {
        let identity = told.borrow_and_update().clone();
        let standing = standings.borrow_and_update().clone();
        let is_early = standing.node.is_none() && Instant::now() < looked;
        if let Some(identity) = identity.filter(|_| !is_early) {
            match placed(identity, &standing) {
                Ok(Some(identity)) => {
                    complaint = None;
                    keep(&offered, identity);
                }
                Ok(None) => {}
                Err(why) => {
                    if complaint.as_ref() != Some(&why) {
                        tracing::warn!("cannot tell kubelet which host this guest runs on: {why}");
                    }
                    complaint = Some(why);
                }
            }
        }
        // The senders live as long as the agent.
        tokio::select! {
            Ok(()) = told.changed() => {}
            Ok(()) = standings.changed() => {}
            () = tokio::time::sleep_until(looked), if is_early => {}
            else => return,
        }
    }
}

/// Returns the identity of this guest with its host as topology, or `None` as long as the host is not known.
///
/// # Errors
/// If kubelet would not accept it; the reason is for people.
fn placed(identity: Identity, standing: &Standing) -> Result<Option<Identity>, String> {
    let Some(known) = &standing.known else { return Ok(None) };
    let host = &known.topology.host;
    labels::check_value(host).map_err(|why| format!("the host half names the host {host:?}: {why}"))?;
    let label = standing.node.as_ref().and_then(|node| node.labels.get(labels::HOST));
    if let Some(label) = label.filter(|label| *label != host) {
        return Err(format!("it is {host}, and the Node's label {} still says {label}", labels::HOST));
    }
    let topology = [(labels::HOST.to_owned(), host.clone())].into();
    Ok(Some(Identity { topology, ..identity }))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::guest::topology::{Known, Node, Topology};

    fn standing(host: &str, label: Option<&str>) -> Standing {
        let topology = Topology { host: host.into(), ..Topology::default() };
        let known = Known { topology, host_half: "h".into(), since: SystemTime::UNIX_EPOCH };
        let labels = label.map(|value| (labels::HOST.to_owned(), value.to_owned())).into_iter().collect();
        let node = Some(Arc::new(Node { labels, ..Node::default() }));
        Standing { known: Some(Arc::new(known)), node, ..Standing::default() }
    }

    #[test]
    fn kubelet_is_told_of_a_host_that_its_node_does_not_contradict() {
        let identity = || Identity { node_id: "id".into(), ..Identity::default() };
        let host = |standing| {
            placed(identity(), &standing).map(|one| one.map(|one| one.topology[labels::HOST].clone()))
        };
        assert_eq!(host(Standing::default()), Ok(None), "not known yet");
        assert_eq!(host(standing("one", None)), Ok(Some("one".into())));
        assert_eq!(host(standing("one", Some("one"))), Ok(Some("one".into())));
        let still = host(standing("two", Some("one"))).unwrap_err();
        assert!(still.contains("guestlet.io/host still says one"), "{still}");
        assert!(host(standing(&"x".repeat(64), None)).unwrap_err().contains("64 bytes"));
        let nobody = Standing { node: None, ..standing("one", None) };
        assert_eq!(host(nobody), Ok(Some("one".into())), "it is not a Node yet, or that cannot be known");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_moved_is_offered_again_once_its_node_follows() {
        let identity = Identity { node_id: "id".into(), ..Identity::default() };
        let (teller, told) = watch::channel(Some(identity));
        let (desk, standings) = watch::channel(Standing { node: None, ..standing("one", None) });
        let (offered, mut known) = watch::channel(None);
        let offering = offer(told, standings, offered, FIRST_LOOK);
        let followed = async {
            let host =
                |known: &Option<Identity>| known.as_ref().map(|known| known.topology[labels::HOST].clone());
            let begun = Instant::now();
            known.changed().await.unwrap();
            assert!(begun.elapsed() >= FIRST_LOOK, "the Node may say something else");
            assert_eq!(host(&known.borrow_and_update()), Some("one".into()));
            desk.send_replace(standing("two", Some("one")));
            tokio::time::sleep(FIRST_LOOK).await;
            assert!(!known.has_changed().unwrap());
            desk.send_replace(standing("two", Some("two")));
            known.changed().await.unwrap();
            assert_eq!(host(&known.borrow_and_update()), Some("two".into()));
        };
        tokio::select! {
            () = offering => panic!("it goes on as long as the agent"),
            () = followed => {}
        }
        drop(teller);
    }
}
