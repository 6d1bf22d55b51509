//! Decides what to change on a Node: compares the desired with the actual state and makes a patch. Pure.
//!
//! An annotation lists the labels that guestlet owns. A label that already has the desired value becomes owned,
//! because kubelet may have set it from a file that guestlet wrote. A label with a different value that is not
//! owned belongs to another program and stays.
//!
//! The host label belongs to kubelet: it sets the value that it gets through CSI, never changes it, and drops a
//! driver that reports a different one. So the label is corrected here when the guest runs on a different host,
//! whichever program owns the other labels.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::guest::topology::{Labels, Topology, ZoneChange};
use crate::labels::{CLOUD_PROVIDER, HOST, OWNED_LABELS as OWNED, REGION, RUNS_IN, ZONE, check_value};
use crate::topology::node::Object;

/// Taint of a Node that a cloud provider has not initialised yet.
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// Signs of a Node that Harvester's cloud provider has initialised.
const HARVESTER: &str = "harvester://";
const HARVESTER_ANNOTATIONS: &str = "cloudprovider.harvesterhci.io/";

/// Desired state of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Topology of the guest; absent while it is unknown.
    pub topology: Option<&'a Topology>,
    /// Labels that kubelet has from guestlet's files.
    pub given: &'a [(String, String)],
    /// Treatment of zone and region labels that have other values.
    pub zone_change: ZoneChange,
    /// True to change nothing and only report.
    pub report_only: bool,
    /// Provider ID for a Node that has none.
    pub provider_id: Option<&'a str>,
    /// True if kubelet gets the host through CSI, and so sets the host label itself.
    pub kubelet_knows_host: bool,
    /// System UUID of this machine, in lower case; empty if it has none.
    pub system_uuid: &'a str,
}

/// Decision on what to change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Merge patch; none if nothing has to change.
    pub patch: Option<Value>,
    /// State of the labels after the patch, in one word.
    pub state: &'static str,
    /// Reason for the state, as text for users.
    pub reason: String,
    /// Event to create in the cluster after the patch.
    pub event: Option<Event>,
}

/// Event to create about the Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// True if the event needs attention.
    pub warning: bool,
    /// Message of the event.
    pub message: String,
}

/// Decides what to change on the Node `actual` to reach the state `wanted`.
pub fn plan(wanted: &Wanted<'_>, actual: &Object) -> Plan {
    let only = |state, reason: &str| Plan { state, reason: reason.to_owned(), ..Plan::default() };
    let found = actual.status.node_info.system_uuid.to_lowercase();
    if !found.is_empty() && !wanted.system_uuid.is_empty() && found != wanted.system_uuid {
        return only(
            "failed",
            "kubelet's credential is for the Node of another machine (its system UUID differs)",
        );
    }
    let Some(topology) = wanted.topology else {
        return only("waiting", "no host half has yet told this guest where it runs");
    };
    if wanted.report_only {
        return only("reported", "topology.report-only is set");
    }
    let host = host_label(wanted, topology, actual);
    if let Some(controller) = cloud_provider(actual) {
        let patch = host.map(|host| {
            let version = &actual.metadata.resource_version;
            json!({ "metadata": { "resourceVersion": version, "labels": { HOST: host } } })
        });
        return Plan { patch, ..only("reported", controller) };
    }
    let mut changes = Changes::of(wanted, topology, actual);
    if let Some(host) = host {
        changes.labels.insert(HOST.to_owned(), json!(host));
    }
    changes.annotations(topology, actual);
    let provider_id = wanted.provider_id.filter(|id| !id.is_empty() && actual.spec.provider_id.is_empty());
    let (state, reason) = changes.outcome();
    let event = changes.event(topology, wanted.zone_change);
    let Changes { labels, annotations, .. } = changes;
    if labels.is_empty() && annotations.is_empty() && provider_id.is_none() {
        return Plan { patch: None, state, reason, event: None };
    }
    let mut patch = json!({ "metadata": { "resourceVersion": actual.metadata.resource_version } });
    for (key, part) in [("labels", labels), ("annotations", annotations)] {
        if !part.is_empty() {
            patch["metadata"][key] = Value::Object(part);
        }
    }
    if let Some(id) = provider_id {
        patch["spec"] = json!({ "providerID": id });
    }
    Plan { patch: Some(patch), state, reason, event }
}

