//! Turns the events about the VirtualMachineInstances of a node into changes of its list of VMs. Pure.
//!
//! There are two watches, because a label selector cannot express "or": one on the instances that run on the
//! node, and one on those that are migrating to it. An instance may be in both, in two versions; the newer one
//! counts. Its status says where it runs, so that during a migration one node has it at a time: first the
//! source and, once it has completed, the target.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::super::super::Change;
use super::super::seen::{Facts, Seen};
use super::super::told::Told;
use super::launcher::Launcher;
use super::processes::Processes;
use super::roster::Instance;
use crate::host::limits::Limits;
use crate::kubernetes::follow::Heard;
use crate::wire::proto::v1::Topology;

/// Settings for VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Directory of hybrid vsock sockets, if agents are reached through these.
    pub sockets: Option<PathBuf>,
    /// Vsock port of the agents.
    pub port: u32,
    /// Maximum number of volumes that may be plugged into a VM.
    pub max_volumes: u32,
    /// Limits on the resources that a guest may consume.
    pub limits: Arc<Limits>,
    /// Labels of the node that are reported to guests, in addition to region and zone.
    pub node_labels: Vec<String>,
    /// True if guests are to be represented by objects in the cluster.
    pub guests: bool,
}

/// Watch that found a VirtualMachineInstance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The instance runs on this node.
    Runs,
    /// The instance is migrating to this node, or has done so.
    Comes,
}

/// State of the VMs of a node, and the part of it that has been reported.
#[derive(Debug)]
pub struct Book {
    node: String,
    options: Options,
    processes: Arc<Processes>,
    /// Running instances by VM name.
    runs: BTreeMap<String, Seen>,
    comes: BTreeMap<String, Seen>,
    /// True for each watch that has listed its objects. No changes are reported before both have.
    heard: [bool; 2],
    told: BTreeMap<String, Told>,
    topology: Option<Arc<Topology>>,
}

impl Book {
    /// Creates an empty book of the node with this name.
    pub fn new(node: String, options: Options, processes: Arc<Processes>) -> Self {
        Self {
            node,
            options,
            processes,
            runs: BTreeMap::new(),
            comes: BTreeMap::new(),
            heard: [false; 2],
            told: BTreeMap::new(),
            topology: None,
        }
    }

    /// Applies an event and returns the resulting changes.
    pub fn hear(&mut self, side: Side, heard: Heard<Seen>) -> Vec<Change> {
        let was_complete = self.is_complete();
        let known = match side {
            Side::Runs => &mut self.runs,
            Side::Comes => &mut self.comes,
        };
        let mut names = BTreeSet::new();
        match heard {
            Heard::All(all) => {
                let before = std::mem::take(known);
                names.extend(before.into_keys());
                known.extend(all.into_iter().filter_map(named));
                names.extend(known.keys().cloned());
                self.heard[side as usize] = true;
            }
            Heard::There(seen) => {
                if let Some((name, seen)) = named(seen) {
                    known.insert(name.clone(), seen);
                    names.insert(name);
                }
            }
            Heard::Gone(seen) => {
                if let Some((name, _)) = named(seen) {
                    known.remove(&name);
                    names.insert(name);
                }
            }
        }
        match (was_complete, self.is_complete()) {
            (_, false) => Vec::new(),
            (true, true) => self.tell(names),
            (false, true) => {
                let names = self.runs.keys().chain(self.comes.keys()).cloned().collect();
                let mut changes = self.tell(names);
                changes.push(Change::Synced);
                changes
            }
        }
    }

    /// Returns the VirtualMachineInstance of a VM that has been reported.
    pub fn instance(&self, name: &str) -> Option<Instance> {
        let Seen { metadata, facts } = self.newest(name).filter(|_| self.told.contains_key(name))?.clone();
        let facts = facts?;
        Some(Instance {
            namespace: metadata.namespace?,
            name: metadata.name?,
            uid: metadata.uid?,
            volumes: facts.volumes,
            labels: Arc::clone(&facts.labels),
        })
    }

    /// Applies new settings and returns the resulting changes.
    pub fn set(&mut self, options: Options) -> Vec<Change> {
        self.options = options;
        self.tell(self.told.keys().cloned().collect())
    }

    /// Sets the node's location and returns the resulting changes.
    pub fn place(&mut self, topology: &Arc<Topology>) -> Vec<Change> {
        if self.topology.as_ref() == Some(topology) {
            return Vec::new();
        }
        self.topology = Some(Arc::clone(topology));
        let changed = |name: &String| Change::Topology { name: name.clone(), topology: Arc::clone(topology) };
        self.told.keys().map(changed).collect()
    }

    fn is_complete(&self) -> bool {
        self.heard == [true; 2]
    }

    /// Returns what has changed in these VMs since the last report. Removals come first, because a removed VM's
    /// identifiers may be in use by another VM.
    fn tell(&mut self, names: BTreeSet<String>) -> Vec<Change> {
        let (mut changes, mut present) = (Vec::new(), Vec::new());
        for name in names {
            match self.facts(&name) {
                Some(facts) => present.push((name, facts)),
                None if self.told.remove(&name).is_some() => changes.push(Change::Removed { name }),
                None => {}
            }
        }
        for (name, facts) in present {
            let now = self.told(&facts);
            self.tell_one(&now, self.told.get(&name), &mut changes);
            self.told.insert(name, now);
        }
        changes
    }

