//! Derives from the known state what others need: views for long polls, checks for agents, and a plan for the
//! kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::time::Instant;

use super::super::endpoints::Target;
use super::super::forward::Numbered;
use super::super::forward::plan::{Forwarded, Given, Interface, Plan};
use super::super::health::{self, Nodes, Question, REPORT};
use super::super::journal::Journal;
use super::super::meet::{Failure, reserved};
use super::super::reach::Ground;
use super::super::record::{Held, Record};
use super::super::settings::Pool;
use super::super::view::{Told, event, families};
use super::super::wanted::{Announcing, Family, LOWEST_NODE_PORT, Port, Wanted};
use super::{Cluster, Desk, GRACE};
use crate::addresses::Subnet;
use crate::host::for_guests::Checks;
use crate::host::metrics::balancers::Counts;
use crate::wire::proto::v1;
use crate::wire::proto::v1::instance::Power;
use crate::wire::proto::v1::load_balancer::State;
use crate::wire::proto::v1::virtual_machine_event::Kind;

impl Desk {
    /// Settles all clusters that have changed.
    pub(super) async fn settle(&mut self) {
        self.settle_at = None;
        for cluster in std::mem::take(&mut self.unsettled) {
            let ids: Vec<_> = self.book.of_cluster(&cluster).map(|record| record.id.clone()).collect();
            let (mut forwarded, mut targets, mut may_pass) = (Vec::new(), Vec::new(), false);
            for id in &ids {
                let Some(nodes) = self.show(&cluster, id) else { continue };
                let Some(record) = self.book.get(id) else { continue };
                let of_it = self.forwarded(record, &nodes);
                may_pass |= nodes.may_pass && !of_it.is_empty();
                let has_nodes =
                    |all: &[Forwarded]| all.iter().any(|one| one.id == *id && !one.targets.is_empty());
                let was_served = self.clusters.get(&cluster).is_some_and(|of| has_nodes(&of.forwarded));
                if has_nodes(&of_it) && !was_served {
                    self.first_nodes.insert(id.clone(), None);
                }
                forwarded.extend(of_it);
                targets.extend(self.targets(&cluster, record));
            }
            let checks = self.wanted_checks(&cluster);
            let of = self.cluster(&cluster);
            of.heard.endpoints.retain(|key, _| targets.iter().any(|target: &Target| target.key == *key));
            (of.forwarded, of.targets, of.may_pass) = (forwarded, targets, may_pass);
            of.counts = counts(&of.balancers);
            of.balancers.tell();
            of.give(checks);
        }
        let mut all = Counts::default();
        for cluster in self.clusters.values() {
            all.iter_mut().zip(cluster.counts).for_each(|(sum, count)| *sum += count);
        }
        self.parts.half.metrics.balancers.set(all);
        for event in std::mem::take(&mut self.events) {
            // Fails only if the fleet has ended: then nobody watches.
            self.parts.fleet.note(String::new(), Kind::LoadBalancerChanged(event)).await.ok();
        }
        self.plan().await;
    }

    /// Updates the published view of one load balancer, and returns its nodes.
    pub(super) fn show(&mut self, cluster: &str, id: &str) -> Option<Nodes> {
        self.cluster(cluster);
        let of = self.clusters.get(cluster)?;
        let record = self.book.get(id)?;
        let nodes = self.nodes(of, record);
        let failure = self.failure(record);
        let told = Told {
            book: &self.book,
            settings: &self.settings,
            record,
            nodes: &nodes,
            failure: failure.as_ref(),
            is_awaited: self.awaited.contains_key(id),
        };
        let message = told.message();
        // Load balancers of an earlier run are not news.
        let before = of.balancers.get(id);
        if before.is_some() || !self.of_before.remove(id) {
            self.events.extend(event(cluster, before, Some(&message)));
        }
        self.cluster(cluster).balancers.set(id, message);
        Some(nodes)
    }

    fn failure(&self, record: &Record) -> Option<Failure> {
        if let Some(failure) = self.failures.get(&record.id) {
            return Some(failure.clone());
        }
        let met = record.met.as_ref()?;
        if let Some(primary) = self.book.shared_by(record)
            && primary.met.as_ref().is_some_and(|of| of.announcing != met.announcing)
        {
            let words = "the address that it shares is now announced by other means";
            return Some(Failure::new("AnnouncingDiffers", words));
        }
        let is_host = met.announcing == Announcing::Host;
        if is_host && !self.settings.forwards() {
            return Some(Failure::new("NoPool", "the host no longer has a pool that it forwards from"));
        }
        // The settings, or the address that it shares, may have changed since the request was granted.
        if let Some(Err(failure)) =
            self.pools_of(record).into_iter().map(|pool| reserved(pool, met)).find(Result::is_err)
        {
            return Some(failure);
        }
        let in_force = self.parts.in_force.borrow();
        let is_awaited = self.awaited.contains_key(&record.id) || self.first_nodes.contains_key(&record.id);
        if is_host && is_awaited && in_force.problem.is_some() {
            let words = "the host cannot forward now; its log says why";
            return Some(Failure::new("ForwardingFailed", words));
        }
        None
    }

