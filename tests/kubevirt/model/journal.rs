//! What the model did, for those who check it afterwards.

use std::collections::BTreeMap;
use std::time::Instant;

use super::domain::Disk;

/// An attachment pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    pub pod: String,
    /// The names of the volumes in it.
    pub volumes: Vec<String>,
}

/// A disk in a domain: from when it could first have been in it to when it surely was no more.
#[derive(Clone, Debug)]
pub struct Held {
    pub disk: Disk,
    pub from: Instant,
    pub until: Option<Instant>,
}

impl Held {
    fn overlaps(&self, other: &Self) -> bool {
        self.until.is_none_or(|until| other.from < until) && other.until.is_none_or(|until| self.from < until)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Journal {
    /// The attachment pods of each instance, by its `namespace/name`.
    pub generations: BTreeMap<String, Vec<Generation>>,
    /// All disks that were in a domain.
    pub held: Vec<Held>,
    /// The calls of subresources, and how each was answered.
    pub requests: Vec<(String, u16)>,
    /// What went wrong in the model itself.
    pub faults: Vec<String>,
}

impl Journal {
    /// How many attachment pods an instance has had.
    pub fn generations(&self, vm: &str) -> usize {
        self.generations.get(vm).map_or(0, Vec::len)
    }

    /// The disks that are in domains now.
    pub fn plugged(&self) -> impl Iterator<Item = &Disk> {
        self.held.iter().filter(|held| held.until.is_none()).map(|held| &held.disk)
    }

    /// The VMs in whose domains a claim is now, as `namespace/name`.
    pub fn holders(&self, namespace: &str, claim: &str) -> Vec<&str> {
        let is_of = |disk: &&Disk| disk.claim == claim && namespace_of(disk) == namespace;
        self.plugged().filter(is_of).map(|disk| disk.vm.as_str()).collect()
    }

    /// Volumes that were in two domains at once: the disks of each.
    pub fn conflicts(&self) -> Vec<(&Disk, &Disk)> {
        let mut conflicts = Vec::new();
        for (number, first) in self.held.iter().enumerate() {
            for second in &self.held[number + 1..] {
                let is_same = first.disk.persistent_volume == second.disk.persistent_volume;
                let differ = first.disk.instance != second.disk.instance;
                if is_same && differ && first.overlaps(second) {
                    conflicts.push((&first.disk, &second.disk));
                }
            }
        }
        conflicts
    }

    pub(super) fn takes(&mut self, disk: Disk) -> usize {
        self.held.push(Held { disk, from: Instant::now(), until: None });
        self.held.len() - 1
    }

    pub(super) fn lets_go(&mut self, number: usize) {
        self.held[number].until.get_or_insert_with(Instant::now);
    }
}

fn namespace_of(disk: &Disk) -> &str {
    disk.vm.split_once('/').map_or("", |(namespace, _)| namespace)
}
