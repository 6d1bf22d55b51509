//! Turns the events about VirtualMachines and VirtualMachineInstances of a cluster into changes of its list of
//! VMs. Pure.
//!
//! A VM is identified by namespace and name, and is reported once even if its run differs from its desired
//! state: as long as a VirtualMachineInstance exists, only that is reported. The VM whose guest makes a request
//! is thus always the reported one.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::super::super::{Change, Run, Vm};
use super::super::seen::{Facts, Vsock};
use super::super::told::Told;
use super::listing::Listing;
use crate::host::limits::Limits;
use crate::kubernetes::follow::Heard;
use crate::transport::dial::{Dial, Dialing, Error, Source};

/// Settings for VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Maximum number of volumes that may be plugged into a VM.
    pub max_volumes: u32,
    /// Limits on the resources that a guest may consume.
    pub limits: Arc<Limits>,
    /// Labels of Nodes that are reported to guest clusters, in addition to region and zone.
    pub node_labels: Vec<String>,
}

impl Options {
    /// Builds the VM with these facts.
    pub fn vm(&self, facts: &Facts) -> Arc<Vm> {
        self.told(facts).vm
    }

    fn told(&self, facts: &Facts) -> Told {
        let dial = AtNode(facts.node.clone());
        Told::new(facts, dial.into(), self.max_volumes, &self.limits)
    }
}

/// Dialer that always fails: agents are dialled by the guestlet-host on their node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct AtNode(String);

impl fmt::Display for AtNode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_str() {
            "" => formatter.write_str("no node"),
            node => write!(formatter, "node {node}"),
        }
    }
}

impl Dial for AtNode {
    fn dial(&self, _: Source) -> Dialing<'_> {
        let words = "the agents of a cluster are reached by the guestlet-host of their nodes";
        Box::pin(
            async move { Err(Error::NoWay { why: words.to_owned(), remedy: String::new(), is_meant: true }) },
        )
    }

    fn is_same(&self, other: &dyn Dial) -> bool {
        (other as &dyn Any).downcast_ref() == Some(self)
    }
}

/// Kind of the objects that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// VirtualMachines: the desired state.
    Wanted,
    /// VirtualMachineInstances: the runs.
    Runs,
}

/// State of all VMs.
#[derive(Debug)]
pub struct Book {
    options: Options,
    /// Facts by VM name, for each [`Kind`].
    known: [BTreeMap<String, Arc<Facts>>; 2],
    /// True for each kind that has been listed. No changes are reported before both are.
    heard: [bool; 2],
    listing: Listing,
}

impl Book {
    /// Creates an empty book. `listing` receives which VMs list volumes of guestlet's.
    pub fn new(options: Options, listing: Listing) -> Self {
        Self { options, known: [BTreeMap::new(), BTreeMap::new()], heard: [false; 2], listing }
    }

    /// Applies an event and returns the resulting changes.
    pub fn hear(&mut self, kind: Kind, heard: Heard<Arc<Facts>>) -> Vec<Change> {
        let was_complete = self.is_complete();
        let names: BTreeSet<String> = match &heard {
            Heard::All(all) => {
                let before = self.known[kind as usize].keys();
                before.chain(all.iter().map(|facts| &facts.name)).cloned().collect()
            }
            Heard::There(facts) | Heard::Gone(facts) => BTreeSet::from([facts.name.clone()]),
        };
        let before: Vec<_> = names.into_iter().map(|name| (self.facts(&name).cloned(), name)).collect();
        self.keep(kind, heard);
        for (_, name) in &before {
            let lists =
                |known: &BTreeMap<_, Arc<Facts>>| known.get(name).is_some_and(|facts| facts.has_volumes);
            self.listing.set(name, self.known.iter().any(lists));
        }
        match (was_complete, self.is_complete()) {
            (_, false) => Vec::new(),
            (true, true) => self.tell(before),
            (false, true) => {
                let names: BTreeSet<_> = self.known.iter().flat_map(BTreeMap::keys).cloned().collect();
                let mut changes = self.tell(names.into_iter().map(|name| (None, name)).collect());
                changes.push(Change::Synced);
                changes
            }
        }
    }

    /// Applies new settings and returns the resulting changes.
    pub fn set(&mut self, options: Options) -> Vec<Change> {
        if self.options == options {
            return Vec::new();
        }
        self.options = options;
        if !self.is_complete() {
            return Vec::new();
        }
        let names: BTreeSet<_> = self.known.iter().flat_map(BTreeMap::keys).collect();
        let vm = |name: &String| Some(Change::Present(self.options.vm(self.facts(name)?)));
        names.into_iter().filter_map(vm).collect()
    }

    fn is_complete(&self) -> bool {
        self.heard == [true; 2]
    }

    fn keep(&mut self, kind: Kind, heard: Heard<Arc<Facts>>) {
        let known = &mut self.known[kind as usize];
        let named = |facts: Arc<Facts>| (facts.name.clone(), facts);
        match heard {
            Heard::All(all) => {
                *known = all.into_iter().map(named).collect();
                self.heard[kind as usize] = true;
            }
            Heard::There(facts) => {
                known.extend([named(facts)]);
            }
            Heard::Gone(facts) => {
                known.remove(&facts.name);
            }
        }
    }

