//! Decides which nodes take the traffic of a load balancer, and why others do not. Pure.
//!
//! ```text
//!  a VM that is a backend
//!    stopped                                                                   ──▶ left out
//!    paused, or its agent does not answer                                      ──▶ failing
//!    a check is requested: the agent cannot run it, or has not reported success ──▶ failing
//!    only nodes with endpoints: it has not confirmed that it has some          ──▶ failing
//!    the host forwards, but sees the VM at none of its addresses (`reach`)     ──▶ failing
//!    otherwise                                                                 ──▶ healthy
//! ```
//!
//! Reports of a guest affect only its own VM.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::instance::Member;
use super::reach::Ground;
use super::record::Record;
use super::settings::Pool;
use super::wanted::{Announcing, Family, Wanted};
use crate::addresses::Subnet;
use crate::wire::proto::v1::{self, instance::Power};

/// Seconds between two reports of an agent, if nothing changes.
pub const REPORT: u32 = 20;
/// Age from which a report no longer counts.
pub const STALE: Duration = Duration::from_secs(45);
/// Checks that one agent makes at most.
pub const MOST_CHECKS: usize = 256;
/// Failing backends that are reported at most for one load balancer.
pub const MOST_PROBLEMS: usize = 64;
/// Characters that are kept of a problem that a guest reports.
const LONGEST_PROBLEM: usize = 256;

/// Result of one check of one VM, as last reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// True if the VM counts as healthy.
    pub healthy: bool,
    /// Reason why it is not healthy; may be empty.
    pub problem: String,
}

/// Latest report of an agent on its health checks.
#[derive(Debug, Clone)]
pub struct Reported {
    /// Time at which the report arrived.
    pub at: Instant,
    /// Generation of the set of checks that the report is about.
    pub generation: u64,
    /// Results by the identifiers of the checks.
    pub outcomes: BTreeMap<String, Outcome>,
}

/// Reports on the VMs of a cluster.
#[derive(Debug, Default)]
pub struct Heard {
    /// Reports of the agents, by the lasting identifiers of their VMs.
    pub reports: BTreeMap<String, Reported>,
    /// Nodes that have endpoints and nodes that do not, by load balancer and lasting identifier of the VM.
    pub endpoints: BTreeMap<(String, String), Outcome>,
}

/// Decision about the nodes of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Addresses at which the host reaches healthy nodes, sorted and without duplicates, with the subnet of each.
    pub targets: Vec<(IpAddr, Subnet)>,
    /// Number of nodes that take traffic.
    pub healthy: u32,
    /// Nodes that take no traffic, each with the reason; at most `MOST_PROBLEMS`.
    pub failing: Vec<v1::BackendProblem>,
    /// True if some failing node is only waiting for the next result of a check.
    pub may_pass: bool,
}

/// Returns the identifier of a load balancer's check, as agents know it. It contains all fields of the check, so
/// that a changed check never inherits the results of the one before.
fn check_id(record: &Record, wanted: &Wanted, family: Family) -> Option<String> {
    let check = wanted.check.as_ref()?;
    Some(format!(
        "{}.{}.{}.{}.{}.{}.{}",
        record.id,
        family.name(),
        check.node_port,
        check.success_threshold,
        check.failure_threshold,
        check.period_seconds,
        check.timeout_seconds
    ))
}

/// Returns the check that agents make for a load balancer, or `None` if none is requested.
pub fn target(record: &Record, wanted: &Wanted, family: Family) -> Option<v1::HealthCheckTarget> {
    let check = wanted.check?;
    let mut target = v1::HealthCheckTarget {
        id: check_id(record, wanted, family)?,
        port: check.node_port.into(),
        success_threshold: check.success_threshold,
        failure_threshold: check.failure_threshold,
        period_seconds: check.period_seconds,
        timeout_seconds: check.timeout_seconds,
        ..v1::HealthCheckTarget::default()
    };
    target.set_family(if family.is_ipv4() { v1::IpFamily::Ipv4 } else { v1::IpFamily::Ipv6 });
    Some(target)
}

