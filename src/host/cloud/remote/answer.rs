//! Answers requests to the registry.

use std::collections::BTreeMap;

use super::super::wanted::Port;
use super::super::{Asker, Found, Poll, Problem, Reply, Request};
use super::balancers::{Key, Standing};
use super::queue::Job;
use super::{Done, Looked, Registry, object, pools};
use crate::wire::proto::v1;

impl Registry {
    pub(super) fn take(&mut self, request: Request) {
        // The receiver of a reply may have been dropped, so errors of sending are ignored.
        match request {
            Request::Instances(asker, position, reply) => {
                let poll = self.known().map(|()| {
                    let journal = &self.cluster(&asker.cluster).instances;
                    journal.since(&position).map_or_else(|| Poll::Wait(journal.subscribe()), Poll::News)
                });
                drop(reply.send(poll));
            }
            Request::Instance(asker, uid, reply) => match self.known() {
                Ok(()) => self.instance(asker, uid, reply),
                Err(problem) => drop(reply.send(Err(problem))),
            },
            Request::Ensure(asker, service, wanted, reply) => match self.admit(&asker) {
                Ok(()) => {
                    self.balancers.leaving.remove(&(asker.cluster.clone(), service.uid.clone()));
                    let backends = wanted.backends.clone();
                    let wanted = Box::new(object::kept(*wanted));
                    self.enqueue(
                        &asker.cluster,
                        Job::ensure(service, wanted, Some(reply)).checking(backends),
                    );
                }
                Err(problem) => drop(reply.send(Err(problem))),
            },
            Request::Release(asker, service, reply) => match self.admit(&asker) {
                Ok(()) => self.enqueue(&asker.cluster, Job::release(service, reply)),
                Err(problem) => drop(reply.send(Err(problem))),
            },
            Request::List(asker, reply) => match self.admit(&asker) {
                Ok(()) => self.list(asker.cluster, reply),
                Err(problem) => drop(reply.send(Err(problem))),
            },
            Request::Balancers(asker, position, reply) => {
                let poll = self.admit(&asker).map(|()| {
                    let journal = &self.cluster(&asker.cluster).balancers;
                    journal.since(&position).map_or_else(|| Poll::Wait(journal.subscribe()), Poll::News)
                });
                drop(reply.send(poll));
            }
            // Until all load balancers are known, the set of checks is not known either.
            Request::Checks(..) if !self.has_begun && self.balancers.standing != Standing::Missing => {}
            Request::Checks(cluster, reply) => drop(reply.send(self.cluster(&cluster).checks.subscribe())),
            Request::Reported(asker, generation, results) | Request::Checked(asker, generation, results) => {
                self.reported(&asker, generation, results);
            }
            // The controller forwards no traffic, so reports on endpoints do not matter.
            Request::Endpoint(..) => {}
            Request::AllBalancers(reply) => drop(reply.send(self.all_balancers())),
            Request::AllPools(reply) => drop(reply.send(self.all_pools())),
            Request::Remove(cluster, uid, reply) => match self.balancers.standing {
                Standing::There => self.enqueue(&cluster, Job::remove(uid, reply)),
                Standing::Unknown => drop(reply.send(Err(unknown()))),
                Standing::Missing => drop(reply.send(Err(Problem::Nothing(MISSING.to_owned())))),
            },
        }
    }

    /// Checks that all VMs of the host cluster have been listed.
    fn known(&self) -> Result<(), Problem> {
        if self.members.is_complete() {
            return Ok(());
        }
        let words = "the VMs of the host cluster have not all been read yet; repeat the call";
        Err(Problem::Unavailable(words.to_owned()))
    }

    /// Checks that a VM may request load balancers, and that all VMs and load balancers have been listed.
    fn admit(&self, asker: &Asker) -> Result<(), Problem> {
        self.settings.borrow().check_asker(&asker.cluster, &asker.vm).map_err(Problem::Denied)?;
        self.known()?;
        match self.balancers.standing {
            Standing::There => Ok(()),
            Standing::Unknown => Err(unknown()),
            Standing::Missing => Err(Problem::Nothing(MISSING.to_owned())),
        }
    }

