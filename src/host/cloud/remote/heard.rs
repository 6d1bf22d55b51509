//! What is heard of load balancers, and what clusters are told of them.

use std::collections::BTreeSet;

use super::balancers::Key;
use super::{Registry, told};
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
        self.show(about);
        for cluster in clusters {
            self.look_again(&cluster, is_of_pools);
        }
        for (key, service, wanted) in unsaid {
            // What it could not have is not given up for that.
            if !self.balancers.asked.contains_key(&key) {
                self.again(&key.0, service, wanted);
            }
        }
    }

    /// Tells clusters of these load balancers, as they are now.
    pub(super) fn show(&mut self, about: BTreeSet<Key>) {
        for key in about {
            let now = told::message(&self.balancers, &key);
            let balancers = &mut self.cluster(&key.0).balancers;
            let before = balancers.get(&key.1).map(v1::LoadBalancer::state);
            let state = now.as_ref().map(v1::LoadBalancer::state);
            match now {
                Some(now) => balancers.set(&key.1, now),
                None => balancers.remove(&key.1),
            }
            balancers.tell();
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

/// Where a state is counted.
fn place(state: State) -> usize {
    match state {
        State::Ready => 0,
        State::Failed => 2,
        _ => 1,
    }
}