/// Cleans and bounds the results that an agent reports.
pub fn outcomes(
    results: Vec<v1::HealthCheckResult>,
    clean: impl Fn(&str) -> String,
) -> BTreeMap<String, Outcome> {
    let outcome = |result: v1::HealthCheckResult| {
        let problem = clean(&result.problem).chars().take(LONGEST_PROBLEM).collect();
        (result.id, Outcome { healthy: result.healthy, problem })
    };
    results.into_iter().take(MOST_CHECKS).map(outcome).collect()
}

/// Input of the decision about the nodes of one load balancer.
#[derive(Debug, Clone, Copy)]
pub struct Question<'q> {
    /// Record of the load balancer.
    pub record: &'q Record,
    /// Configuration that is in force for it.
    pub met: &'q Wanted,
    /// Families of its addresses; the first one is checked.
    pub families: &'q [Family],
    /// Pools of its addresses.
    pub pools: &'q [&'q Pool],
    /// Reports on the VMs of its cluster.
    pub heard: &'q Heard,
    /// Neighbour table of the host, and where the host may forward to.
    pub ground: Ground<'q>,
    /// Current time, which decides whether a report is stale.
    pub now: Instant,
}

impl Nodes {
    fn fails(&mut self, member: &Member, problem: String) {
        if self.failing.len() < MOST_PROBLEMS {
            let v1::Instance { vm_uid, name: vm_name, .. } = member.instance.clone();
            self.failing.push(v1::BackendProblem { vm_uid, vm_name, problem });
        }
    }
}

impl Question<'_> {
    /// Decides which of these VMs, which all belong to the cluster, take the traffic.
    pub fn nodes<'m>(&self, members: impl Iterator<Item = &'m Member>) -> Nodes {
        let check = self.families.first().and_then(|family| check_id(self.record, self.met, *family));
        let mut nodes = Nodes::default();
        for member in members.filter(|member| self.is_backend(member)) {
            match self.judge(member, check.as_deref()) {
                Verdict::Healthy(targets) => {
                    nodes.healthy = nodes.healthy.saturating_add(1);
                    nodes.targets.extend(targets);
                }
                Verdict::Failing(problem) => nodes.fails(member, problem),
                Verdict::Unchecked(problem) => {
                    nodes.may_pass = true;
                    nodes.fails(member, problem);
                }
                Verdict::Out => {}
            }
        }
        nodes.targets.sort_unstable();
        nodes.targets.dedup_by_key(|(address, _)| *address);
        nodes
    }

    /// Reports whether a VM is a backend of the load balancer, healthy or not.
    pub fn is_backend(&self, member: &Member) -> bool {
        is_backend(&self.met.backends, &member.instance)
    }

    fn judge(&self, member: &Member, check: Option<&str>) -> Verdict {
        let failing = |problem: &str| Verdict::Failing(problem.to_owned());
        match member.power() {
            Power::Stopped => return Verdict::Out,
            Power::Paused => return failing("the VM is paused"),
            Power::Running | Power::Unknown => {}
        }
        if !member.connected {
            return failing("the agent does not answer");
        }
        if check.is_some() && !member.able {
            return failing("its agent is too old to make health checks; upgrade it");
        }
        if let Some(Err(problem)) = check.map(|check| self.checked(member, check)) {
            return Verdict::Unchecked(problem);
        }
        if self.met.announcing != Announcing::Host {
            return Verdict::Healthy(Vec::new());
        }
        // `Unchecked`, not `Failing`: the host may see the VM at its address a moment later.
        let reached = match self.ground.reached(member, self.families, self.pools) {
            Ok(reached) => reached,
            Err(problem) => return Verdict::Unchecked(problem),
        };
        if self.met.local {
            let key = (self.record.id.clone(), member.instance.vm_uid.clone());
            match self.heard.endpoints.get(&key) {
                Some(Outcome { healthy: true, .. }) => {}
                Some(Outcome { problem, .. }) => return failing(problem),
                None => {
                    let words = "its endpoints have not been checked yet";
                    return Verdict::Unchecked(words.to_owned());
                }
            }
        }
        Verdict::Healthy(reached)
    }

    /// Checks that the agent has recently reported success of this check.
    fn checked(&self, member: &Member, check: &str) -> Result<(), String> {
        passes(self.heard.reports.get(&member.instance.vm_uid), check, self.now, STALE)
    }
}