/// Returns the value for the host label, if the Node has the label with a different one.
fn host_label<'a>(wanted: &Wanted<'_>, topology: &'a Topology, actual: &Object) -> Option<&'a str> {
    let host = Some(&topology.host).filter(|host| wanted.kubelet_knows_host && check_value(host).is_ok())?;
    actual.metadata.labels.get(HOST).filter(|present| *present != host).map(|_| host.as_str())
}

/// Returns the description of a cloud provider that sets the topology labels of the Node, if there is one.
fn cloud_provider(actual: &Object) -> Option<&'static str> {
    if actual.spec.taints.iter().any(|taint| taint.key == UNINITIALIZED) {
        return Some("a cloud provider has not initialised this Node yet");
    }
    if actual.metadata.annotations.contains_key(CLOUD_PROVIDER) {
        return Some("guestlet-ccm manages the labels of this Node");
    }
    let annotated = actual.metadata.annotations.keys().any(|key| key.starts_with(HARVESTER_ANNOTATIONS));
    (annotated || actual.spec.provider_id.starts_with(HARVESTER))
        .then_some("Harvester's cloud provider manages the labels of this Node")
}

fn is_place(key: &str) -> bool {
    key == REGION || key == ZONE
}

#[derive(Default)]
struct Changes {
    labels: Map<String, Value>,
    annotations: Map<String, Value>,
    /// Labels that guestlet owns from now on.
    ours: BTreeSet<String>,
    /// Labels of other programs that have a different value, as `key=value`.
    foreign: Vec<String>,
    /// Zone and region labels that keep their old values, as `key=value`.
    kept: Vec<String>,
    /// Zone and region labels whose values change, with both values.
    moved: Vec<String>,
}

impl Changes {
    fn of(wanted: &Wanted<'_>, topology: &Topology, actual: &Object) -> Self {
        let has = &actual.metadata.labels;
        let listed = actual.metadata.annotations.get(OWNED).map(String::as_str).unwrap_or_default();
        let owned: BTreeSet<&str> = listed.split(',').filter(|key| !key.is_empty()).collect();
        let is_ours = |key: &str, value: &str| {
            owned.contains(key) || wanted.given.iter().any(|(one, with)| one == key && with == value)
        };
        let labels: Labels = topology.node_labels();
        let mut changes = Self::default();
        for (key, value) in &labels {
            match has.get(key) {
                Some(present) if present == value => {}
                Some(present) if !is_ours(key, present) => {
                    changes.foreign.push(format!("{key}={present}"));
                    continue;
                }
                Some(present) if is_place(key) && wanted.zone_change != ZoneChange::Update => {
                    changes.kept.push(format!("{key}={present}"));
                }
                present => {
                    if is_place(key) {
                        changes
                            .moved
                            .extend(present.map(|present| format!("{key} from {present} to {value}")));
                    }
                    changes.labels.insert(key.clone(), json!(value));
                }
            }
            changes.ours.insert(key.clone());
        }
        for key in owned {
            match has.get(key) {
                Some(_) if labels.contains_key(key) => {}
                Some(present) if is_place(key) && wanted.zone_change != ZoneChange::Update => {
                    changes.kept.push(format!("{key}={present}"));
                    changes.ours.insert(key.to_owned());
                }
                Some(present) => {
                    if is_place(key) {
                        changes.moved.push(format!("{key} from {present} to none"));
                    }
                    changes.labels.insert(key.to_owned(), Value::Null);
                }
                None => {}
            }
        }
        changes
    }

    /// Updates the annotations: the labels that guestlet owns, and where the Node runs.
    fn annotations(&mut self, topology: &Topology, actual: &Object) {
        let ours: Vec<_> = self.ours.iter().map(String::as_str).collect();
        let places = [("region", &topology.region), ("zone", &topology.zone), ("host", &topology.host)];
        let places = places.into_iter().filter(|(_, value)| !value.is_empty());
        let places: Vec<_> = places.map(|(name, value)| format!("{name}={value}")).collect();
        for (key, value) in [(OWNED, ours.join(",")), (RUNS_IN, places.join(","))] {
            let present = actual.metadata.annotations.get(key);
            if present.map(String::as_str).unwrap_or_default() != value {
                let value = if value.is_empty() { Value::Null } else { json!(value) };
                self.annotations.insert(key.to_owned(), value);
            }
        }
    }

    fn outcome(&self) -> (&'static str, String) {
        if !self.foreign.is_empty() {
            return (
                "reported",
                format!("set by another program, and left alone: {}", self.foreign.join(", ")),
            );
        }
        if !self.kept.is_empty() {
            return ("kept", format!("kept by topology.zone-change: {}", self.kept.join(", ")));
        }
        ("current", String::new())
    }

