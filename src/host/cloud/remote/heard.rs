//! What is heard of load balancers, and what clusters are told of them.

use std::collections::BTreeSet;

use super::super::view::event;
use super::super::wanted::Service;
use super::Registry;
use super::balancers::{Key, Standing};
use crate::host::backends::kubevirt::balancers::Told;
use crate::wire::proto::v1;
use crate::wire::proto::v1::load_balancer::State;

impl Registry {
    /// Takes in what is heard of load balancers and pools.
    pub(super) fn hear(&mut self, told: Told) {
        let is_of_pools = matches!(told, Told::Pools(_));
        let about = self.balancers.hear(told);
        let clusters: BTreeSet<String> = if is_of_pools {
            self.balancers.asked.keys().map(|(cluster, _)| cluster.clone()).collect()
        } else {
            about.iter().map(|(cluster, _)| cluster.clone()).collect()
        };
        // That it has an address is to be said in it.
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
            // What it could not have is not given up for that.
            if !self.balancers.asked.contains_key(&key) {
                self.again(&key.0, service, wanted);
            }
        }
        self.begin();
    }

    /// From now on people are told of what changes, if all that there was has been heard of.
    pub(super) fn begin(&mut self) {
        self.has_begun |= self.knows_networks && self.balancers.standing == Standing::There;
    }

    /// Tells clusters of these load balancers, as they are now, and people of what has become of them.
    pub(super) fn show(&mut self, mut about: BTreeSet<Key>) {
        let twins: Vec<Key> = about.iter().filter_map(|key| self.twin(key)).collect();
        about.extend(twins);
        self.follow_checks(&about);
        for key in about {
            let (now, is_left) = (self.message(&key), self.balancers.is_left(&key));
            let balancers = &mut self.cluster(&key.0).balancers;
            let before = balancers.get(&key.1);
            // Of one whose Service is not kept any more people are told once.
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
    /// The object that is told of as this one's, or by itself, according to whether this one cannot have what it asks for.
    fn twin(&self, key: &Key) -> Option<Key> {
        let shown = self.clusters.get(&key.0)?.balancers.get(&key.1);
        let shown = shown.and_then(|shown| shown.service.as_ref()).map(Service::from);
        let asked = self.balancers.asked.get(key).map(|asked| asked.service.clone());
        let own = self.balancers.unclaimed(&key.0, &asked.or(shown)?)?;
        Some((key.0.clone(), own.key()))
    }

    /// Tells people of what has become of a load balancer. Those that there were when the program began are no news.
    fn note(&self, event: Option<v1::LoadBalancerChanged>) {
        if let Some(event) = event.filter(|_| self.has_begun) {
            // Who watches is not worth waiting for.
            if self.events.try_send(event).is_err() {
                tracing::debug!("more becomes of load balancers than can be told");
            }
        }
    }
}

/// Where a state is counted.
fn place(state: State) -> usize {
    match state {
        State::Ready => 0,
        State::Failed => 2,
        _ => 1,
    }
}
