//! Upkeep of the guest's topology in files and on its Node while the agent runs.

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config::agent::TopologySettings;
use crate::guest::Guest;
use crate::guest::topology::drop_ins::{self, Kind, Outcome};
use crate::guest::topology::{Known, ZoneChange};
use crate::supervise::Supervisor;
use crate::sys::blocking;
use crate::sys::root::Root;
use crate::topology;

/// Loads the known topology from `folder`, updates the files of nodes that will join, and starts the tasks that
/// keep them up to date. `kubelet_knows_host` means that kubelet gets the host through CSI, and makes it a label
/// of the Node.
pub async fn start(
    settings: TopologySettings,
    kubelet_knows_host: bool,
    folder: &Path,
    guest: &Guest,
    supervisor: &mut Supervisor,
) {
    guest.topology.open(folder, &guest.events);
    let zone_change = match settings.zone_change.as_deref() {
        Some("keep") => ZoneChange::Keep,
        Some("report") => ZoneChange::Report,
        _ => ZoneChange::Update,
    };
    let kinds = settings.drop_ins.iter().filter_map(|name| Kind::named(name)).collect();
    let kinds: Vec<Kind> = kinds;
    let off: Vec<_> = Kind::ALL.into_iter().filter(|kind| !kinds.contains(kind)).collect();
    // Writing to a file system that an earlier run has left frozen would block: do not let the start wait for that.
    let frozen = guest.freezer.restricts();
    let off = if frozen { Vec::new() } else { off };
    let root = guest.root.clone();
    for outcome in blocking::run(move || drop_ins::clean(&root, &off)).await {
        if let Some(problem) = &outcome.problem {
            tracing::warn!("{}: {problem}", outcome.path.display());
        }
    }
    let files = Files { guest: guest.clone(), kinds, zone_change };
    // Part of the start: a kubelet that starts after the agent must not find labels of an earlier boot.
    let mut first = None;
    if !frozen {
        first = guest.topology.standing().known;
        files.write(first.clone()).await;
    }
    supervisor.spawn("node label files", files.run(first, supervisor.shutdown()));
    if !settings.no_node_labels {
        let node = topology::Settings {
            kubeconfig: settings.kubeconfig,
            zone_change,
            report_only: settings.report_only,
            provider_id: settings.provider_id,
            kubelet_knows_host,
        };
        supervisor.spawn("node", topology::run(guest.clone(), node, supervisor.shutdown()));
    }
}

/// Task that keeps the files of nodes that will join up to date.
struct Files {
    guest: Guest,
    kinds: Vec<Kind>,
    zone_change: ZoneChange,
}

impl Files {
    async fn run(self, mut seen: Option<Arc<Known>>, shutdown: CancellationToken) -> anyhow::Result<()> {
        let mut changes = self.guest.topology.changes();
        loop {
            let next = async {
                let news = changes.wait_for(|standing| standing.known != seen).await;
                news.ok().map(|standing| standing.known.clone())
            };
            let Some(Some(known)) = shutdown.run_until_cancelled(next).await else { break };
            seen.clone_from(&known);
            self.write(known).await;
        }
        shutdown.cancelled().await;
        Ok(())
    }

    async fn write(&self, known: Option<Arc<Known>>) {
        let (kinds, zone_change, root) = (self.kinds.clone(), self.zone_change, self.guest.root.clone());
        let labels = known.as_ref().map(|known| known.topology.node_labels());
        let write = move || {
            kinds.iter().map(|kind| drop_ins::keep(&root, *kind, labels.as_ref(), zone_change)).collect()
        };
        let outcomes: Vec<Outcome> = if self.kinds.is_empty() {
            Vec::new()
        } else {
            let (told, outcomes) = tokio::sync::oneshot::channel();
            // Writing to a frozen file system blocks, so wait until none is frozen.
            let freezer = self.guest.freezer.clone();
            blocking::run(move || freezer.unfrozen(move || drop(told.send(write())))).await;
            outcomes.await.unwrap_or_default()
        };
        for outcome in &outcomes {
            if let Some(problem) = &outcome.problem {
                tracing::warn!("{}: {problem}", outcome.path.display());
            }
        }
        self.guest.topology.written(known, outcomes);
    }
}

/// Removes all labels of guestlet from the files of nodes that will join. Returns whether that succeeded, and the
/// messages for people.
pub fn remove() -> (bool, String) {
    let outcomes = drop_ins::remove(&Root::default(), &Kind::ALL);
    let wrong =
        outcomes.iter().filter_map(|outcome| Some((outcome.path.display(), outcome.problem.as_ref()?)));
    let lines: Vec<_> = wrong.map(|(path, problem)| format!("{path}: {problem}\n")).collect();
    (lines.is_empty(), lines.concat())
}
