//! The VMs of guest clusters: what is heard of VirtualMachines, their runs, their guests and the nodes, made into what clusters are
//! told. Pure.
//!
//! Nothing is told before all four were listed once: a VM of which only a part is known would be told as something that it is not.

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

/// The Node as the agent in a guest tells it, as its host half has written it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Namespace and name of its run.
    pub name: String,
    /// The UID of that: a run that came after it under the same name has said nothing yet.
    pub run: String,
    /// The name of its Node.
    pub node: String,
}

impl Report {
    /// That of a Guest object; none if it says nothing of use.
    pub fn of(guest: Guest) -> Option<Self> {
        let metadata = guest.metadata;
        let owners = metadata.owner_references.unwrap_or_default();
        let run = owners.into_iter().find(|owner| owner.kind == "VirtualMachineInstance")?.uid;
        let name = format!("{}/{}", metadata.namespace?, metadata.name?);
        let node = Some(guest.status.node_name).filter(|node| node.len() <= LONGEST_NAME);
        Some(Self { name, run, node: node.unwrap_or_default() })
    }
}

/// A node of the host cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
}

type Labels = BTreeMap<String, String>;

impl Host {
    /// That of a Node; none if it has no name.
    pub fn of(node: Labelled) -> Option<Self> {
        Some(Self { name: node.metadata.name?, labels: node.metadata.labels.unwrap_or_default() })
    }
}

/// What is known.
#[derive(Debug, Default)]
pub struct Members {
    /// VirtualMachines and their runs, by name.
    vms: [BTreeMap<String, Arc<Facts>>; 2],
    /// By the names of the runs.
    reports: BTreeMap<String, Report>,
    /// The labels of Nodes of the host cluster.
    hosts: BTreeMap<String, Host>,
    /// Which labels clusters are told, beside region and zone.
    further: Vec<String>,
    /// VirtualMachines, runs, guests, Nodes.
    heard: [bool; 4],
    /// All was told once.
    has_begun: bool,
    /// Those that are told, by cluster and lasting identifier; their names.
    told: BTreeMap<String, BTreeMap<String, String>>,
    /// The cluster and the lasting identifier of each of them, by name.
    by_name: BTreeMap<String, (String, String)>,
    /// The networks that a cluster's VMs are attached to.
    networks: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

/// News of a VM of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// It is so now; it may have been so before.
    There(String, Box<v1::Instance>),
    /// The cluster has none any more with this lasting identifier.
    Gone(String, String),
}

impl Members {
    /// Whether everything was listed once.
    pub fn is_complete(&self) -> bool {
        self.heard == [true; 4]
    }

    /// Takes in what is heard of VirtualMachines or their runs.
    pub fn hear_vms(&mut self, kind: Kind, heard: Heard<Arc<Facts>>) -> Vec<News> {
        let known = &mut self.vms[kind as usize];
        let changed = keep(known, heard, |facts| facts.name.clone());
        self.heard[kind as usize] = true;
        self.tell(changed)
    }

    /// Takes in what is heard of guests.
    pub fn hear_reports(&mut self, heard: Heard<Report>) -> Vec<News> {
        let changed = keep(&mut self.reports, heard, |report| report.name.clone());
        self.heard[2] = true;
        self.tell(changed)
    }

    /// Takes in what is heard of the host cluster's Nodes.
    pub fn hear_hosts(&mut self, heard: Heard<Host>) -> Vec<News> {
        self.heard[3] = true;
        // Much else of a Node changes now and then.
        if let Heard::There(host) = &heard
            && self.hosts.get(&host.name) == Some(host)
        {
            return Vec::new();
        }
        let changed = keep(&mut self.hosts, heard, |host| host.name.clone());
        self.moved(|node| changed.contains(node))
    }

    /// Which labels of Nodes clusters are told, beside region and zone.
    pub fn set_labels(&mut self, further: &[String]) -> Vec<News> {
        if self.further == further {
            return Vec::new();
        }
        self.further = further.to_vec();
        self.moved(|_| true)
    }

    /// What is told anew of VMs on such nodes.
    fn moved(&mut self, is_such: impl Fn(&String) -> bool) -> Vec<News> {
        let names = self.vms.iter().flat_map(BTreeMap::values).filter(|facts| is_such(&facts.node));
        let names = names.map(|facts| facts.name.clone()).collect();
        self.tell(names)
    }

    /// The name of the VM of a cluster with this lasting identifier.
    pub fn name(&self, cluster: &str, uid: &str) -> Option<&str> {
        self.told.get(cluster)?.get(uid).map(String::as_str)
    }

    /// Whether a cluster has VMs.
    pub fn has(&self, cluster: &str) -> bool {
        self.told.get(cluster).is_some_and(|of| !of.is_empty())
    }

    /// Counts the VMs of a cluster.
    pub fn count(&self, cluster: &str) -> usize {
        self.told.get(cluster).map_or(0, BTreeMap::len)
    }

    /// The networks that VMs of a cluster are attached to.
    pub fn networks(&self, cluster: &str) -> BTreeSet<String> {
        self.networks.get(cluster).into_iter().flat_map(BTreeMap::values).flatten().cloned().collect()
    }

    /// What counts of a VM: its run, if there is one.
    fn facts(&self, name: &str) -> Option<&Arc<Facts>> {
        let [wanted, runs] = &self.vms;
        runs.get(name).or_else(|| wanted.get(name))
    }

    /// What is told of these VMs.
    fn tell(&mut self, names: BTreeSet<String>) -> Vec<News> {
        if !self.is_complete() {
            return Vec::new();
        }
        // What was heard before all was complete is told with the last of it.
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
        // Another VM may be told by its identifier by now.
        of.get(&uid).filter(|known| *known == name)?;
        of.remove(&uid);
        if let Some(networks) = self.networks.get_mut(&cluster) {
            networks.remove(&uid);
        }
        Some(News::Gone(cluster, uid))
    }

    /// A VM as its cluster is told of it, by what is known of it now.
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

/// Takes in what is heard; what may have changed by it.
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
