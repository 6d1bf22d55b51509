//! Takes in reports on load balancers from the API server, and publishes them to clusters.

use std::collections::BTreeSet;

use super::super::view::event;
use super::super::wanted::Service;
use super::Registry;
use super::balancers::{Key, Standing};
use crate::host::backends::kubevirt::balancers::Told;
use crate::wire::proto::v1;
use crate::wire::proto::v1::load_balancer::State;

impl Registry {
    /// Takes in a report on load balancers or pools.
    pub(super) fn hear(&mut self, told: Told) {
        let is_of_pools = matches!(told, Told::Pools(_));
        let about = self.balancers.hear(told);
        let clusters: BTreeSet<String> = if is_of_pools {
            self.balancers.asked.keys().map(|(cluster, _)| cluster.clone()).collect()
        } else {
            about.iter().map(|(cluster, _)| cluster.clone()).collect()
        };
        // An object that has just got its address must be updated to say so.
        let unsaid = about.iter().filter_map(|key| {
            let own = self.balancers.keyed(key).filter(|own| !own.is_going())?;
            let wanted = own.wanted.as_ref()?;
            own.want(&own.service, wanted).map(|_| (key.clone(), own.service.clone(), wanted.clone()))
        });
        let unsaid: Vec<_> = unsaid.collect();
        self.show(about.clone());
        self.leave(&about);
        for cluster in clusters {
            self.look_again(&cluster, is_of_pools);
        }
        for (key, service, wanted) in unsaid {
            // A request that could not be satisfied takes precedence over the earlier configuration in the object.
            if !self.balancers.asked.contains_key(&key) {
                self.again(&key.0, service, wanted);
            }
        }
        self.begin();
    }

    /// Starts reporting changes to people, once everything that existed before has been read.
    pub(super) fn begin(&mut self) {
        self.has_begun |= self.knows_networks && self.balancers.standing == Standing::There;
    }

    /// Publishes the present state of these load balancers to their clusters, and reports changes to people.
    pub(super) fn show(&mut self, mut about: BTreeSet<Key>) {
        let twins: Vec<Key> = about.iter().filter_map(|key| self.twin(key)).collect();
        about.extend(twins);
        self.follow_checks(&about);
        for key in about {
            let (now, is_left) = (self.message(&key), self.balancers.is_left(&key));
            let balancers = &mut self.cluster(&key.0).balancers;
            let before = balancers.get(&key.1);
            // A load balancer whose Service no longer waits for it causes only one last event.
            let event = event(&key.0, before, now.as_ref()).filter(|_| !is_left || before.is_some());
            let now = now.filter(|_| !is_left);
            let before = before.map(v1::LoadBalancer::state);
            let state = now.as_ref().map(v1::LoadBalancer::state);
            match now {
                Some(now) => balancers.set(&key.1, now),
                None => balancers.remove(&key.1),
            }
            balancers.tell();
            self.note(event);
            if let Some(before) = before {
                let count = &mut self.counts[place(before)];
                *count = count.saturating_sub(1);
            }
            if let Some(state) = state {
                self.counts[place(state)] += 1;
            }
        }
        self.half.metrics.balancers.set(self.counts);
    }
}

impl Registry {
    /// Returns the key of the unclaimed object that is reported either as this load balancer or by itself, depending
    /// on whether this one's request can be satisfied.
    fn twin(&self, key: &Key) -> Option<Key> {
        let shown = self.clusters.get(&key.0)?.balancers.get(&key.1);
        let shown = shown.and_then(|shown| shown.service.as_ref()).map(Service::from);
        let asked = self.balancers.asked.get(key).map(|asked| asked.service.clone());
        let own = self.balancers.unclaimed(&key.0, &asked.or(shown)?)?;
        Some((key.0.clone(), own.key()))
    }

    /// Reports a change of a load balancer to people. What existed at the start is not news.
    fn note(&self, event: Option<v1::LoadBalancerChanged>) {
        if let Some(event) = event.filter(|_| self.has_begun) {
            // Events are dropped if the channel is full: the registry does not wait for those who watch.
            if self.events.try_send(event).is_err() {
                tracing::debug!("an event of a load balancer was dropped: too many are waiting");
            }
        }
    }
}

/// Returns the index at which a state is counted.
fn place(state: State) -> usize {
    match state {
        State::Ready => 0,
        State::Failed => 2,
        _ => 1,
    }
}
