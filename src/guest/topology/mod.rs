//! Topology of this guest, as last reported by the host half that holds it.
//!
//! ```text
//!  host half ──SetTopology──▶ check ──▶ topology.json ──▶ Standing (watched) ─┬─▶ drop_ins: files of RKE2, k3s, kubeadm
//!                               │                                             └─▶ crate::topology: labels of the Node
//!                               └─wrong──▶ an event; the known one stays
//! ```
//!
//! The file is in memory (/run) and read again when the agent starts, so that the topology stays known until the
//! next boot.

pub mod drop_ins;
mod file;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use tokio::sync::{Mutex, watch};

use crate::guest::events::Hub;
use crate::guest::messages;
use crate::labels;
use crate::sys::{blocking, files};
use crate::wire::proto::v1::{NodeChanged, TopologyRefused};

/// Maximum number of labels besides region and zone.
pub const MOST_LABELS: usize = 64;
/// Maximum length of a host's name in bytes.
const MAX_HOST: usize = 253;

/// Topology of a guest. Fields that are not known are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Region, as the value of a label.
    pub region: String,
    /// Zone, as the value of a label.
    pub zone: String,
    /// Name of the host.
    pub host: String,
    /// Further labels for the Node, which a kubelet may set.
    pub labels: BTreeMap<String, String>,
}

/// Labels, by their keys.
pub type Labels = BTreeMap<String, String>;

impl Topology {
    /// Returns all labels for the Node, zone and region included.
    pub fn node_labels(&self) -> Labels {
        let places = [(labels::REGION, &self.region), (labels::ZONE, &self.zone)];
        let places = places.into_iter().filter(|(_, value)| !value.is_empty());
        let mut all = self.labels.clone();
        all.extend(places.map(|(key, value)| (key.to_owned(), value.clone())));
        all
    }

    /// Checks a topology that a host half has sent.
    fn check(&self) -> Result<(), String> {
        for (name, value) in [("region", &self.region), ("zone", &self.zone)] {
            if !value.is_empty() {
                labels::check_value(value).map_err(|why| format!("the {name} is not a label: {why}"))?;
            }
        }
        if self.host.len() > MAX_HOST || self.host.contains(|c: char| c.is_control()) {
            return Err(format!("the host's name has more than {MAX_HOST} bytes, or has control characters"));
        }
        if self.labels.len() > MOST_LABELS {
            return Err(format!("there are {} labels; at most {MOST_LABELS} are allowed", self.labels.len()));
        }
        for (key, value) in &self.labels {
            // An invalid key may be long, or contain escape sequences for terminals.
            let shown: String = key.chars().take(80).flat_map(char::escape_default).collect();
            labels::check_settable(key).map_err(|why| format!("the label {shown}: {why}"))?;
            labels::check_value(value).map_err(|why| format!("the value of the label {shown}: {why}"))?;
        }
        Ok(())
    }
}

/// Policy for zone and region of the Node when the guest has moved to another zone or region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ZoneChange {
    /// The labels of the Node are updated.
    #[default]
    Update,
    /// The labels stay; an annotation shows the zone and region that the guest runs in.
    Keep,
    /// The labels stay; an annotation and a warning show the zone and region that the guest runs in.
    Report,
}

/// Topology with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Topology that was reported.
    pub topology: Topology,
    /// Name of the host on which the host half runs.
    pub host_half: String,
    /// Time when the host half reported it.
    pub since: SystemTime,
}

/// Kubernetes Node that this guest is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// Name; empty until it is known.
    pub name: String,
    /// State of its labels, in one word.
    pub state: &'static str,
    /// Reason for the state, for people.
    pub reason: String,
    /// Status of the condition Ready.
    pub ready: String,
    /// Reason that kubelet gives for it.
    pub ready_reason: String,
    /// Labels of the Node.
    pub labels: Labels,
    /// Taints, as `key=value:effect`.
    pub taints: Vec<String>,
    /// Addresses, as `type address`.
    pub addresses: Vec<String>,
    /// Provider ID (`spec.providerID`).
    pub provider_id: String,
    /// Version of kubelet.
    pub kubelet_version: String,
}

