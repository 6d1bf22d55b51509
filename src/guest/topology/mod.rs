//! Where this guest runs: what the host half that holds it has told last.
//!
//! ```text
//!  host half ──SetTopology──▶ check ──▶ topology.json ──▶ Standing (watched) ─┬─▶ drop_ins: files of RKE2, k3s, kubeadm
//!                               │                                             └─▶ the room topology: labels of the Node
//!                               └─wrong──▶ an event; what was known stays
//! ```
//!
//! The file is in memory (/run) and read again when the agent starts: what was known is known until the next boot.

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

/// Most labels beside region and zone.
pub const MOST_LABELS: usize = 64;
/// Longest name of a host, in bytes.
const MAX_HOST: usize = 253;

/// Where a guest runs. What is not known is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// The region, a label's value.
    pub region: String,
    /// The zone, a label's value.
    pub zone: String,
    /// The host's name.
    pub host: String,
    /// Further labels for the Node, which a kubelet may set.
    pub labels: BTreeMap<String, String>,
}

/// Labels, by their keys.
pub type Labels = BTreeMap<String, String>;

impl Topology {
    /// All labels that the Node is to have.
    pub fn node_labels(&self) -> Labels {
        let places = [(labels::REGION, &self.region), (labels::ZONE, &self.zone)];
        let places = places.into_iter().filter(|(_, value)| !value.is_empty());
        let mut all = self.labels.clone();
        all.extend(places.map(|(key, value)| (key.to_owned(), value.clone())));
        all
    }

    /// Checks what a host half tells.
    fn check(&self) -> Result<(), String> {
        for (name, value) in [("region", &self.region), ("zone", &self.zone)] {
            if !value.is_empty() {
                labels::check_value(value).map_err(|why| format!("the {name} is not a label: {why}"))?;
            }
        }
        if self.host.len() > MAX_HOST || self.host.contains(|c: char| c.is_control()) {
            return Err(format!("the host's name has more than {MAX_HOST} bytes or control characters"));
        }
        if self.labels.len() > MOST_LABELS {
            return Err(format!("there are {} labels; at most {MOST_LABELS} are taken", self.labels.len()));
        }
        for (key, value) in &self.labels {
            // What is wrong may be long, or steer a terminal.
            let shown: String = key.chars().take(80).flat_map(char::escape_default).collect();
            labels::check_settable(key).map_err(|why| format!("the label {shown}: {why}"))?;
            labels::check_value(value).map_err(|why| format!("the value of the label {shown}: {why}"))?;
        }
        Ok(())
    }
}

/// What becomes of zone and region when the guest runs somewhere else than before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ZoneChange {
    /// The Node's labels follow.
    #[default]
    Update,
    /// They stay; an annotation says where the guest runs.
    Keep,
    /// They stay; an annotation and a warning say where the guest runs.
    Report,
}

/// A topology, and who told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The topology.
    pub topology: Topology,
    /// The name of the host half's host.
    pub host_half: String,
    /// When it was told.
    pub since: SystemTime,
}

/// The Node that this guest is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// Empty before it is known.
    pub name: String,
    /// What is done for its labels, in one word.
    pub state: &'static str,
    /// Why, in words.
    pub reason: String,
    /// The status of its condition Ready.
    pub ready: String,
    /// What kubelet says of it.
    pub ready_reason: String,
    /// Its labels.
    pub labels: Labels,
    /// Its taints, as `key=value:effect`.
    pub taints: Vec<String>,
    /// Its addresses, as `type address`.
    pub addresses: Vec<String>,
    /// Its provider id.
    pub provider_id: String,
    /// kubelet's version.
    pub kubelet_version: String,
}

/// How things are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// Absent before a host half has told it since the guest booted.
    pub known: Option<Arc<Known>>,
    /// Why a newer one is not.
    pub problem: Option<String>,
    /// Where nodes that are to join read it.
    pub files: Vec<drop_ins::Outcome>,
    /// Files were last written for this topology.
    pub written: Option<Arc<Known>>,
    /// Labels that kubelet has from such files, or had since the agent started: they are ours.
    pub given: Vec<(String, String)>,
    /// Absent where the guest is no node.
    pub node: Option<Arc<Node>>,
}

impl Standing {
    /// It is known, and where nodes of clusters read it.
    pub fn is_settled(&self) -> bool {
        self.known.is_some() && self.known == self.written
    }
}

/// Where the topology is kept, and everybody hears of it.
#[derive(Debug, Default)]
pub struct Desk {
    standing: watch::Sender<Standing>,
    /// Where the file is; none as long as the guestlet API is not served.
    folder: OnceLock<PathBuf>,
    /// One is taken after the other.
    taking: Mutex<()>,
}

/// Why a topology is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It makes no sense.
    #[error("{0}")]
    Wrong(String),
    /// The file cannot be written.
    #[error("cannot write topology.json")]
    Unwritten(#[source] io::Error),
}

impl Desk {
    /// Keeps the topology in `folder` from now on, and takes what is there from a run of the agent before.
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

    /// How things are.
    pub fn standing(&self) -> Standing {
        self.standing.borrow().clone()
    }

    /// How things are, again with every change.
    pub fn changes(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Takes what the host half on `host_half` tells. Returns when programs in the guest can read it.
    ///
    /// # Errors
    /// If it makes no sense or cannot be kept; then what was known stays.
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

    /// The files for nodes that are to join are as they should be for this topology, but for what their outcomes say.
    pub fn written(&self, known: Option<Arc<Known>>, files: Vec<drop_ins::Outcome>) {
        self.standing.send_modify(|standing| {
            for (key, value) in files.iter().flat_map(|file| &file.labels) {
                let given = (key.clone(), value.clone());
                if !standing.given.contains(&given) {
                    // The oldest goes; nobody can be between so many hosts.
                    if standing.given.len() >= 2 * MOST_LABELS {
                        standing.given.remove(0);
                    }
                    standing.given.push(given);
                }
            }
            (standing.files, standing.written) = (files, known);
        });
    }

    /// What the host half says of this guest is kept there.
    pub fn identity_file(&self) -> Option<PathBuf> {
        self.folder.get().map(|folder| folder.join("identity.json"))
    }

    /// The provider id that the host half has told, if it has since the guest booted.
    pub fn provider_id(&self) -> Option<String> {
        let identity: serde_json::Value =
            serde_json::from_slice(&files::read(&self.identity_file()?)?).ok()?;
        Some(identity["provider_id"].as_str()?.to_owned())
    }

    /// The Node is so now; tells it if it was not before.
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