/// Reports whether a VM is a backend: it is one of the `named` VMs or, if none are named, a Node of its cluster.
pub fn is_backend(named: &[String], instance: &v1::Instance) -> bool {
    match named {
        [] => !instance.node_name.is_empty(),
        named => named.contains(&instance.vm_uid),
    }
}

/// Checks that an agent has reported success of a check less than `stale` ago.
///
/// # Errors
/// The reason, as a message for people, if it has not.
pub fn passes(reported: Option<&Reported>, check: &str, now: Instant, stale: Duration) -> Result<(), String> {
    let Some(outcome) = reported.and_then(|reported| reported.outcomes.get(check)) else {
        return Err("its agent has not reported the result of the health check yet".to_owned());
    };
    if reported.is_some_and(|reported| now.saturating_duration_since(reported.at) >= stale) {
        return Err("its agent no longer reports results of health checks".to_owned());
    }
    match outcome {
        Outcome { healthy: true, .. } => Ok(()),
        Outcome { problem, .. } if problem.is_empty() => Err("the health check fails".to_owned()),
        Outcome { problem, .. } => Err(problem.clone()),
    }
}

enum Verdict {
    /// Stopped: takes no traffic, which is not a problem.
    Out,
    /// Takes traffic at these addresses.
    Healthy(Vec<(IpAddr, Subnet)>),
    /// Takes no traffic, for this reason.
    Failing(String),
    /// Takes no traffic until a check passes; the reason why none has passed yet.
    Unchecked(String),
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::instance::tests::{known, vm};
    use super::super::settings::{Settings, tests::pool};
    use super::super::wanted::{Check, Service, tests::request};
    use super::*;
    use crate::sys::neighbours::Seen;
    use crate::wire::proto::v1::{PowerState, SessionState};

    const HARDWARE: &str = "52:54:00:00:00:01";

    fn member(uid: &str, address: &str, change: impl FnOnce(&mut v1::VirtualMachine)) -> Member {
        let mut known = known(&vm(uid), &[address], uid);
        change(Arc::make_mut(&mut known.view));
        Member::of(&known, Some(&[(HARDWARE.to_owned(), "lan".to_owned())].into())).unwrap()
    }