/// Present state of the topology, for watchers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// Known topology; `None` until a host half has reported one since the guest booted.
    pub known: Option<Arc<Known>>,
    /// Reason why a newer topology was refused.
    pub problem: Option<String>,
    /// Results of writing the files for nodes that will join a cluster.
    pub files: Vec<drop_ins::Outcome>,
    /// Topology for which the files were last written.
    pub written: Option<Arc<Known>>,
    /// Labels that kubelet has from such files, or had since the agent started; these belong to guestlet.
    pub given: Vec<(String, String)>,
    /// Node of this guest; `None` if it is not a node.
    pub node: Option<Arc<Node>>,
}

impl Standing {
    /// Returns whether the topology is known and the files for nodes were written for it.
    pub fn is_settled(&self) -> bool {
        self.known.is_some() && self.known == self.written
    }
}

/// Keeper of the topology: stores it and notifies all watchers.
#[derive(Debug, Default)]
pub struct Desk {
    standing: watch::Sender<Standing>,
    /// Directory of the file; not set while the guestlet API is not served.
    folder: OnceLock<PathBuf>,
    /// Lock that lets one topology be taken after another.
    taking: Mutex<()>,
}

/// Reason why a topology is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The topology is invalid.
    #[error("{0}")]
    Wrong(String),
    /// The file `topology.json` cannot be written.
    #[error("cannot write topology.json")]
    Unwritten(#[source] io::Error),
}

impl Desk {
    /// Keeps the topology in `folder` from now on, and loads the one that an earlier run of the agent has left there.
    pub fn open(&self, folder: &Path, events: &Hub) {
        if self.folder.set(folder.to_owned()).is_ok()
            && let Some(known) = file::read(folder)
            && known.topology.check().is_ok()
        {
            let known = Arc::new(known);
            self.standing.send_modify(|standing| standing.known = Some(Arc::clone(&known)));
            events.tell(messages::topology_changed(&known.topology));
        }
    }

    /// Returns the present state.
    pub fn standing(&self) -> Standing {
        self.standing.borrow().clone()
    }