    /// Returns the facts that count for a VM: those of its run, if it has one.
    fn facts(&self, name: &str) -> Option<&Arc<Facts>> {
        let [wanted, runs] = &self.known;
        runs.get(name).or_else(|| wanted.get(name))
    }

    /// Returns the changes of these VMs since `before`. Removals come first, because a removed VM's identifiers may
    /// be in use by another VM.
    fn tell(&self, before: Vec<(Option<Arc<Facts>>, String)>) -> Vec<Change> {
        let (mut changes, mut present) = (Vec::new(), Vec::new());
        for (before, name) in before {
            match self.facts(&name) {
                Some(now) => present.push((before, now)),
                None if before.is_some() => changes.push(Change::Removed { name }),
                None => {}
            }
        }
        for (before, now) in present {
            if before.as_ref() != Some(now) {
                changes.extend(self.changes(before.as_deref(), now));
            }
        }
        changes
    }

    fn changes(&self, before: Option<&Facts>, now: &Facts) -> Vec<Change> {
        let before = before.filter(|before| before.lasting == now.lasting);
        let told = self.options.told(now);
        let mut changes = told.changes(before.map(|before| self.options.told(before)).as_ref());
        let run = run(now);
        if before.map_or_else(|| run.is_some(), |before| self::run(before) != run) {
            // Sent after the VM is present, so that a receiver of the run finds the VM.
            let at = usize::from(matches!(changes.first(), Some(Change::Present(_))));
            changes.insert(at, Change::Run { name: now.name.clone(), run });
        }
        changes
    }
}

/// Drops what only the node needs, because there may be very many VMs.
pub(super) fn slim(mut facts: Arc<Facts>) -> Arc<Facts> {
    let slim = Arc::make_mut(&mut facts);
    slim.pods = Vec::new();
    slim.vsock = Vsock::default();
    facts
}

/// Returns where a VM runs.
fn run(facts: &Facts) -> Option<Run> {
    // A VM that is off has no node.
    let is_there = !facts.node.is_empty();
    is_there.then(|| Run { node: facts.node.clone(), instance: facts.uid.clone() })
}

#[cfg(test)]
mod tests {
    use super::super::super::interfaces::Interface;
    use super::*;
    use crate::wire::proto::v1::PowerState;

    fn options(max_volumes: u32) -> Options {
        Options { max_volumes, limits: Arc::default(), node_labels: Vec::new() }
    }

    /// Builds the VirtualMachine `ns/vm` with this UID.
    fn wanted(vm: &str, uid: &str) -> Arc<Facts> {
        let (name, uid) = (format!("ns/{vm}"), uid.to_owned());
        let cluster = "ns/x".to_owned();
        Arc::new(Facts {
            name,
            lasting: uid.clone(),
            uid,
            cluster,
            power: PowerState::Off,
            ..Facts::default()
        })
    }

    /// Builds a run of it on this node.
    fn runs(vm: &str, uid: &str, node: &str) -> Arc<Facts> {
        let (wanted, node) = (Facts::clone(&wanted(vm, uid)), node.to_owned());
        let (pods, vsock) = (vec![("pod".to_owned(), node.clone())], Vsock::Cid(7));
        Arc::new(Facts {
            uid: format!("run-of-{uid}"),
            node,
            pods,
            vsock,
            power: PowerState::Running,
            ..wanted
        })
    }

    fn with(facts: Arc<Facts>, change: impl FnOnce(&mut Facts)) -> Arc<Facts> {
        let mut facts = Arc::unwrap_or_clone(facts);
        change(&mut facts);
        Arc::new(facts)
    }

    /// Renders changes as texts that the tests compare.
    fn words(changes: &[Change]) -> Vec<String> {
        let word = |change: &Change| match change {
            Change::Present(vm) => {
                format!("{} is {} in {} by {}", vm.name, vm.ids.lasting, vm.cluster, vm.dial)
            }
            Change::Removed { name } => format!("{name} gone"),
            Change::Synced => "synced".to_owned(),
            Change::Power { name, power, problem } => {
                format!("{name} {}", if problem.is_empty() { power.as_str_name() } else { problem })
                    .replace("POWER_STATE_", "")
            }
            Change::Run { name, run: None } => format!("{name} nowhere"),
            Change::Run { name, run: Some(run) } => format!("{name} as {} on {}", run.instance, run.node),
            change => format!("{change:?}"),
        };
        changes.iter().map(word).collect()
    }

    /// Creates a book that has reported `a`, which runs on n1, and `b`, which is off.
    fn begun() -> Book {
        let mut book = Book::new(options(9), Listing::default());
        let all = vec![wanted("a", "u-a"), wanted("b", "u-b")];
        assert_eq!(book.hear(Kind::Wanted, Heard::All(all)), []);
        let told = words(&book.hear(Kind::Runs, Heard::All(vec![runs("a", "u-a", "n1")])));
        let expected = [
            "ns/a is u-a in ns/x by node n1",
            "ns/a as run-of-u-a on n1",
            "ns/a RUNNING",
            "ns/b is u-b in ns/x by no node",
            "ns/b OFF",
            "synced",
        ];
        assert_eq!(told, expected);
        book
    }

