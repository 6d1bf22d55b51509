//! VMs of guest clusters: merges VirtualMachines, their instances, their Guest objects and the Nodes of the host
//! cluster into the description of each VM for its cluster. Pure.
//!
//! Nothing is published before all four kinds have been listed once: an incompletely known VM would be described
//! wrongly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::instance::{LONGEST_NAME, is_global};
use crate::addresses;
use crate::host::backends::kubevirt::controller::Kind;
use crate::host::backends::kubevirt::node::place::{self, Labelled};
use crate::host::backends::kubevirt::seen::Facts;
use crate::kubernetes::follow::Heard;
use crate::wire::guest_object::Guest;
use crate::wire::proto::v1::{self, PowerState, instance::Power};

/// Report of an agent on the Node that its guest is, as its host half has written it to the Guest object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Namespace and name of the VM's run.
    pub name: String,
    /// UID of the run. The report says nothing about a later run of the same name.
    pub run: String,
    /// Name of the Node in the guest cluster; may be empty.
    pub node: String,
}

impl Report {
    /// Parses a Guest object. Returns `None` if it belongs to no run of a VM.
    pub fn of(guest: Guest) -> Option<Self> {
        let metadata = guest.metadata;
        let owners = metadata.owner_references.unwrap_or_default();
        let run = owners.into_iter().find(|owner| owner.kind == "VirtualMachineInstance")?.uid;
        let name = format!("{}/{}", metadata.namespace?, metadata.name?);
        let node = Some(guest.status.node_name).filter(|node| node.len() <= LONGEST_NAME);
        Some(Self { name, run, node: node.unwrap_or_default() })
    }
}

/// Node of the host cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Name of the Node.
    pub name: String,
    /// Labels of the Node, which give region and zone among others.
    pub labels: Labels,
}

type Labels = BTreeMap<String, String>;

impl Host {
    /// Parses a Node. Returns `None` if it has no name.
    pub fn of(node: Labelled) -> Option<Self> {
        Some(Self { name: node.metadata.name?, labels: node.metadata.labels.unwrap_or_default() })
    }
}

/// Index of the VMs of all guest clusters.
#[derive(Debug, Default)]
pub struct Members {
    /// VirtualMachines, and their runs, by name.
    vms: [BTreeMap<String, Arc<Facts>>; 2],
    /// Reports of guests, by the names of their runs.
    reports: BTreeMap<String, Report>,
    /// Nodes of the host cluster by name.
    hosts: BTreeMap<String, Host>,
    /// Further labels of Nodes that are passed to clusters, besides region and zone.
    further: Vec<String>,
    /// Which kinds have been listed: VirtualMachines, runs, Guest objects, Nodes.
    heard: [bool; 4],
    /// True once everything has been listed and published.
    has_begun: bool,
    /// Names of the published VMs, by cluster and lasting identifier.
    told: BTreeMap<String, BTreeMap<String, String>>,
    /// Cluster and lasting identifier of each published VM, by name.
    by_name: BTreeMap<String, (String, String)>,
    /// Networks that VMs are attached to, by cluster and lasting identifier.
    networks: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

/// Change of a VM, to be published to its cluster.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// The VM exists, and is described like this now. It may have been published before.
    There(String, Box<v1::Instance>),
    /// The cluster no longer has a VM with this lasting identifier.
    Gone(String, String),
}

impl Members {
    /// Reports whether all four kinds of objects have been listed once.
    pub fn is_complete(&self) -> bool {
        self.heard == [true; 4]
    }

    /// Takes in a report on VirtualMachines or their runs. Returns the resulting news.
    pub fn hear_vms(&mut self, kind: Kind, heard: Heard<Arc<Facts>>) -> Vec<News> {
        let known = &mut self.vms[kind as usize];
        let changed = keep(known, heard, |facts| facts.name.clone());
        self.heard[kind as usize] = true;
        self.tell(changed)
    }

    /// Takes in a report on Guest objects. Returns the resulting news.
    pub fn hear_reports(&mut self, heard: Heard<Report>) -> Vec<News> {
        let changed = keep(&mut self.reports, heard, |report| report.name.clone());
        self.heard[2] = true;
        self.tell(changed)
    }

    /// Takes in a report on Nodes of the host cluster. Returns the resulting news.
    pub fn hear_hosts(&mut self, heard: Heard<Host>) -> Vec<News> {
        self.heard[3] = true;
        // Other fields of a Node change often, and do not matter here.
        if let Heard::There(host) = &heard
            && self.hosts.get(&host.name) == Some(host)
        {
            return Vec::new();
        }
        let changed = keep(&mut self.hosts, heard, |host| host.name.clone());
        self.moved(|node| changed.contains(node))
    }

    /// Sets the labels of Nodes that are passed to clusters, besides region and zone. Returns the resulting news.
    pub fn set_labels(&mut self, further: &[String]) -> Vec<News> {
        if self.further == further {
            return Vec::new();
        }
        self.further = further.to_vec();
        self.moved(|_| true)
    }

    /// Publishes again the VMs on the nodes that `is_such` selects.
    fn moved(&mut self, is_such: impl Fn(&String) -> bool) -> Vec<News> {
        let names = self.vms.iter().flat_map(BTreeMap::values).filter(|facts| is_such(&facts.node));
        let names = names.map(|facts| facts.name.clone()).collect();
        self.tell(names)
    }

    /// Returns the name of the VM of a cluster with this lasting identifier.
    pub fn name(&self, cluster: &str, uid: &str) -> Option<&str> {
        self.told.get(cluster)?.get(uid).map(String::as_str)
    }