    fn tell_one(&self, now: &Told, before: Option<&Told>, changes: &mut Vec<Change>) {
        let before = before.filter(|before| now.is_of_same(before));
        changes.extend(now.changes(before));
        if before.is_none()
            && let Some(topology) = &self.topology
        {
            changes.push(Change::Topology { name: now.vm.name.clone(), topology: Arc::clone(topology) });
        }
    }

    /// Returns the facts about a VM of this node, from the newest version of its object.
    fn facts(&self, name: &str) -> Option<Arc<Facts>> {
        self.newest(name)?.facts.clone().filter(|facts| facts.node == self.node)
    }

    fn newest(&self, name: &str) -> Option<&Seen> {
        [self.runs.get(name), self.comes.get(name)].into_iter().flatten().max_by_key(|seen| seen.version())
    }

    fn told(&self, facts: &Facts) -> Told {
        let Options { sockets, port, max_volumes, limits, .. } = &self.options;
        let dial = Launcher::new(facts, &self.node, sockets.as_ref(), *port, Arc::clone(&self.processes));
        Told::new(facts, dial.into(), *max_volumes, limits)
    }
}

fn named(seen: Seen) -> Option<(String, Seen)> {
    let name = seen.facts.as_ref()?.name.clone();
    Some((name, seen))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::labels::Labels;
    use crate::sys::root::Root;

    fn options() -> Options {
        Options {
            sockets: None,
            port: 970,
            max_volumes: 9,
            limits: Arc::default(),
            node_labels: Vec::new(),
            guests: true,
        }
    }

    fn book() -> Book {
        Book::new("n1".into(), options(), Arc::new(Processes::new(Root::at("/nowhere"))))
    }

    /// Builds a VirtualMachineInstance of the VM `vm` with this UID on this node.
    fn seen(version: u32, vm: &str, uid: &str, node: &str) -> Seen {
        serde_json::from_value(json!({
            "metadata": {
                "name": vm, "namespace": "ns", "uid": uid, "resourceVersion": version.to_string(),
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": vm, "uid": format!("vm-{vm}"),
                    "controller": true,
                }],
            },
            "spec": {"domain": {"firmware": {"uuid": "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d"}}},
            "status": {"phase": "Running", "nodeName": node, "VSOCKCID": 7, "activePods": {format!("pod-{uid}"): node}},
        }))
        .unwrap()
    }

    /// Renders changes as texts that the tests compare.
    fn words(changes: &[Change]) -> Vec<String> {
        let word = |change: &Change| match change {
            Change::Present(vm) => format!("{} by {}", vm.name, vm.dial),
            Change::Removed { name } => format!("{name} gone"),
            Change::Synced => "synced".into(),
            Change::Power { name, power, .. } => {
                format!("{name} {}", power.as_str_name().rsplit('_').next().unwrap())
            }
            Change::Topology { name, topology } => format!("{name} in {}", topology.zone),
            change => format!("{change:?}"),
        };
        changes.iter().map(word).collect()
    }

    fn place(zone: &str) -> Arc<Topology> {
        Arc::new(Topology { zone: zone.into(), ..Topology::default() })
    }

    /// Creates a book that has reported `a`, in zone x.
    fn begun() -> Book {
        let mut book = book();
        assert_eq!(book.place(&place("x")), []);
        assert_eq!(book.hear(Side::Comes, Heard::All(Vec::new())), []);
        let told = words(&book.hear(Side::Runs, Heard::All(vec![seen(1, "a", "1", "n1")])));
        assert_eq!(told, ["ns/a by vsock 7:970 in pod pod-1", "ns/a RUNNING", "ns/a in x", "synced"]);
        book
    }

    #[test]
    fn only_what_changes_is_told() {
        let mut book = begun();
        assert_eq!(book.hear(Side::Runs, Heard::There(seen(2, "a", "1", "n1"))), []);
        assert_eq!(book.hear(Side::Runs, Heard::All(vec![seen(3, "a", "1", "n1")])), []);
        assert_eq!(book.place(&place("x")), []);
        assert_eq!(words(&book.place(&place("y"))), ["ns/a in y"]);
        let sockets = Options { sockets: Some("/s".into()), ..options() };
        assert_eq!(words(&book.set(sockets)), ["ns/a by hybrid:/s/1.sock:970"]);
        assert_eq!(words(&book.hear(Side::Runs, Heard::Gone(seen(4, "a", "1", "n1")))), ["ns/a gone"]);
    }

    #[test]
    fn labels_are_told_of_a_vm_that_has_some_and_when_they_change() {
        let labelled = |version, tier: &str| {
            let mut seen = seen(version, "a", "1", "n1");
            let labels: Labels = [("tier".to_owned(), tier.to_owned())].into();
            let facts = Facts { labels: Arc::new(labels), ..Facts::clone(seen.facts.as_ref().unwrap()) };
            seen.facts = Some(Arc::new(facts));
            seen
        };
        let mut book = begun();
        for (version, tier) in [(2, "db"), (3, "web")] {
            let told = book.hear(Side::Runs, Heard::There(labelled(version, tier)));
            let labels: Arc<Labels> = Arc::new([("tier".to_owned(), tier.to_owned())].into());
            assert_eq!(book.instance("ns/a").unwrap().labels, labels);
            assert_eq!(told, [Change::Labels { name: "ns/a".into(), labels }]);
        }
        assert_eq!(book.hear(Side::Runs, Heard::There(labelled(4, "web"))), []);
        book.hear(Side::Runs, Heard::Gone(labelled(5, "web")));
        let told = book.hear(Side::Runs, Heard::There(labelled(6, "web")));
        assert_eq!(told.iter().filter(|change| matches!(change, Change::Labels { .. })).count(), 1);
    }

    #[test]
    fn nothing_is_told_before_all_is_known() {
        let mut book = book();
        assert_eq!(book.hear(Side::Runs, Heard::All(vec![seen(1, "a", "1", "n1")])), []);
        assert_eq!(book.hear(Side::Runs, Heard::There(seen(2, "b", "2", "n1"))), []);
        let told = words(&book.hear(Side::Comes, Heard::All(Vec::new())));
        assert_eq!(told.last().map(String::as_str), Some("synced"));
        assert_eq!(told.len(), 5, "without a place: {told:?}");
        assert_eq!(words(&book.place(&place("x"))), ["ns/a in x", "ns/b in x"]);
    }

    #[test]
    fn what_was_missed_is_told_when_all_are_listed_again() {
        let mut book = begun();
        let told = words(&book.hear(Side::Runs, Heard::All(vec![seen(9, "b", "2", "n1")])));
        assert_eq!(told, ["ns/a gone", "ns/b by vsock 7:970 in pod pod-2", "ns/b RUNNING", "ns/b in x"]);
    }

    #[test]
    fn a_vm_that_was_started_again_is_reached_otherwise() {
        let mut book = begun();
        let again = words(&book.hear(Side::Runs, Heard::There(seen(2, "a", "2", "n1"))));
        assert_eq!(again, ["ns/a by vsock 7:970 in pod pod-2"]);
    }

    #[test]
    fn a_vm_that_was_made_again_is_new_in_every_respect() {
        let mut book = begun();
        let mut other = seen(2, "a", "2", "n1");
        let facts =
            other.facts.take().map(|facts| Facts { lasting: "vm-another".into(), ..Facts::clone(&facts) });
        other.facts = facts.map(Arc::new);
        let told = words(&book.hear(Side::Runs, Heard::There(other)));
        assert_eq!(told, ["ns/a by vsock 7:970 in pod pod-2", "ns/a RUNNING", "ns/a in x"]);
    }

    #[test]
    fn the_target_of_a_migration_has_the_vm_when_it_is_over() {
        let mut target = book();
        target.hear(Side::Runs, Heard::All(Vec::new()));
        assert_eq!(words(&target.hear(Side::Comes, Heard::All(vec![seen(1, "a", "1", "n2")]))), ["synced"]);
        assert_eq!(target.hear(Side::Comes, Heard::There(seen(2, "a", "1", "n2"))), []);
        let over = words(&target.hear(Side::Comes, Heard::There(seen(3, "a", "1", "n1"))));
        assert_eq!(over, ["ns/a by vsock 7:970 in pod pod-1", "ns/a RUNNING"]);
        // The label of the watch changes as well; the two events may arrive in either order.
        assert_eq!(target.hear(Side::Runs, Heard::There(seen(3, "a", "1", "n1"))), []);
        assert_eq!(target.hear(Side::Comes, Heard::Gone(seen(4, "a", "1", "n1"))), []);
    }

    #[test]
    fn the_source_of_a_migration_lets_go_when_it_is_over() {
        for late in [false, true] {
            let mut source = begun();
            if late {
                // It once migrated to this node, and keeps the label of the target.
                assert_eq!(source.hear(Side::Comes, Heard::There(seen(1, "a", "1", "n1"))), []);
                assert_eq!(
                    words(&source.hear(Side::Comes, Heard::There(seen(5, "a", "1", "n2")))),
                    ["ns/a gone"]
                );
                assert_eq!(source.hear(Side::Runs, Heard::Gone(seen(5, "a", "1", "n1"))), []);
            } else {
                assert_eq!(
                    words(&source.hear(Side::Runs, Heard::Gone(seen(5, "a", "1", "n1")))),
                    ["ns/a gone"]
                );
            }
        }
    }

    #[test]
    fn two_vms_with_one_dmi_uuid_are_two() {
        let mut book = begun();
        let told = words(&book.hear(Side::Runs, Heard::There(seen(2, "b", "2", "n1"))));
        assert_eq!(told, ["ns/b by vsock 7:970 in pod pod-2", "ns/b RUNNING", "ns/b in x"]);
    }
}