    /// Describes all load balancers for people.
    fn all_balancers(&self) -> Vec<v1::ClusterLoadBalancer> {
        let told = |key: Key| {
            let load_balancer = self.message(&key)?;
            let (cluster, uid) = key;
            let wanted =
                self.balancers.keyed(&(cluster.clone(), uid.clone())).and_then(|own| own.wanted.as_ref());
            let shared = self.balancers.shared(&cluster, &uid).map(|(_, sharer)| &sharer.wanted);
            let ports = wanted.or(shared).map(|wanted| {
                let word =
                    |port: &Port| format!("{}/{}", port.port, port.protocol.name().to_ascii_uppercase());
                wanted.ports.iter().map(word).collect()
            });
            Some(v1::ClusterLoadBalancer {
                orphan: !self.members.has(&cluster),
                cluster,
                load_balancer: Some(load_balancer),
                ports: ports.unwrap_or_default(),
            })
        };
        self.balancers.keys(None).into_iter().filter_map(told).collect()
    }

    /// Describes the pools, and problems with them, for people.
    fn all_pools(&self) -> v1::ListAddressPoolsResponse {
        let problems = match self.balancers.standing {
            Standing::There => Vec::new(),
            Standing::Unknown => {
                vec!["the load balancers of the host cluster have not been read yet".to_owned()]
            }
            Standing::Missing => vec![MISSING.to_owned()],
        };
        let pools = self.balancers.pools.iter().flat_map(BTreeMap::values).map(pools::told).collect();
        v1::ListAddressPoolsResponse { pools, problems }
    }

    /// Asks the API server whether a VM exists, in any namespace, and answers the request later.
    fn instance(&mut self, asker: Asker, uid: String, reply: Reply<Result<Found, Problem>>) {
        let namespace = asker.cluster.split('/').next().unwrap_or_default().to_owned();
        let name = self.members.name(&asker.cluster, &uid).and_then(|name| name.split_once('/'));
        let name = name.map(|(_, name)| name.to_owned());
        let (lasting, done, cluster) = (self.lasting.clone(), self.done.clone(), asker.cluster);
        self.asking.children().spawn(async move {
            let facts = lasting.find(&namespace, name.as_deref(), &uid).await;
            // Fails only if the registry has ended: then the program is ending.
            drop(done.send(Done::Found(Box::new(Looked { cluster, uid, facts, reply }))).await);
        });
    }

    /// Answers the question whether a VM exists.
    pub(super) fn looked(&self, looked: Looked) {
        let Looked { cluster, uid, facts, reply } = looked;
        let found = match facts {
            Ok(None) => Ok(Found::Gone),
            Ok(Some(facts)) if facts.cluster == cluster => {
                Ok(Found::There(Box::new(self.members.instance(&facts))))
            }
            // This cluster may not learn anything else about a VM of another one.
            Ok(Some(_)) => {
                Ok(Found::Unknown("a VM with this identifier is not one of this cluster".to_owned()))
            }
            Err(why) => {
                tracing::warn!(cluster, uid, "cannot tell whether a VM exists: {why}");
                let words =
                    "the API of the host cluster cannot say now whether there is such a VM; repeat the call";
                Err(Problem::Unavailable(words.to_owned()))
            }
        };
        drop(reply.send(found));
    }
}

/// Message that explains why there are no load balancers, and what to do about it.
const MISSING: &str = "the host cluster gives no addresses to load balancers: it has no LoadBalancer \
     (loadbalancer.harvesterhci.io), which Harvester installs, or the controller lacks the permission for \
     it, which the manifests for Harvester grant; without them, run MetalLB or another implementation in the \
     guest cluster, with its own loadBalancerClass";

/// Returns the error for requests that arrive before all load balancers have been listed.
fn unknown() -> Problem {
    let words = "the load balancers of the host cluster have not all been read yet; repeat the call";
    Problem::Unavailable(words.to_owned())
}