    /// Reports whether a cluster has VMs.
    pub fn has(&self, cluster: &str) -> bool {
        self.told.get(cluster).is_some_and(|of| !of.is_empty())
    }

    /// Counts the VMs of a cluster.
    pub fn count(&self, cluster: &str) -> usize {
        self.told.get(cluster).map_or(0, BTreeMap::len)
    }

    /// Returns the networks that VMs of a cluster are attached to.
    pub fn networks(&self, cluster: &str) -> BTreeSet<String> {
        self.networks.get(cluster).into_iter().flat_map(BTreeMap::values).flatten().cloned().collect()
    }

    /// Returns the facts that count for a VM: those of its run, or else those of the VirtualMachine.
    fn facts(&self, name: &str) -> Option<&Arc<Facts>> {
        let [wanted, runs] = &self.vms;
        runs.get(name).or_else(|| wanted.get(name))
    }

    /// Returns the news for these VMs, and remembers which VMs are published.
    fn tell(&mut self, names: BTreeSet<String>) -> Vec<News> {
        if !self.is_complete() {
            return Vec::new();
        }
        // The first time, everything that was read before the lists were complete is published.
        let all: BTreeSet<String> = if std::mem::replace(&mut self.has_begun, true) {
            names
        } else {
            self.vms.iter().flat_map(BTreeMap::keys).cloned().collect()
        };
        let mut news = Vec::new();
        for name in all {
            let now = self.facts(&name).filter(|facts| !facts.cluster.is_empty()).cloned();
            let place = now.as_ref().map(|facts| (facts.cluster.clone(), facts.lasting.clone()));
            if let Some(before) = self.by_name.remove(&name).filter(|before| Some(before) != place.as_ref()) {
                news.extend(self.forget(&name, before));
            }
            if let (Some(facts), Some((cluster, uid))) = (now, place) {
                self.by_name.insert(name.clone(), (cluster.clone(), uid.clone()));
                self.told.entry(cluster.clone()).or_default().insert(uid.clone(), name);
                let attached = facts.interfaces.iter().map(|one| one.network.clone());
                let attached = attached.filter(|network| !network.is_empty()).collect();
                self.networks.entry(cluster.clone()).or_default().insert(uid, attached);
                news.push(News::There(cluster, Box::new(self.instance(&facts))));
            }
        }
        news
    }

    fn forget(&mut self, name: &str, (cluster, uid): (String, String)) -> Option<News> {
        let of = self.told.get_mut(&cluster)?;
        // Another VM may be published with this identifier by now.
        of.get(&uid).filter(|known| *known == name)?;
        of.remove(&uid);
        if let Some(networks) = self.networks.get_mut(&cluster) {
            networks.remove(&uid);
        }
        Some(News::Gone(cluster, uid))
    }

    /// Describes a VM for its cluster, by what is known now.
    pub fn instance(&self, facts: &Facts) -> v1::Instance {
        let is_on = facts.power == PowerState::Running || facts.power == PowerState::Paused;
        let report =
            self.reports.get(&facts.name).filter(|report| report.run.eq_ignore_ascii_case(&facts.uid));
        let labels = self.hosts.get(&facts.node).map(|host| &host.labels);
        let empty = Labels::new();
        let topology = (!facts.node.is_empty())
            .then(|| place::topology(&facts.node, labels.unwrap_or(&empty), &self.further));
        let wanted = self.vms[Kind::Wanted as usize].get(&facts.name);
        let wanted = wanted.filter(|wanted| wanted.lasting == facts.lasting);
        v1::Instance {
            vm_uid: facts.lasting.clone(),
            provider_id: format!("guestlet://{}", facts.lasting),
            name: facts.name.clone(),
            system_uuid: facts.dmi.clone().unwrap_or_default(),
            node_name: report.map(|report| report.node.clone()).unwrap_or_default(),
            power: power(facts.power).into(),
            interfaces: interfaces(facts),
            addresses_current: is_on && facts.has_agent,
            topology,
            instance_type: wanted.map(|wanted| wanted.instance_type.clone()).unwrap_or_default(),
        }
    }
}

/// Takes in a report of a watch. Returns the names of the things that may have changed.
fn keep<T>(
    known: &mut BTreeMap<String, T>,
    heard: Heard<T>,
    name: impl Fn(&T) -> String,
) -> BTreeSet<String> {
    match heard {
        Heard::All(all) => {
            let before: BTreeSet<_> = std::mem::take(known).into_keys().collect();
            known.extend(all.into_iter().map(|one| (name(&one), one)));
            before.into_iter().chain(known.keys().cloned()).collect()
        }
        Heard::There(one) => {
            let name = name(&one);
            known.insert(name.clone(), one);
            [name].into()
        }
        Heard::Gone(one) => {
            let name = name(&one);
            known.remove(&name);
            [name].into()
        }
    }
}

fn power(power: PowerState) -> Power {
    match power {
        PowerState::Running => Power::Running,
        PowerState::Paused => Power::Paused,
        PowerState::Off => Power::Stopped,
        PowerState::Unspecified => Power::Unknown,
    }
}

fn interfaces(facts: &Facts) -> Vec<v1::InstanceInterface> {
    let told = facts.interfaces.iter().map(|one| v1::InstanceInterface {
        hardware_address: one.hardware_address.clone(),
        network: one.network.clone(),
        name: one.guest_name.clone(),
        addresses: one
            .addresses
            .iter()
            .filter(|text| addresses::parse(text).is_ok_and(is_global))
            .cloned()
            .collect(),
    });
    told.collect()
}

#[cfg(test)]
mod tests;
