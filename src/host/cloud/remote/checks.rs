//! Health checks of load balancers: distributes the checks to the agents of a cluster, and evaluates their
//! reports. The program that announces an address in the cluster chooses nodes by itself; the cluster learns which
//! ones fail, and why.
//!
//! Nodes fetch the checks for the agents of their guests. Agents report like any other call of a guest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::super::Asker;
use super::super::health::{self, MOST_PROBLEMS, Reported, is_backend, outcomes, passes};
use super::super::record::Record;
use super::super::wanted::{Family, Wanted};
use super::balancers::{Balancers, Key};
use super::object::{Address, Object};
use super::{Guests, Registry};
use crate::host::for_guests::Checks;
use crate::host::text;
use crate::wire::proto::v1::{self, instance::Power};

/// Seconds between two reports of an agent if nothing changes. Each report makes the API server look up where its
/// VM runs.
const REPORT: u32 = 60;
/// Age from which a report no longer counts.
const STALE: Duration = Duration::from_secs(150);
/// Interval at which stale reports are looked for.
pub(super) const LOOK: Duration = Duration::from_secs(10);
/// Generations per second. As long as there are fewer changes, a later run never uses a number of an earlier one.
const A_SECOND: u64 = 1 << 20;

/// Health checks of one cluster, and the latest reports on them.
#[derive(Debug, Default)]
pub(super) struct Probes {
    /// Checks by the UIDs of Services.
    targets: BTreeMap<String, v1::HealthCheckTarget>,
    /// Reports of agents by the lasting identifiers of their VMs.
    reports: BTreeMap<String, Reported>,
    /// VMs that take traffic, by the UIDs of Services, as their cluster has reported them to this run of the program.
    /// They are not stored in objects: for a cluster with many Nodes and Services that would be much data that changes
    /// often.
    backends: BTreeMap<String, Arc<[String]>>,
}

impl Probes {
    /// Sets the VMs that take the traffic of a Service. If `backends` is empty, all VMs that are Nodes do.
    pub(super) fn set_backends(&mut self, service: &str, backends: Vec<String>) {
        // The Services of a cluster usually have the same backends, so they share one allocation.
        let same = self.backends.values().next().filter(|known| ***known == *backends).cloned();
        self.backends.insert(service.to_owned(), same.unwrap_or_else(|| backends.into()));
    }

    /// Drops the report of a VM that no longer runs.
    pub(super) fn forget(&mut self, uid: &str) {
        self.reports.remove(uid);
    }

    /// Returns how many VMs take the traffic of a Service, and which ones fail its check. Returns `None` if the
    /// Service has no check, or its cluster has not reported its backends yet.
    fn judge<'i>(
        &self,
        service: &str,
        instances: impl Iterator<Item = &'i v1::Instance>,
    ) -> Option<(u32, Vec<v1::BackendProblem>)> {
        let (target, now) = (self.targets.get(service)?, Instant::now());
        let backends = self.backends.get(service)?;
        let (mut healthy, mut failing) = (0, Vec::new());
        for one in instances.filter(|one| is_backend(backends, one)) {
            let passed = match one.power() {
                Power::Stopped => continue,
                Power::Paused => Err("the VM is paused".to_owned()),
                Power::Running | Power::Unknown => {
                    passes(self.reports.get(&one.vm_uid), &target.id, now, STALE)
                }
            };
            match passed {
                Ok(()) => healthy += 1,
                Err(problem) if failing.len() < MOST_PROBLEMS => {
                    let (vm_uid, vm_name) = (one.vm_uid.clone(), one.name.clone());
                    failing.push(v1::BackendProblem { vm_uid, vm_name, problem });
                }
                Err(_) => {}
            }
        }
        Some((healthy, failing))
    }
}

/// Returns the check that agents make for the load balancer with this key, or `None` if it has no check.
fn target(balancers: &Balancers, key: &Key) -> Option<v1::HealthCheckTarget> {
    let own = balancers.keyed(key).filter(|own| !own.is_going());
    let (object, wanted) = match (own, balancers.shared(&key.0, &key.1)) {
        (Some(own), _) => (own, own.wanted.as_ref()?),
        (None, Some((other, sharer))) => (other, &sharer.wanted),
        (None, None) => return None,
    };
    // Only agents of its cluster get this check, so the UID of the Service suffices as its identifier.
    let record = Record::new(key.1.clone(), String::new(), object.service.clone());
    health::target(&record, wanted, family(object, wanted)?)
}

/// Returns the family of the address or, if there is none yet, the preferred one.
fn family(object: &Object, wanted: &Wanted) -> Option<Family> {
    match object.address() {
        Address::Has(address, _) => Some(Family::of(address)),
        Address::Dhcp | Address::None(_) => wanted.families.first().copied(),
    }
}

/// Returns a generation that is later than `before` and those of earlier runs.
fn next_generation(before: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    now.saturating_mul(A_SECOND).max(before.saturating_add(1))
}

impl Guests {
    /// Gives the agents the present checks, with a new generation, if they have changed.
    fn give(&self) {
        let targets: Vec<_> = self.probes.targets.values().cloned().collect();
        self.checks.send_if_modified(|checks| {
            if checks.targets == targets {
                return false;
            }
            let generation = next_generation(checks.generation);
            *checks = Arc::new(Checks { generation, report_seconds: REPORT, targets });
            true
        });
    }

    /// Adds healthy and failing nodes to the description of a load balancer for its cluster.
    pub(super) fn add_nodes(&self, service: &str, told: &mut v1::LoadBalancer) {
        if told.state() == v1::load_balancer::State::Ready
            && let Some((healthy, failing)) = self.probes.judge(service, self.instances.all())
        {
            (told.healthy, told.failing) = (healthy, failing);
        }
    }

