//! Plan of the changes to a Node whose VM is known. Pure.
//!
//! The labels that guestlet owns are recorded in the annotation that the agent uses as well, [`OWNED`], so
//! that they stay the same whichever of the two maintains them. [`PROVIDER`] tells the agent that this
//! program does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Taint;
use serde_json::{Map, Value, json};

use super::addresses::{self, Choice};
use crate::ccm::events::News;
use crate::ccm::instance::Instance;
use crate::ccm::objects::{Node, annotation};
use crate::labels::{CLOUD_PROVIDER, OWNED_LABELS as OWNED, REGION, RUNS_IN, ZONE};
use crate::wire::proto::v1::instance::Power;

/// Taint that kubelet sets until a cloud provider has initialised the Node.
pub const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// Taint of a Node that is not ready while its VM is stopped.
pub const SHUTDOWN: &str = "node.cloudprovider.kubernetes.io/shutdown";
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
const OLD_INSTANCE_TYPE: &str = "beta.kubernetes.io/instance-type";

/// Value of the annotation [`CLOUD_PROVIDER`] on a Node that this program maintains.
pub const PROVIDER: &str = "guestlet-ccm";

/// Handling of zone and region when a VM has moved to another place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ZoneChange {
    /// Update the labels.
    #[default]
    Update,
    /// Keep the labels, and record an event.
    Keep,
}

/// Changes to be made, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Merge patch of the status.
    pub status: Option<Value>,
    /// Merge patch of the other fields.
    pub node: Option<Value>,
    /// Events that are recorded after the changes.
    pub news: Vec<News>,
    /// Information that is missing; the Node is not initialised before it is known.
    pub waits: Option<String>,
}

/// Returns whether a Node waits for its initialisation by a cloud provider.
pub fn is_uninitialized(node: &Node) -> bool {
    node.taints.iter().any(|taint| taint.key == UNINITIALIZED)
}

/// Plans the changes to a Node that is this VM. `not` are the addresses of load balancers.
pub fn plan(
    node: &Node,
    instance: &Instance,
    choice: &Choice,
    zone_change: ZoneChange,
    not: &BTreeSet<IpAddr>,
) -> Plan {
    let is_first = is_uninitialized(node);
    let mut plan = Plan::default();
    match addresses::wanted(node, instance, choice, not) {
        // While the agent is silent, the known addresses may be outdated.
        Ok(all) if is_first || instance.is_current => {
            if all != node.addresses {
                plan.status = Some(json!({ "status": { "addresses": all } }));
            }
        }
        Err(why) if is_first => {
            plan.waits = Some(why);
            return plan;
        }
        Err(why) if instance.is_current => {
            plan.news
                .push(News::warning("AddressesUnknown", format!("its addresses stay as they are: {why}")));
        }
        Ok(_) | Err(_) => {}
    }
    let mut labels = Labels::new(node, instance, zone_change, is_first);
    let mut patch = Map::new();
    let metadata = labels.metadata(node);
    if !metadata.is_empty() {
        patch.insert("metadata".to_owned(), Value::Object(metadata));
    }
    let mut spec = Map::new();
    if node.provider_id.is_empty() {
        spec.insert("providerID".to_owned(), json!(instance.provider_id));
    }
    if let Some(taints) = taints(node, instance.power) {
        spec.insert("taints".to_owned(), json!(taints));
    }
    if !spec.is_empty() {
        patch.insert("spec".to_owned(), Value::Object(spec));
    }
    if !patch.is_empty() {
        plan.node = Some(Value::Object(patch));
    }
    if is_first {
        let message = format!("it is the VM {}", super::matching::described(instance));
        plan.news.push(News::normal("Initialized", message));
    }
    plan.news.append(&mut labels.news);
    plan
}

/// Returns the taints that the Node is to have, if they differ from the present ones.
fn taints(node: &Node, power: Power) -> Option<Vec<Taint>> {
    let is_shut_down = node.taints.iter().any(|taint| taint.key == SHUTDOWN);
    // The VM of a ready Node is not stopped, whatever is still reported of it.
    let is_to_be = if node.is_ready { false } else { is_shut_down || power == Power::Stopped };
    let is_ours = |taint: &&Taint| taint.key == UNINITIALIZED || (taint.key == SHUTDOWN && !is_to_be);
    let mut wanted: Vec<_> = node.taints.iter().filter(|taint| !is_ours(taint)).cloned().collect();
    if is_to_be && !is_shut_down {
        wanted.push(Taint { key: SHUTDOWN.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() });
    }
    (wanted != node.taints).then_some(wanted)
}