    #[test]
    fn nothing_is_told_before_both_kinds_were_listed() {
        let mut book = Book::new(options(9), Listing::default());
        assert_eq!(book.hear(Kind::Runs, Heard::All(vec![runs("a", "u-a", "n1")])), []);
        assert_eq!(book.hear(Kind::Runs, Heard::There(runs("b", "u-b", "n1"))), []);
        assert_eq!(book.set(options(7)), []);
        let told = words(&book.hear(Kind::Wanted, Heard::All(Vec::new())));
        assert_eq!((told.len(), told.last().map(String::as_str)), (7, Some("synced")));
    }

    #[test]
    fn only_what_changes_is_told() {
        let mut book = begun();
        assert_eq!(book.hear(Kind::Wanted, Heard::There(wanted("a", "u-a"))), []);
        assert_eq!(book.hear(Kind::Runs, Heard::All(vec![runs("a", "u-a", "n1")])), []);
        let other_pod = with(runs("a", "u-a", "n1"), |facts| facts.pods.clear());
        assert_eq!(book.hear(Kind::Runs, Heard::There(other_pod)), []);
        let other_name = with(runs("a", "u-a", "n1"), |facts| facts.interfaces.push(Interface::default()));
        assert_eq!(book.hear(Kind::Runs, Heard::There(other_name)), []);
        let paused = with(runs("a", "u-a", "n1"), |facts| facts.power = PowerState::Paused);
        assert_eq!(words(&book.hear(Kind::Runs, Heard::There(paused))), ["ns/a PAUSED"]);
        let odd = with(runs("a", "u-a", "n1"), |facts| facts.problem = "it is odd".into());
        assert_eq!(words(&book.hear(Kind::Runs, Heard::There(odd))), ["ns/a it is odd"]);
        assert_eq!(book.set(options(9)), []);
        let told = book.set(options(7));
        assert!(told.iter().all(|change| matches!(change, Change::Present(vm) if vm.max_volumes == 7)));
        assert_eq!(told.len(), 2);
    }

    #[test]
    fn a_vm_that_is_migrated_is_the_same_one_elsewhere() {
        let mut book = begun();
        let told = words(&book.hear(Kind::Runs, Heard::There(runs("a", "u-a", "n2"))));
        assert_eq!(told, ["ns/a is u-a in ns/x by node n2", "ns/a as run-of-u-a on n2"]);
    }

    #[test]
    fn a_vm_is_off_without_an_instance_and_gone_without_either() {
        let mut book = begun();
        let off = words(&book.hear(Kind::Runs, Heard::Gone(runs("a", "u-a", "n1"))));
        assert_eq!(off, ["ns/a is u-a in ns/x by no node", "ns/a nowhere", "ns/a OFF"]);
        assert_eq!(words(&book.hear(Kind::Wanted, Heard::Gone(wanted("a", "u-a")))), ["ns/a gone"]);
        assert_eq!(book.hear(Kind::Wanted, Heard::Gone(wanted("a", "u-a"))), []);
    }

    #[test]
    fn what_an_instance_says_counts_as_long_as_it_is_there() {
        let mut book = begun();
        // The VM was created again under the same name, while a run of the previous one has not ended.
        assert_eq!(book.hear(Kind::Wanted, Heard::Gone(wanted("a", "u-a"))), []);
        assert_eq!(book.hear(Kind::Wanted, Heard::There(wanted("a", "u-c"))), []);
        let told = words(&book.hear(Kind::Runs, Heard::Gone(runs("a", "u-a", "n1"))));
        assert_eq!(told, ["ns/a is u-c in ns/x by no node", "ns/a OFF"], "it is new in every respect");
        // A run without a VirtualMachine.
        let told = words(&book.hear(Kind::Runs, Heard::There(runs("d", "own", "n1"))));
        assert_eq!(told, ["ns/d is own in ns/x by node n1", "ns/d as run-of-own on n1", "ns/d RUNNING"]);
        assert_eq!(words(&book.hear(Kind::Runs, Heard::Gone(runs("d", "own", "n1")))), ["ns/d gone"]);
    }

    #[test]
    fn what_was_missed_is_told_when_all_are_listed_again() {
        let mut book = begun();
        let told = words(&book.hear(Kind::Wanted, Heard::All(vec![wanted("c", "u-b")])));
        assert_eq!(told, ["ns/b gone", "ns/c is u-b in ns/x by no node", "ns/c OFF"]);
        let told = words(&book.hear(Kind::Runs, Heard::All(Vec::new())));
        assert_eq!(told, ["ns/a gone"]);
    }

    #[tokio::test]
    async fn no_agent_is_dialled() {
        let vm = options(9).vm(&runs("a", "u-a", "n1"));
        let Err(Error::NoWay { why: words, .. }) = vm.dial.dial(Source::Any).await else { panic!() };
        assert!(words.contains("guestlet-host of their nodes"), "{words}");
    }
}
