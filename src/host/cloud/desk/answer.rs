//! Answers requests to the desk.

use super::super::health::{Outcome, Reported, outcomes};
use super::super::settings::Pool;
use super::super::wanted::Family;
use super::super::{Asker, Found, Poll, Problem, Request};
use super::Desk;
use crate::host::cloud::endpoints::Key;
use crate::host::text;
use crate::wire::proto::v1;

impl Desk {
    pub(super) async fn take(&mut self, request: Request) {
        // The receiver of a reply may have been dropped, so errors of sending are ignored.
        match request {
            Request::Ensure(asker, service, wanted, reply) => {
                let done = self.ensure(&asker, service, *wanted).await;
                drop(reply.send(done));
            }
            Request::Release(asker, service, reply) => {
                let done = match self.admit(&asker) {
                    Ok(()) => self.release(&asker.cluster, &service.uid).await.map(|_| true),
                    Err(problem) => Err(problem),
                };
                drop(reply.send(done));
            }
            Request::List(asker, reply) => drop(reply.send(self.list(&asker).await)),
            Request::Balancers(asker, position, reply) => {
                let poll = match self.ready(&asker).await {
                    Ok(()) => {
                        let journal = &self.cluster(&asker.cluster).balancers;
                        Ok(journal
                            .since(&position)
                            .map_or_else(|| Poll::Wait(journal.subscribe()), Poll::News))
                    }
                    Err(problem) => Err(problem),
                };
                drop(reply.send(poll));
            }
            Request::Instances(asker, position, reply) => {
                let journal = &self.cluster(&asker.cluster).instances;
                let poll =
                    journal.since(&position).map_or_else(|| Poll::Wait(journal.subscribe()), Poll::News);
                drop(reply.send(Ok(poll)));
            }
            Request::Instance(asker, uid, reply) => {
                let found = match self.cluster(&asker.cluster).instances.get(&uid).cloned() {
                    Some(instance) => Found::There(Box::new(instance)),
                    // A missing table does not prove that the VM no longer exists: it may be on another host by now.
                    None => {
                        Found::Unknown("this cluster has no such VM in the settings of this host".to_owned())
                    }
                };
                drop(reply.send(Ok(found)));
            }
            Request::Checks(cluster, reply) => drop(reply.send(self.cluster(&cluster).checks.subscribe())),
            Request::Reported(asker, generation, results) => {
                self.reported(&asker, generation, results, false);
            }
            Request::Checked(asker, generation, results) => {
                self.reported(&asker, generation, results, true);
            }
            Request::Endpoint(key, outcome) => self.endpoint(key, &outcome),
            Request::AllBalancers(reply) => drop(reply.send(self.all_balancers())),
            Request::AllPools(reply) => drop(reply.send(self.all_pools())),
            Request::Remove(cluster, uid, reply) => {
                let done = match self.release(&cluster, &uid).await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Problem::NotFound(format!(
                        "the cluster {cluster} has no load balancer of a Service {uid}"
                    ))),
                    Err(problem) => Err(problem),
                };
                drop(reply.send(done));
            }
        }
    }

    /// Checks that the VM may request load balancers and that the records of the host can be read.
    async fn ready(&mut self, asker: &Asker) -> Result<(), Problem> {
        self.admit(asker)?;
        self.store().await.map(drop)
    }

    async fn list(&mut self, asker: &Asker) -> Result<Vec<v1::LoadBalancer>, Problem> {
        self.ready(asker).await?;
        Ok(self.cluster(&asker.cluster).balancers.all().cloned().collect())
    }

    /// Takes in the results of an agent's checks, which it sends unasked or, if `is_answer`, as the answer to new
    /// checks. Only the agent's own VM is affected, whatever the report contains.
    fn reported(
        &mut self,
        asker: &Asker,
        generation: u64,
        results: Vec<v1::HealthCheckResult>,
        is_answer: bool,
    ) {
        let of = self.cluster(&asker.cluster);
        let is_old = generation < of.checks.borrow().generation;
        let is_member = of.members.contains_key(&asker.uid);
        // The answer to new checks may arrive after a report on them, which is newer.
        let known = of.heard.reports.get(&asker.uid);
        let is_late = is_answer && known.is_some_and(|known| known.generation >= generation);
        if is_old || is_late || !is_member {
            return;
        }
        let outcomes = outcomes(results, text::clean);
        let at = tokio::time::Instant::now();
        let before = of.heard.reports.insert(asker.uid.clone(), Reported { at, generation, outcomes });
        let now = of.heard.reports.get(&asker.uid).map(|now| &now.outcomes);
        let was_stale = before
            .as_ref()
            .is_none_or(|before| at.saturating_duration_since(before.at) >= super::super::health::STALE);
        if was_stale || before.as_ref().map(|before| &before.outcomes) != now {
            self.unsettle(&asker.cluster);
        }
    }

    fn endpoint(&mut self, key: Key, outcome: &Outcome) {
        let Some(cluster) = self.book.get(&key.0).map(|record| record.cluster.clone()) else { return };
        let of = self.cluster(&cluster);
        if of.heard.endpoints.insert(key, outcome.clone()).as_ref() != Some(outcome) {
            self.unsettle(&cluster);
        }
    }

    fn all_balancers(&self) -> Vec<v1::ClusterLoadBalancer> {
        let mut all = Vec::new();
        for (name, cluster) in &self.clusters {
            for told in cluster.balancers.all() {
                let id = told.name.strip_prefix("lb-").unwrap_or_default();
                let met = self.book.get(id).and_then(|record| record.met.as_ref().or(record.asked.as_ref()));
                let ports = met.map(|met| {
                    let word = |protocol: &str| protocol.to_ascii_uppercase();
                    met.ports
                        .iter()
                        .map(|port| format!("{}/{}", port.port, word(port.protocol.name())))
                        .collect()
                });
                all.push(v1::ClusterLoadBalancer {
                    cluster: name.clone(),
                    load_balancer: Some(told.clone()),
                    ports: ports.unwrap_or_default(),
                    orphan: cluster.members.is_empty(),
                });
            }
        }
        all
    }

    fn all_pools(&self) -> v1::ListAddressPoolsResponse {
        let pool = |pool: &Pool| {
            let size = pool.size(true).saturating_add(pool.size(false));
            let taken = self.book.taken(pool, Family::Ipv4) + self.book.taken(pool, Family::Ipv6);
            v1::AddressPool {
                name: pool.name.clone(),
                ranges: pool.ranges.iter().map(ToString::to_string).collect(),
                network: pool.network.clone().unwrap_or_default(),
                clusters: pool.clusters.iter().flatten().map(ToString::to_string).collect(),
                size: u64::try_from(size).unwrap_or(u64::MAX),
                taken: u64::try_from(taken).unwrap_or(u64::MAX),
                forward_to: pool.forward_to.iter().map(ToString::to_string).collect(),
                interface: pool.interface.clone().unwrap_or_default(),
            }
        };
        let mut problems = Vec::new();
        if let Some(Err(problem)) = &self.store {
            problems.push(problem.clone());
        }
        for (id, damaged) in self.book.damaged() {
            let file = self.parts.state_dir.join(format!("{id}.json"));
            let what = match damaged.addresses {
                Some(_) => "its addresses stay reserved",
                None => "no address is assigned as long as it exists",
            };
            problems.push(format!(
                "the record {} cannot be used: {}; {what}",
                file.display(),
                damaged.problem
            ));
        }
        if let Some(problem) = &self.parts.in_force.borrow().problem {
            problems.push(format!("the host cannot forward: {problem}"));
        }
        v1::ListAddressPoolsResponse { pools: self.settings.pools.iter().map(pool).collect(), problems }
    }
}