    /// Returns a receiver of the present state and its changes.
    pub fn changes(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Takes the topology from the host half on `host_half`. Returns when programs in the guest can read it.
    ///
    /// # Errors
    /// If the topology is invalid or cannot be stored; the known one then stays.
    pub async fn take(&self, topology: Topology, host_half: &str, events: &Hub) -> Result<(), Refusal> {
        let taken = self.try_take(topology, host_half, events).await;
        if let Err(refusal) = &taken {
            let problem = crate::sys::error_chain::words(refusal);
            tracing::warn!("the topology from the host half is rejected: {problem}");
            let again = self.standing.borrow().problem.as_ref() == Some(&problem);
            if !again {
                self.standing.send_modify(|standing| standing.problem = Some(problem.clone()));
                events.tell(TopologyRefused { problem });
            }
        }
        taken
    }

    async fn try_take(&self, topology: Topology, host_half: &str, events: &Hub) -> Result<(), Refusal> {
        topology.check().map_err(Refusal::Wrong)?;
        let _one = self.taking.lock().await;
        let same = |known: &Arc<Known>| known.topology == topology && known.host_half == host_half;
        let (unchanged, moved) = {
            let standing = self.standing.borrow();
            let before = standing.known.as_ref();
            (before.is_some_and(same), before.is_none_or(|before| before.topology != topology))
        };
        if !unchanged {
            let host_half = host_half.chars().filter(|c| !c.is_control()).take(MAX_HOST).collect();
            let known = Arc::new(Known { topology, host_half, since: SystemTime::now() });
            if let Some(folder) = self.folder.get().cloned() {
                let written = Arc::clone(&known);
                blocking::run(move || file::write(&folder, &written)).await.map_err(Refusal::Unwritten)?;
            }
            tracing::info!(
                "this guest runs in zone {:?} of region {:?}, on {:?}",
                known.topology.zone,
                known.topology.region,
                known.topology.host
            );
            self.standing.send_modify(|standing| standing.known = Some(Arc::clone(&known)));
            if moved {
                events.tell(messages::topology_changed(&known.topology));
            }
        }
        self.standing.send_if_modified(|standing| standing.problem.take().is_some());
        Ok(())
    }

    /// Records that the files for nodes that will join were written for this topology, with the result for each.
    pub fn written(&self, known: Option<Arc<Known>>, files: Vec<drop_ins::Outcome>) {
        self.standing.send_modify(|standing| {
            for (key, value) in files.iter().flat_map(|file| &file.labels) {
                let given = (key.clone(), value.clone());
                if !standing.given.contains(&given) {
                    // Drop the oldest: labels of that many hosts cannot still be in use.
                    if standing.given.len() >= 2 * MOST_LABELS {
                        standing.given.remove(0);
                    }
                    standing.given.push(given);
                }
            }
            (standing.files, standing.written) = (files, known);
        });
    }

    /// Returns the path of the file with the guest's identity, as the host half has reported it.
    pub fn identity_file(&self) -> Option<PathBuf> {
        self.folder.get().map(|folder| folder.join("identity.json"))
    }

    /// Returns the provider ID, if the host half has reported it since the guest booted.
    pub fn provider_id(&self) -> Option<String> {
        let identity: serde_json::Value =
            serde_json::from_slice(&files::read(&self.identity_file()?)?).ok()?;
        Some(identity["provider_id"].as_str()?.to_owned())
    }

    /// Records the present state of the Node, and sends an event if it has changed.
    pub fn node(&self, node: Option<Node>, events: &Hub) {
        let node = node.map(Arc::new);
        let changed = self.standing.send_if_modified(|standing| {
            let changed = standing.node != node;
            if changed {
                standing.node.clone_from(&node);
            }
            changed
        });
        if changed {
            events.tell(NodeChanged { node: node.as_deref().map(messages::node) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(zone: &str, labels: &[(&str, &str)]) -> Topology {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Topology { region: "eu".into(), zone: zone.into(), host: "h1".into(), labels }
    }

    #[tokio::test]
    async fn the_last_good_one_stays_and_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (desk, events) = (Desk::default(), Hub::default());
        desk.open(folder.path(), &events);
        let good = topology("a", &[("example.com/rack", "r1")]);
        desk.take(good.clone(), "h1", &events).await.unwrap();
        let long = "z".repeat(64);
        for (bad, why) in [
            (topology("ä", &[]), "the zone is not a label"),
            (topology(&long, &[]), "64 bytes"),
            (topology("b", &[("node-role.kubernetes.io/x", "y")]), "NodeRestriction"),
            (topology("b", &[("x", "")]), "it is empty"),
            (topology("b", &[("a\u{1b}[2J", "x")]), "a\\u{1b}[2J"),
            (Topology { host: "a\nb".into(), ..good.clone() }, "control characters"),
        ] {
            let refusal = desk.take(bad, "h1", &events).await.unwrap_err().to_string();
            assert!(refusal.contains(why), "{refusal}");
            let standing = desk.standing();
            assert_eq!(standing.known.unwrap().topology, good);
            assert_eq!(standing.problem, Some(refusal));
        }
        let many: Vec<_> = (0..65).map(|number| format!("l{number}")).collect();
        let many: Vec<_> = many.iter().map(|key| (key.as_str(), "v")).collect();
        desk.take(topology("a", &many), "h1", &events).await.unwrap_err();

        let again = Desk::default();
        again.open(folder.path(), &Hub::default());
        assert_eq!(again.standing().known.unwrap().topology, good);
        desk.take(good, "h1", &events).await.unwrap();
        assert_eq!(desk.standing().problem, None);
        let (opening, _) = Arc::new(events).watch(None);
        assert_eq!(opening.position.sequence, 8, "one change, seven refusals");
    }

    #[test]
    fn labels_of_the_node() {
        let mut topology = topology("a", &[("rack", "1")]);
        topology.region.clear();
        let labels: Vec<_> = topology.node_labels().into_iter().collect();
        assert_eq!(labels, [("rack".into(), "1".into()), (labels::ZONE.into(), "a".into())]);
    }
}