/// Changes to the labels of a Node.
struct Labels {
    changed: Map<String, Value>,
    owned: BTreeSet<String>,
    runs_in: String,
    news: Vec<News>,
}

impl Labels {
    fn new(node: &Node, instance: &Instance, zone_change: ZoneChange, is_first: bool) -> Self {
        let without = BTreeMap::new();
        let has = node.metadata.labels.as_ref().unwrap_or(&without);
        let listed = annotation(&node.metadata, OWNED).unwrap_or_default();
        let owned: BTreeSet<&str> = listed.split(',').filter(|key| !key.is_empty()).collect();
        let places = [(REGION, &instance.region), (ZONE, &instance.zone)];
        let kinds = [(INSTANCE_TYPE, &instance.instance_type), (OLD_INSTANCE_TYPE, &instance.instance_type)];
        let mut wanted: BTreeMap<&str, &str> =
            instance.labels.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        // Labels whose values are unknown at present are kept.
        wanted.extend(
            places
                .into_iter()
                .chain(kinds)
                .filter(|(_, value)| !value.is_empty())
                .map(|(key, value)| (key, value.as_str())),
        );
        let is_standard = |key: &str| [REGION, ZONE, INSTANCE_TYPE, OLD_INSTANCE_TYPE].contains(&key);
        let is_place = |key: &str| [REGION, ZONE].contains(&key);
        let mut labels = Self {
            changed: Map::new(),
            owned: BTreeSet::new(),
            runs_in: runs_in(instance),
            news: Vec::new(),
        };
        let (mut moved, mut kept) = (Vec::new(), Vec::new());
        for (&key, &value) in &wanted {
            match has.get(key).map(String::as_str) {
                Some(present) if present == value => {}
                Some(_) if !(owned.contains(key) || is_first && is_standard(key)) => continue,
                Some(present) if is_place(key) && !is_first => {
                    if zone_change == ZoneChange::Keep {
                        kept.push(format!("{key}={present}"));
                    } else {
                        moved.push(format!("{key} from {present} to {value}"));
                        labels.changed.insert(key.to_owned(), json!(value));
                    }
                }
                _ => drop(labels.changed.insert(key.to_owned(), json!(value))),
            }
            labels.owned.insert(key.to_owned());
        }
        for key in owned.into_iter().filter(|key| !wanted.contains_key(key)) {
            if is_standard(key) || instance.labels.is_none() {
                labels.owned.insert(key.to_owned());
            } else if has.contains_key(key) {
                labels.changed.insert(key.to_owned(), Value::Null);
            }
        }
        let host = if instance.host.is_empty() { "another host" } else { &instance.host };
        if !moved.is_empty() {
            labels.news.push(News::normal(
                "TopologyChanged",
                format!("it runs on {host} now: {}", moved.join(", ")),
            ));
        }
        if !kept.is_empty() {
            let message = format!(
                "it runs on {host} now, and keeps its labels (--zone-change keep): {}",
                kept.join(", ")
            );
            labels.news.push(News::warning("TopologyKept", message));
        }
        labels
    }

    /// Returns the patch of the Node's metadata, which is empty if nothing is to be changed.
    fn metadata(&mut self, node: &Node) -> Map<String, Value> {
        let owned: Vec<_> = self.owned.iter().map(String::as_str).collect();
        let owned = owned.join(",");
        let wanted = [(OWNED, owned.as_str()), (RUNS_IN, self.runs_in.as_str()), (CLOUD_PROVIDER, PROVIDER)];
        let mut annotations = Map::new();
        for (key, value) in wanted {
            if annotation(&node.metadata, key).unwrap_or_default() != value {
                let value = if value.is_empty() { Value::Null } else { json!(value) };
                annotations.insert(key.to_owned(), value);
            }
        }
        let mut metadata = Map::new();
        for (key, part) in [("labels", std::mem::take(&mut self.changed)), ("annotations", annotations)] {
            if !part.is_empty() {
                metadata.insert(key.to_owned(), Value::Object(part));
            }
        }
        metadata
    }
}