    /// Returns the UIDs of the Services that have health checks.
    pub(super) fn checked(&self) -> impl Iterator<Item = &String> {
        self.probes.targets.keys()
    }
}

impl Registry {
    /// Updates the checks of these load balancers, and gives them to the agents.
    pub(super) fn follow_checks(&mut self, about: &BTreeSet<Key>) {
        let mut changed = BTreeSet::new();
        for key in about {
            let now = target(&self.balancers, key);
            let is_asked_for = self.balancers.asked.contains_key(key);
            let Probes { targets, backends, .. } = &mut self.cluster(&key.0).probes;
            if now.is_none() && !is_asked_for {
                backends.remove(&key.1);
            }
            if targets.get(&key.1) == now.as_ref() {
                continue;
            }
            match now {
                Some(now) => drop(targets.insert(key.1.clone(), now)),
                None => drop(targets.remove(&key.1)),
            }
            changed.insert(key.0.clone());
        }
        for cluster in changed {
            self.cluster(&cluster).give();
        }
    }

    /// Takes in a report of an agent. Only the agent's own VM is affected, whatever the report contains.
    pub(super) fn reported(&mut self, asker: &Asker, generation: u64, results: Vec<v1::HealthCheckResult>) {
        let is_member = self.members.name(&asker.cluster, &asker.uid).is_some();
        let of = self.cluster(&asker.cluster);
        if !is_member || generation < of.checks.borrow().generation {
            return;
        }
        let (at, outcomes) = (Instant::now(), outcomes(results, text::clean));
        let before = of.probes.reports.get(&asker.uid);
        let is_news = before.is_none_or(|before| {
            before.outcomes != outcomes || at.saturating_duration_since(before.at) >= STALE
        });
        of.probes.reports.insert(asker.uid.clone(), Reported { at, generation, outcomes });
        if is_news {
            self.show_checked(&asker.cluster.clone());
        }
    }

    /// Publishes the load balancers of a cluster that have health checks.
    pub(super) fn show_checked(&mut self, cluster: &str) {
        let checked = self.cluster(cluster).checked();
        let keys = checked.map(|uid| (cluster.to_owned(), uid.clone())).collect();
        self.show(keys);
    }

    /// Updates the published load balancers that have checks, so that reports which have become stale show.
    pub(super) fn look_at_reports(&mut self) {
        let checked = |cluster: &&String| self.clusters[*cluster].checked().next().is_some();
        let clusters: Vec<_> = self.clusters.keys().filter(checked).cloned().collect();
        for cluster in clusters {
            self.show_checked(&cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(uid: &str, power: Power) -> v1::Instance {
        let mut one = v1::Instance {
            vm_uid: uid.into(),
            name: format!("ns/{uid}"),
            node_name: uid.into(),
            ..v1::Instance::default()
        };
        one.set_power(power);
        one
    }

    #[tokio::test(start_paused = true)]
    async fn only_nodes_whose_agents_say_so_pass() {
        let mut probes = Probes::default();
        let all = [
            instance("good", Power::Running),
            instance("bad", Power::Running),
            instance("mute", Power::Running),
            instance("paused", Power::Paused),
            instance("off", Power::Stopped),
            v1::Instance { node_name: String::new(), ..instance("none", Power::Running) },
        ];
        probes.set_backends("u", Vec::new());
        assert_eq!(probes.judge("u", all.iter()), None, "nothing is to be checked");
        let target = v1::HealthCheckTarget { id: "c".into(), ..v1::HealthCheckTarget::default() };
        probes.targets.insert("u".into(), target.clone());
        probes.targets.insert("other".into(), target);
        assert_eq!(probes.judge("other", all.iter()), None, "it is not known where its traffic goes");
        for (uid, healthy, problem) in [("good", true, ""), ("bad", false, "refused"), ("paused", true, "")] {
            let result = v1::HealthCheckResult { id: "c".into(), healthy, problem: problem.into() };
            let outcomes = outcomes(vec![result], str::to_owned);
            probes.reports.insert(uid.into(), Reported { at: Instant::now(), generation: 1, outcomes });
        }
        let told = |probes: &Probes| {
            let (healthy, failing) = probes.judge("u", all.iter()).unwrap();
            let words = failing.iter().map(|one| format!("{} {}", one.vm_name, one.problem));
            (healthy, words.collect::<Vec<_>>().join("; "))
        };
        let mute = "ns/mute its agent has not reported the result of the health check yet; ns/paused the VM is paused";
        assert_eq!(told(&probes), (1, format!("ns/bad refused; {mute}")));
        // VMs that take no traffic are ignored, such as a Node that is excluded from load balancers.
        probes.set_backends("u", vec!["good".into(), "paused".into()]);
        assert_eq!(told(&probes), (1, "ns/paused the VM is paused".to_owned()));
        probes.set_backends("u", vec!["bad".into()]);
        assert_eq!(told(&probes), (0, "ns/bad refused".to_owned()));
        probes.set_backends("u", Vec::new());
        probes.forget("good");
        assert_eq!(told(&probes).0, 0);
        tokio::time::advance(STALE).await;
        assert!(told(&probes).1.contains("ns/bad its agent no longer reports results"));
    }

    #[test]
    fn generations_grow_also_from_one_run_to_the_next() {
        let first = next_generation(0);
        assert!(first > 1 << 40);
        assert_eq!(next_generation(u64::MAX - 1), u64::MAX);
        assert!(next_generation(first + 5) > first + 5);
    }
}
