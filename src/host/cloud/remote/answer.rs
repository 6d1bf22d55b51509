//! Answers what the registry is asked.

use super::super::{Asker, Found, Poll, Problem, Reply, Request};
use super::{Done, Looked, Registry};
use crate::wire::proto::v1;

impl Registry {
    pub(super) fn take(&mut self, request: Request) {
        // Who asked may have gone.
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
            Request::Ensure(_, _, _, reply) => drop(reply.send(Err(none()))),
            Request::Release(_, _, reply) => drop(reply.send(Err(none()))),
            Request::List(_, reply) => drop(reply.send(Err(none()))),
            Request::Balancers(_, _, reply) => drop(reply.send(Err(none()))),
            Request::Checks(cluster, reply) => drop(reply.send(self.cluster(&cluster).checks.subscribe())),
            // Nobody was given anything to check.
            Request::Reported(..) | Request::Checked(..) | Request::Endpoint(..) => {}
            Request::AllBalancers(reply) => drop(reply.send(Vec::new())),
            Request::AllPools(reply) => drop(reply.send(v1::ListAddressPoolsResponse::default())),
            Request::Remove(_, _, reply) => drop(reply.send(Err(none()))),
        }
    }

    /// Whether it is known which VMs there are.
    fn known(&self) -> Result<(), Problem> {
        if self.members.is_complete() {
            return Ok(());
        }
        let words = "the API of the host cluster has not told of all its VMs yet; repeat the call";
        Err(Problem::Unavailable(words.to_owned()))
    }

    /// Whether there is a VM, as the API server says now. All VMs of a cluster are in one namespace of it, so that what is not there
    /// is gone.
    fn instance(&mut self, asker: Asker, uid: String, reply: Reply<Result<Found, Problem>>) {
        let namespace = asker.cluster.split('/').next().unwrap_or_default().to_owned();
        let name = self.members.name(&asker.cluster, &uid).and_then(|name| name.split_once('/'));
        let name = name.map(|(_, name)| name.to_owned());
        let (lasting, done, cluster) = (self.lasting.clone(), self.done.clone(), asker.cluster);
        self.asking.children().spawn(async move {
            let facts = lasting.find(&namespace, name.as_deref(), &uid).await;
            // Without a registry the program is ending.
            drop(done.send(Done::Found(Box::new(Looked { cluster, uid, facts, reply }))).await);
        });
    }

    /// Says what was found of a VM that was looked for.
    pub(super) fn looked(&self, looked: Looked) {
        let Looked { cluster, uid, facts, reply } = looked;
        let found = match facts {
            Ok(None) => Ok(Found::Gone),
            Ok(Some(facts)) if facts.cluster == cluster => {
                Ok(Found::There(Box::new(self.members.instance(&facts))))
            }
            // What it is now is nothing for this cluster to know.
            Ok(Some(_)) => {
                Ok(Found::Unknown("a VM with this identifier is not one of this cluster".to_owned()))
            }
            Err(why) => {
                tracing::warn!(cluster, uid, "it cannot be said whether a VM exists: {why}");
                let words =
                    "the API of the host cluster cannot say now whether there is such a VM; repeat the call";
                Err(Problem::Unavailable(words.to_owned()))
            }
        };
        drop(reply.send(found));
    }
}

/// Load balancers are not given out here.
fn none() -> Problem {
    Problem::Nothing("the host half of this cluster gives out no load balancers".to_owned())
}