/// Describes where the VM runs, in the form that the agent writes as well.
fn runs_in(instance: &Instance) -> String {
    let places = [("region", &instance.region), ("zone", &instance.zone), ("host", &instance.host)];
    let places = places.into_iter().filter(|(_, value)| !value.is_empty());
    places.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeAddress;

    use super::*;
    use crate::ccm::instance::Interface;

    fn instance(zone: &str) -> Instance {
        Instance {
            uid: "1".into(),
            provider_id: "guestlet://1".into(),
            name: "web".into(),
            power: Power::Running,
            interfaces: vec![Interface {
                addresses: vec!["192.0.2.7/24".parse().unwrap()],
                ..Interface::default()
            }],
            is_current: true,
            region: "r".into(),
            zone: zone.into(),
            host: "h".into(),
            labels: Some([("rack".to_owned(), "1".to_owned())].into()),
            instance_type: "small".into(),
            ..Instance::default()
        }
    }

    fn taint(key: &str) -> Taint {
        Taint { key: key.into(), effect: "NoSchedule".into(), ..Taint::default() }
    }

    fn node(taints: &[&str], labels: &[(&str, &str)]) -> Node {
        let mut node = Node { taints: taints.iter().map(|key| taint(key)).collect(), ..Node::default() };
        node.metadata.name = Some("a".into());
        let map = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        node.metadata.labels = Some(map.collect());
        node
    }

    fn planned(node: &Node, instance: &Instance) -> Plan {
        plan(node, instance, &Choice::default(), ZoneChange::Update, &BTreeSet::new())
    }

    /// Returns the Node after the plan was carried out, as the API server merges it.
    fn apply(node: &Node, plan: &Plan) -> Node {
        let mut after = node.clone();
        if let Some(status) = &plan.status {
            after.addresses = serde_json::from_value(status["status"]["addresses"].clone()).unwrap();
        }
        let patch = plan.node.clone().unwrap_or_default();
        let merge = |place: &mut Option<BTreeMap<String, String>>, part: &Value| {
            for (key, value) in part.as_object().into_iter().flatten() {
                let place = place.get_or_insert_default();
                match value.as_str() {
                    Some(value) => drop(place.insert(key.clone(), value.to_owned())),
                    None => assert!(place.remove(key).is_some(), "{key} is removed without being there"),
                }
            }
        };
        merge(&mut after.metadata.labels, &patch["metadata"]["labels"]);
        merge(&mut after.metadata.annotations, &patch["metadata"]["annotations"]);
        if let Some(id) = patch["spec"]["providerID"].as_str() {
            id.clone_into(&mut after.provider_id);
        }
        if patch["spec"]["taints"].is_array() {
            after.taints = serde_json::from_value(patch["spec"]["taints"].clone()).unwrap();
        }
        after
    }

    #[test]
    fn a_node_is_initialised_at_once_and_then_nothing_is_left_to_do() {
        let here = instance("z");
        let joined = node(&["other", UNINITIALIZED], &[("user", "x"), (ZONE, "wrong"), ("rack", "theirs")]);
        let step = planned(&joined, &here);
        let ready = apply(&joined, &step);
        assert_eq!((ready.provider_id.as_str(), ready.taints.len()), ("guestlet://1", 1));
        let labels = ready.metadata.labels.clone().unwrap();
        for (key, value) in
            [(REGION, "r"), (ZONE, "z"), (INSTANCE_TYPE, "small"), ("user", "x"), ("rack", "theirs")]
        {
            assert_eq!(labels[key], value, "{key}");
        }
        let annotations = ready.metadata.annotations.clone().unwrap();
        assert_eq!(annotations[CLOUD_PROVIDER], PROVIDER);
        assert_eq!(annotations[RUNS_IN], "region=r,zone=z,host=h");
        assert!(!annotations[OWNED].contains("rack"), "{annotations:?}");
        assert_eq!(ready.addresses[0].address, "192.0.2.7");
        assert_eq!(step.news[0].reason, "Initialized");
        assert_eq!(planned(&ready, &here), Plan::default());
    }

    #[test]
    fn without_an_address_it_is_not_initialised() {
        let here = Instance { interfaces: Vec::new(), ..instance("z") };
        let step = planned(&node(&[UNINITIALIZED], &[]), &here);
        assert!(step.waits.is_some() && step.node.is_none() && step.status.is_none(), "{step:?}");
    }

    #[test]
    fn labels_follow_and_what_is_not_known_changes_nothing() {
        let first = instance("z1");
        let joined = node(&[UNINITIALIZED], &[]);
        let one = apply(&joined, &planned(&joined, &first));
        let mut second = instance("z2");
        second.labels = Some(BTreeMap::new());
        let step = planned(&one, &second);
        let two = apply(&one, &step);
        let labels = two.metadata.labels.clone().unwrap();
        assert_eq!((labels[ZONE].as_str(), labels.get("rack")), ("z2", None));
        assert!(step.news[0].message.contains("from z1 to z2"));
        assert_eq!(planned(&two, &second), Plan::default());

        let kept = plan(&one, &instance("z2"), &Choice::default(), ZoneChange::Keep, &BTreeSet::new());
        assert_eq!(apply(&one, &kept).metadata.labels.unwrap()[ZONE], "z1");
        assert_eq!(kept.news[0].reason, "TopologyKept");

        let unknown = Instance {
            region: String::new(),
            zone: String::new(),
            labels: None,
            instance_type: String::new(),
            ..instance("")
        };
        let after = apply(&one, &planned(&one, &unknown));
        assert_eq!(after.metadata.labels, one.metadata.labels);
        let silent = Instance { interfaces: Vec::new(), is_current: false, ..instance("z1") };
        assert_eq!(planned(&one, &silent), Plan::default());
        let changed = Instance {
            interfaces: vec![Interface {
                addresses: vec!["192.0.2.9/24".parse().unwrap()],
                ..Interface::default()
            }],
            ..silent
        };
        assert_eq!(planned(&one, &changed), Plan::default(), "what is old is not written");
        let now = Instance { is_current: true, ..changed };
        assert_eq!(apply(&one, &planned(&one, &now)).addresses[0].address, "192.0.2.9");
    }

    #[test]
    fn a_label_of_somebody_else_stays() {
        let joined = node(&[], &[("rack", "theirs")]);
        let after = apply(&joined, &planned(&joined, &instance("z")));
        assert_eq!(after.metadata.labels.unwrap()["rack"], "theirs");
    }

    #[test]
    fn the_taint_of_a_stopped_vm_comes_only_with_a_positive_word_and_goes_when_the_node_is_ready() {
        let power = |power| Instance { power, ..instance("z") };
        let has = |node: &Node| node.taints.iter().any(|taint| taint.key == SHUTDOWN);
        let lost = node(&[], &[]);
        for other in [Power::Running, Power::Paused, Power::Unknown] {
            assert!(!has(&apply(&lost, &planned(&lost, &power(other)))), "{other:?}");
        }
        let stopped = apply(&lost, &planned(&lost, &power(Power::Stopped)));
        assert!(has(&stopped));
        for any in [Power::Running, Power::Stopped, Power::Unknown] {
            assert!(has(&apply(&stopped, &planned(&stopped, &power(any)))), "{any:?}");
            let ready = Node { is_ready: true, ..stopped.clone() };
            assert!(!has(&apply(&ready, &planned(&ready, &power(any)))), "{any:?}");
        }
        // kubelet still reports that it is well.
        let alive = Node { is_ready: true, ..lost };
        assert!(!has(&apply(&alive, &planned(&alive, &power(Power::Stopped)))));
    }

    #[test]
    fn names_stay_the_nodes_own() {
        let mut joined = node(&[UNINITIALIZED], &[]);
        joined.addresses = vec![NodeAddress { type_: "Hostname".into(), address: "b".into() }];
        let after = apply(&joined, &planned(&joined, &instance("z")));
        assert_eq!(after.addresses.last().unwrap().address, "b");
    }
}