    fn event(&self, topology: &Topology, zone_change: ZoneChange) -> Option<Event> {
        let host = if topology.host.is_empty() { "another host" } else { &topology.host };
        if !self.moved.is_empty() {
            let message = format!("this node runs on {host} now: {}", self.moved.join(", "));
            return Some(Event { warning: false, message });
        }
        // Once for each place: when the annotation gets it for the first time.
        let news = zone_change == ZoneChange::Report && self.annotations.contains_key(RUNS_IN);
        (news && !self.kept.is_empty()).then(|| Event {
            warning: true,
            message: format!(
                "this node runs on {host} now, in zone {:?} of region {:?}, and still says {}",
                topology.zone,
                topology.region,
                self.kept.join(", ")
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::node::Taint;

    fn topology(zone: &str) -> Topology {
        Topology { zone: zone.into(), host: format!("h-{zone}"), ..Topology::default() }
    }

    fn wanted(topology: &Topology) -> Wanted<'_> {
        Wanted {
            topology: Some(topology),
            given: &[],
            zone_change: ZoneChange::Update,
            report_only: false,
            provider_id: None,
            kubelet_knows_host: false,
            system_uuid: "aa-bb",
        }
    }

    fn object(labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> Object {
        let map =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut object = Object::default();
        object.metadata.resource_version = "7".into();
        (object.metadata.labels, object.metadata.annotations) = (map(labels), map(annotations));
        object.status.node_info.system_uuid = "AA-BB".into();
        object
    }

    /// Applies the plan to the Node, as the API server merges the patch.
    fn apply(object: &Object, plan: &Plan) -> Object {
        let mut after = object.clone();
        let Some(patch) = &plan.patch else { return after };
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        for (part, place) in
            [("labels", &mut after.metadata.labels), ("annotations", &mut after.metadata.annotations)]
        {
            for (key, value) in patch["metadata"][part].as_object().into_iter().flatten() {
                match value.as_str() {
                    Some(value) => drop(place.insert(key.clone(), value.to_owned())),
                    None => assert!(place.remove(key).is_some(), "{key} is removed without being there"),
                }
            }
        }
        if let Some(id) = patch["spec"]["providerID"].as_str() {
            id.clone_into(&mut after.spec.provider_id);
        }
        after
    }

    #[test]
    fn a_node_gets_follows_and_loses_its_labels_and_then_nothing_is_left_to_do() {
        let mut first = topology("a");
        first.labels = [("rack".to_owned(), "1".to_owned())].into();
        let joined = object(&[("user", "x")], &[]);
        let step = plan(&wanted(&first), &joined);
        let one = apply(&joined, &step);
        assert_eq!((one.metadata.labels[ZONE].as_str(), one.metadata.labels["rack"].as_str()), ("a", "1"));
        assert_eq!(one.metadata.annotations[OWNED], "rack,topology.kubernetes.io/zone");
        assert_eq!(one.metadata.annotations[RUNS_IN], "zone=a,host=h-a");
        assert_eq!((step.event, step.state), (None, "current"));
        assert_eq!(plan(&wanted(&first), &one).patch, None);

        let second = topology("b");
        let step = plan(&wanted(&second), &one);
        let two = apply(&one, &step);
        assert_eq!(two.metadata.labels[ZONE], "b");
        assert!(!two.metadata.labels.contains_key("rack"), "the host has it no longer");
        assert_eq!(two.metadata.labels["user"], "x");
        assert!(step.event.unwrap().message.contains("topology.kubernetes.io/zone from a to b"));
        assert_eq!(plan(&wanted(&second), &two).patch, None);

        let nowhere = Topology::default();
        let three = apply(&two, &plan(&wanted(&nowhere), &two));
        assert_eq!(three.metadata.labels, object(&[("user", "x")], &[]).metadata.labels);
        assert!(three.metadata.annotations.is_empty());
        let unknown = Wanted { topology: None, ..wanted(&nowhere) };
        assert_eq!((plan(&unknown, &two).patch, plan(&unknown, &two).state), (None, "waiting"));
    }

    #[test]
    fn what_somebody_else_has_set_stays() {
        let here = topology("a");
        let theirs = object(&[(ZONE, "other")], &[]);
        let step = plan(&wanted(&here), &theirs);
        assert_eq!(apply(&theirs, &step).metadata.labels[ZONE], "other");
        assert_eq!(step.state, "reported");
        assert!(step.reason.contains("topology.kubernetes.io/zone=other"), "{}", step.reason);

        // kubelet had set the label from a file that guestlet wrote, and then the guest moved.
        let given = [(ZONE.to_owned(), "other".to_owned())];
        let moved = Wanted { given: &given, ..wanted(&here) };
        assert_eq!(apply(&theirs, &plan(&moved, &theirs)).metadata.labels[ZONE], "a");
        // A label with the desired value is owned from then on.
        let same = object(&[(ZONE, "a")], &[]);
        let ours = apply(&same, &plan(&wanted(&here), &same));
        let elsewhere = topology("b");
        assert_eq!(apply(&ours, &plan(&wanted(&elsewhere), &ours)).metadata.labels[ZONE], "b");
    }

    #[test]
    fn zones_can_be_kept() {
        let elsewhere = topology("b");
        let before = object(&[(ZONE, "a")], &[(OWNED, ZONE), (RUNS_IN, "zone=a,host=h-a")]);
        for (zone_change, warns) in [(ZoneChange::Keep, false), (ZoneChange::Report, true)] {
            let wanted = Wanted { zone_change, ..wanted(&elsewhere) };
            let step = plan(&wanted, &before);
            let after = apply(&before, &step);
            assert_eq!((after.metadata.labels[ZONE].as_str(), step.state), ("a", "kept"));
            assert_eq!(after.metadata.annotations[RUNS_IN], "zone=b,host=h-b");
            assert_eq!(step.event.is_some_and(|event| event.warning), warns);
            assert_eq!(plan(&wanted, &after).patch, None);
            assert_eq!(plan(&wanted, &after).event, None, "once");
        }
    }

    #[test]
    fn others_that_have_the_node_are_left_to_it() {
        let here = topology("a");
        let taint = Taint { key: UNINITIALIZED.into(), value: "true".into(), effect: "NoSchedule".into() };
        let mut tainted = object(&[], &[]);
        tainted.spec.taints.push(taint);
        let mut harvester = object(&[], &[]);
        harvester.spec.provider_id = "harvester://1".into();
        let annotated = object(&[], &[("cloudprovider.harvesterhci.io/x", "y")]);
        let ours = object(&[], &[(CLOUD_PROVIDER, "guestlet-ccm")]);
        for node in [tainted, harvester, annotated, ours] {
            let step = plan(&wanted(&here), &node);
            assert_eq!((step.patch, step.state), (None, "reported"));
        }
        let report = Wanted { report_only: true, ..wanted(&here) };
        assert_eq!(plan(&report, &object(&[], &[])).patch, None);
        let other = Wanted { system_uuid: "cc", ..wanted(&here) };
        assert_eq!(plan(&other, &object(&[], &[])).state, "failed");
    }

    #[test]
    fn the_label_of_the_host_follows_where_kubelet_has_set_it() {
        let here = topology("b");
        let wanted = Wanted { kubelet_knows_host: true, ..wanted(&here) };
        let moved = object(&[(HOST, "h-a")], &[]);
        let mut harvester = moved.clone();
        harvester.spec.provider_id = "harvester://1".into();
        for node in [moved.clone(), harvester] {
            let after = apply(&node, &plan(&wanted, &node));
            assert_eq!(after.metadata.labels[HOST], "h-b");
            assert_eq!(plan(&wanted, &after).patch, None);
        }
        // kubelet has not set the label yet.
        let joined = object(&[], &[]);
        assert!(!apply(&joined, &plan(&wanted, &joined)).metadata.labels.contains_key(HOST));
        for leave in
            [Wanted { kubelet_knows_host: false, ..wanted.clone() }, Wanted { report_only: true, ..wanted }]
        {
            assert_eq!(apply(&moved, &plan(&leave, &moved)).metadata.labels[HOST], "h-a");
        }
    }

    #[test]
    fn a_provider_id_is_set_once() {
        let here = topology("a");
        let wanted = Wanted { provider_id: Some("guestlet://1"), ..wanted(&here) };
        let node = object(&[], &[]);
        let after = apply(&node, &plan(&wanted, &node));
        assert_eq!(after.spec.provider_id, "guestlet://1");
        let mut other = after.clone();
        other.spec.provider_id = "rke2://x".into();
        assert_eq!(plan(&wanted, &other).patch, None);
    }
}