    fn balancer() -> (Record, Wanted) {
        let mut asked = request("web", "u");
        asked.announcing = v1::Announcing::Host.into();
        let wanted = Wanted::read(asked).unwrap().1;
        let service = Service { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        (Record::new("lb".into(), "dev".into(), service), wanted)
    }

    fn ask(record: &Record, met: &Wanted, heard: &Heard, members: &[Member], now: Instant) -> Nodes {
        let nat =
            Pool { forward_to: vec![Subnet::parse("10.0.0.0/24").unwrap()], ..pool("nat", &["192.0.2.1"]) };
        let settings = Settings { pools: vec![nat], ..Settings::default() };
        let (families, pools) = ([Family::Ipv4], [&settings.pools[0]]);
        let addresses = members.iter().flat_map(Member::addresses);
        let neighbours = addresses.map(|(address, _)| (address, Seen::At(HARDWARE.into()))).collect();
        let ground = Ground { settings: &settings, neighbours: &neighbours };
        Question { record, met, families: &families, pools: &pools, heard, ground, now }.nodes(members.iter())
    }

    fn problems(nodes: &Nodes) -> Vec<(&str, &str)> {
        nodes.failing.iter().map(|one| (one.vm_uid.as_str(), one.problem.as_str())).collect()
    }

    #[test]
    fn only_who_runs_answers_and_can_be_reached_takes_traffic() {
        let (record, met) = balancer();
        let good = |_: &mut v1::VirtualMachine| {};
        let members = [
            member("good", "10.0.0.7/24", good),
            member("off", "10.0.0.8/24", |view| view.set_power(PowerState::Off)),
            member("paused", "10.0.0.9/24", |view| view.set_power(PowerState::Paused)),
            member("lost", "10.0.0.10/24", |view| view.set_session(SessionState::Connecting)),
            // Its guest claims an address outside the subnets that the host forwards to.
            member("liar", "198.51.100.1/8", good),
            member("", "10.0.0.11/24", good),
        ];
        let nodes = ask(&record, &met, &Heard::default(), &members, Instant::now());
        let good = ("10.0.0.7".parse().unwrap(), Subnet::parse("10.0.0.0/24").unwrap());
        assert_eq!((nodes.healthy, &nodes.targets), (1, &vec![good]));
        let failing = [
            ("paused", "the VM is paused"),
            ("lost", "the agent does not answer"),
            ("liar", "it has no address in a subnet that the host may forward to"),
        ];
        assert_eq!(problems(&nodes), failing, "and the last one is not a Node");
        // Named backends count, whether or not they are Nodes.
        let named = Wanted { backends: vec!["lost".into(), String::new()], ..met };
        let nodes = ask(&record, &named, &Heard::default(), &members, Instant::now());
        assert_eq!((nodes.healthy, nodes.failing.len()), (1, 1));
    }

    #[test]
    fn a_check_passes_only_as_long_as_the_agent_tells_so() {
        let (record, met) = balancer();
        let check = Check {
            node_port: 1,
            success_threshold: 1,
            failure_threshold: 1,
            period_seconds: 5,
            timeout_seconds: 1,
        };
        let met = Wanted { check: Some(check), ..met };
        let id = check_id(&record, &met, Family::Ipv4).unwrap();
        let other = check_id(
            &record,
            &Wanted { check: Some(Check { node_port: 2, ..check }), ..met.clone() },
            Family::Ipv4,
        );
        assert_ne!(Some(&id), other.as_ref(), "a check with other fields is another one");
        let old = |view: &mut v1::VirtualMachine| view.guest = Some(v1::GuestInfo::default());
        let members = [member("a", "10.0.0.7/24", |_| {}), member("b", "10.0.0.8/24", old)];
        let now = Instant::now();
        let told = |healthy: bool, problem: &str, at: Instant| {
            let outcomes = [(id.clone(), Outcome { healthy, problem: problem.into() })].into();
            Heard {
                reports: [("a".to_owned(), Reported { at, generation: 1, outcomes })].into(),
                ..Heard::default()
            }
        };
        for (heard, now, expected) in [
            (Heard::default(), now, "its agent has not reported the result of the health check yet"),
            (told(false, "connection refused", now), now, "connection refused"),
            (told(false, "", now), now, "the health check fails"),
            (told(true, "", now), now + STALE, "its agent no longer reports results of health checks"),
        ] {
            let nodes = ask(&record, &met, &heard, &members, now);
            let old = ("b", "its agent is too old to make health checks; upgrade it");
            assert_eq!((nodes.healthy, problems(&nodes)), (0, vec![("a", expected), old]));
            assert!(nodes.may_pass);
        }
        let nodes = ask(&record, &met, &told(true, "", now), &members, now);
        assert_eq!((nodes.healthy, nodes.may_pass), (1, false), "the old one never will");
    }

    #[test]
    fn with_local_traffic_only_nodes_with_endpoints_take_it() {
        let (record, met) = balancer();
        let met = Wanted { local: true, local_port: 30000, ..met };
        let members = [member("a", "10.0.0.7/24", |_| {}), member("b", "10.0.0.8/24", |_| {})];
        let mut heard = Heard::default();
        assert_eq!(ask(&record, &met, &heard, &members, Instant::now()).healthy, 0);
        let key = |uid: &str| ("lb".to_owned(), uid.to_owned());
        heard.endpoints.insert(key("a"), Outcome { healthy: true, problem: String::new() });
        heard.endpoints.insert(key("b"), Outcome { healthy: false, problem: "none".into() });
        let nodes = ask(&record, &met, &heard, &members, Instant::now());
        assert_eq!((nodes.healthy, problems(&nodes)), (1, vec![("b", "none")]));
    }
}
