//! Events about where a guest runs, which Node it is, and its health.

use std::collections::HashMap;

use super::state::{Change, Excess};
use super::{Happening, few};
use crate::text;
use crate::wire::proto::v1::{
    Health, HealthChanged, Node, NodeChanged, Topology, TopologyChanged, TopologyRefused,
};

impl Happening for TopologyChanged {
    fn words(&self) -> String {
        let topology = self.topology.as_ref();
        let has_only_a_host =
            topology.is_some_and(|it| it.region.is_empty() && it.zone.is_empty() && !it.host.is_empty());
        format!("runs {}{}", if has_only_a_host { "" } else { "in " }, words(topology))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let (state, cut, room) = change.parts();
        cut.topology = room.replace(&mut state.topology, self.topology.as_ref());
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        self.topology.iter_mut().for_each(|topology| topology.labels = HashMap::new());
    }
}

impl Happening for TopologyRefused {
    fn words(&self) -> String {
        format!("topology refused: {}", self.problem)
    }
}

impl Happening for NodeChanged {
    fn words(&self) -> String {
        node_words(self.node.as_ref())
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let (state, cut, room) = change.parts();
        cut.node = room.replace(&mut state.node, self.node.as_ref());
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        if let Some(node) = &mut self.node {
            node.labels = HashMap::new();
            few(&mut node.taints);
            few(&mut node.addresses);
        }
    }
}

impl Happening for HealthChanged {
    fn words(&self) -> String {
        health_words(self.health.as_ref())
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        let (state, cut, room) = change.parts();
        cut.health = room.replace(&mut state.health, self.health.as_ref());
        Ok(())
    }

    fn slim(&mut self, _: usize) {
        if let Some(health) = &mut self.health {
            few(&mut health.cloud_init_errors);
            few(&mut health.failed_units);
        }
    }
}

/// Describes a topology, for example `region eu, zone a, on host-1`.
pub fn words(topology: Option<&Topology>) -> String {
    const UNKNOWN: &str = "an unknown place";
    let Some(topology) = topology else { return UNKNOWN.to_owned() };
    let mut words = Vec::new();
    for (name, value) in [("region ", &topology.region), ("zone ", &topology.zone), ("on ", &topology.host)] {
        if !value.is_empty() {
            words.push(format!("{name}{value}"));
        }
    }
    words.extend(labels(topology));
    if words.is_empty() { UNKNOWN.to_owned() } else { words.join(", ") }
}

/// Returns the further labels of a topology as `key=value`, sorted.
pub fn labels(topology: &Topology) -> Vec<String> {
    let mut labels: Vec<_> = topology.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.sort();
    labels
}

/// Describes the state of the Node that the guest is.
pub fn node_words(node: Option<&Node>) -> String {
    let Some(node) = node else { return "no longer a node of a cluster".to_owned() };
    let reason = if node.reason.is_empty() { String::new() } else { format!(" ({})", node.reason) };
    format!(
        "node {}: ready {}, labels {}{reason}",
        text::or_dash(&node.name),
        text::or_dash(&node.ready),
        node.state
    )
}

/// Describes the health of the guest: failed units, and the state of cloud-init.
pub fn health_words(health: Option<&Health>) -> String {
    let health = health.cloned().unwrap_or_default();
    let mut words = vec![match health.failed_units.as_slice() {
        [] => "no failed units".to_owned(),
        units => format!("failed units: {}", units.join(" ")),
    }];
    if !health.cloud_init.is_empty() {
        words.push(format!("cloud-init {}", health.cloud_init));
    }
    words.join(", ")
}