    /// Returns the pools of a load balancer's addresses, which may be those of the one that it shares with.
    fn pools_of(&self, record: &Record) -> Vec<&Pool> {
        let of = self.book.shared_by(record).unwrap_or(record);
        of.addresses.iter().filter_map(|held| self.settings.pool(&held.pool)).collect()
    }

    fn ground(&self) -> Ground<'_> {
        Ground { settings: &self.settings, neighbours: &self.neighbours }
    }

    fn nodes(&self, cluster: &Cluster, record: &Record) -> Nodes {
        let Some(met) = &record.met else { return Nodes::default() };
        let (families, pools) = (families(&self.book, record), self.pools_of(record));
        let question = Question {
            record,
            met,
            families: &families,
            pools: &pools,
            heard: &cluster.heard,
            ground: self.ground(),
            now: Instant::now(),
        };
        question.nodes(cluster.members.values())
    }

    /// Returns the ports to forward for a load balancer; none if the host does not announce its address.
    fn forwarded(&self, record: &Record, nodes: &Nodes) -> Vec<Forwarded> {
        let Some(met) = record.met.as_ref().filter(|met| met.announcing == Announcing::Host) else {
            return Vec::new();
        };
        let primary = self.book.shared_by(record);
        // An address has one announcer at a time: the one that its owner requests. Sharers have to follow.
        if primary.is_some_and(|of| of.met.as_ref().is_none_or(|met| met.announcing != Announcing::Host)) {
            return Vec::new();
        }
        let families = families(&self.book, record);
        let mut all = Vec::new();
        for Held { address, pool } in &primary.unwrap_or(record).addresses {
            let Some(pool) = self.settings.pool(pool).filter(|_| families.contains(&Family::of(*address)))
            else {
                continue;
            };
            let is_here = |(node, _): &&(IpAddr, Subnet)| {
                node.is_ipv4() == address.is_ipv4()
                    && pool.forward_to.iter().any(|subnet| subnet.contains(*node))
            };
            let targets: Vec<_> = nodes.targets.iter().filter(is_here).copied().collect();
            let is_open = |port: &&Port| {
                !pool.reserved_ports.contains(&port.port) && port.node_port >= LOWEST_NODE_PORT
            };
            all.extend(met.ports.iter().filter(is_open).map(|port| Forwarded {
                id: record.id.clone(),
                address: *address,
                protocol: port.protocol,
                port: port.port,
                node_port: port.node_port,
                targets: targets.clone(),
                sources: sources(met),
                sticks: met.affinity_seconds > 0,
            }));
        }
        all
    }

    /// Returns the nodes to be asked whether they have endpoints of a load balancer.
    fn targets(&self, cluster: &str, record: &Record) -> Vec<Target> {
        let Some(of) = self.clusters.get(cluster) else { return Vec::new() };
        let met = record.met.as_ref();
        let Some(met) = met.filter(|met| met.local && met.announcing == Announcing::Host) else {
            return Vec::new();
        };
        let (families, pools) = (families(&self.book, record), self.pools_of(record));
        let question = Question {
            record,
            met,
            families: &families,
            pools: &pools,
            heard: &of.heard,
            ground: self.ground(),
            now: Instant::now(),
        };
        let members = of.members.values().filter(|member| question.is_backend(member) && member.connected);
        let target = |member: &super::Member| {
            let (address, _) = self.ground().reached(member, &families, &pools).ok()?.into_iter().next()?;
            let (period, timeout, failures) = met.check.map_or((5, 3, 3), |check| {
                (check.period_seconds, check.timeout_seconds, check.failure_threshold)
            });
            Some(Target {
                key: (record.id.clone(), member.instance.vm_uid.clone()),
                cluster: cluster.to_owned(),
                at: SocketAddr::new(address, met.local_port),
                period_seconds: period,
                timeout_seconds: timeout,
                failure_threshold: failures,
            })
        };
        members.filter_map(target).collect()
    }

    /// Returns the health checks that the agents of a cluster are to make.
    fn wanted_checks(&self, cluster: &str) -> Vec<v1::HealthCheckTarget> {
        let check = |record: &Record| {
            let met = record.met.as_ref()?;
            health::target(record, met, families(&self.book, record).into_iter().next()?)
        };
        self.book.of_cluster(cluster).filter_map(check).collect()
    }

    /// Publishes the addresses to look up in the neighbour table: those of all VMs in clusters for which something is
    /// forwarded.
    fn ask_for_neighbours(&self) {
        let forwards = |cluster: &&Cluster| !cluster.forwarded.is_empty();
        let members = self.clusters.values().filter(forwards).flat_map(|cluster| cluster.members.values());
        let ground = self.ground();
        let asked: BTreeSet<_> = members
            .filter(|member| member.connected)
            .flat_map(|member| ground.candidates(member))
            .map(|(address, _)| address)
            .collect();
        self.parts.candidates.send_if_modified(|before| std::mem::replace(before, asked.clone()) != asked);
    }

    /// Publishes the plan of what is to be forwarded, if it has changed.
    pub(super) async fn plan(&mut self) {
        self.ask_for_neighbours();
        let targets: Vec<_> =
            self.clusters.values().flat_map(|cluster| cluster.targets.iter().cloned()).collect();
        self.parts.targets.send_if_modified(|before| std::mem::replace(before, targets.clone()) != targets);
        // As long as the note of an earlier run has not been read, no address may be removed.
        let is_known = matches!(self.store, Some(Ok(_)));
        if !is_known || !self.settings.forwards() && self.marked.is_none() {
            return;
        }
        let mut services: Vec<_> =
            self.clusters.values().flat_map(|cluster| cluster.forwarded.iter().cloned()).collect();
        services.sort_by(|one, other| {
            (&one.id, one.address, one.protocol, one.port).cmp(&(
                &other.id,
                other.address,
                other.protocol,
                other.port,
            ))
        });
        let mut plan = Plan { interfaces: self.interfaces(&services), services, gone: Given::new() };
        let given = plan.given_to();
        for (name, addresses) in self.marked.iter().flatten() {
            let kept = given.get(name);
            let is_gone = |address: &&IpAddr| !kept.is_some_and(|kept| kept.contains(*address));
            let gone: BTreeSet<_> = addresses.iter().filter(is_gone).copied().collect();
            if !gone.is_empty() {
                plan.gone.insert(name.clone(), gone);
            }
        }
        if self.is_early(&plan) {
            return;
        }
        if (self.plan.number == 0 || *self.plan.plan != plan) && self.mark(&plan).await {
            self.plan = Numbered { number: self.plan.number + 1, plan: Arc::new(plan) };
            self.parts.plans.send_replace(self.plan.clone());
        }
        let number = self.plan.number;
        for awaited in self.awaited.values_mut().chain(self.first_nodes.values_mut()) {
            awaited.get_or_insert(number);
        }
        let in_force = self.parts.in_force.borrow().number;
        let done: Vec<_> = self
            .awaited
            .iter()
            .filter(|(_, at)| at.is_some_and(|at| at <= in_force))
            .map(|(id, _)| id.clone())
            .collect();
        for id in done {
            self.awaited.remove(&id);
            if let Some(cluster) = self.book.get(&id).map(|record| record.cluster.clone()) {
                self.unsettle(&cluster);
            }
        }
    }

    /// Reports whether the rules of an earlier run stay for now, since agents have not yet had time to connect or to
    /// check. At most for `GRACE` after the start.
    fn is_early(&self, plan: &Plan) -> bool {
        let forwards = |cluster: &&Cluster| !cluster.forwarded.is_empty();
        let mut members =
            self.clusters.values().filter(forwards).flat_map(|cluster| cluster.members.values());
        let is_missing = |member: &super::Member| {
            !member.connected && !matches!(member.power(), Power::Stopped | Power::Paused)
        };
        let is_incomplete = members.any(is_missing)
            || self.clusters.values().any(|cluster| cluster.may_pass)
            || plan.services.iter().any(|service| service.targets.is_empty());
        self.plan.number == 0 && self.marked.is_some() && is_incomplete && self.begun.elapsed() < GRACE
    }

    /// Returns the addresses that the interfaces of pools are to have: those from which a service is forwarded.
    fn interfaces(&self, services: &[Forwarded]) -> BTreeMap<String, Interface> {
        let mut interfaces: BTreeMap<String, Interface> = BTreeMap::new();
        for pool in &self.settings.pools {
            let Some(name) = &pool.interface else { continue };
            let interface = interfaces.entry(name.clone()).or_default();
            interface.ranges.extend(&pool.ranges);
            let used = services.iter().map(|service| service.address);
            interface.addresses.extend(used.filter(|address| pool.has(*address)));
        }
        interfaces
    }
}

/// Counts the load balancers of a cluster that are ready, pending and failed.
fn counts(balancers: &Journal<v1::LoadBalancer>) -> Counts {
    let of = |wanted: State| {
        let count = balancers.all().filter(|one| one.state() == wanted).count();
        u64::try_from(count).unwrap_or(u64::MAX)
    };
    [of(State::Ready), of(State::Pending), of(State::Failed)]
}

/// Returns the subnets that may send to a load balancer, or `None` if all may.
fn sources(met: &Wanted) -> Option<Vec<Subnet>> {
    if met.sources.is_empty() {
        return None;
    }
    // Sources were validated when they were parsed. A damaged one admits nobody.
    Some(met.sources.iter().filter_map(|text| Subnet::parse(text).ok()).collect())
}

impl Cluster {
    /// Gives the agents these checks, with a new generation, if they differ from the present ones.
    fn give(&self, targets: Vec<v1::HealthCheckTarget>) {
        self.checks.send_if_modified(|checks| {
            if checks.targets == targets {
                return false;
            }
            *checks = Arc::new(Checks { generation: checks.generation + 1, report_seconds: REPORT, targets });
            true
        });
    }
}
