//! VirtualMachine in the form that the controller keeps: the facts about a VM while it is off.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::super::names::PREFIX;
use super::super::objects::{CLUSTER_LABEL, resource};
use super::super::seen::{self, Facts, identified};
use crate::labels;
use crate::wire::proto::v1::PowerState;

/// VirtualMachine as received from the API.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// Name, namespace, UID and version only.
    pub metadata: ObjectMeta,
    /// Facts about the VM while it is off; `None` if it lacks a name or UID, which no API server omits.
    pub facts: Option<Arc<Facts>>,
}

impl<'d> Deserialize<'d> for Wanted {
    fn deserialize<D: Deserializer<'d>>(from: D) -> Result<Self, D::Error> {
        let (whole, metadata) = seen::whole(from)?;
        let template = whole.pointer("/spec/template").unwrap_or(&Value::Null);
        // Fields of an unexpected type count as missing.
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let its_labels = &template["metadata"]["labels"];
        let cluster = text(&its_labels[CLUSTER_LABEL]);
        let texts = its_labels.as_object().into_iter().flatten();
        let texts = texts.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)));
        let volumes = template["spec"]["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
        let dmi = text(&template["spec"]["domain"]["firmware"]["uuid"]).to_ascii_lowercase();
        let facts = identified(&metadata, &cluster).map(|facts| Facts {
            dmi: (!dmi.is_empty()).then_some(dmi),
            power: PowerState::Off,
            labels: Arc::new(labels::of_vm(texts)),
            has_volumes: volumes
                .iter()
                .filter_map(|volume| volume["name"].as_str())
                .any(|name| name.starts_with(PREFIX)),
            instance_type: text(&whole["spec"]["instancetype"]["name"]),
            ..facts.with_interfaces(&template["spec"], &Value::Null)
        });
        Ok(Self { metadata: seen::slim(metadata), facts: facts.map(Arc::new) })
    }
}

resource!(Wanted, "VirtualMachine", "virtualmachines");

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(object: &Value) -> Option<Facts> {
        let wanted: Wanted = serde_json::from_value(object.clone()).unwrap();
        wanted.facts.map(Arc::unwrap_or_clone)
    }

    fn whole() -> Value {
        json!({
            "metadata": {
                "name": "web-1", "namespace": "shop", "uid": "AAAAAAAA-0000-4000-8000-000000000001", "resourceVersion": "17",
                "labels": {"guestcluster.harvesterhci.io/name": "of-the-object"},
                "ownerReferences": [{
                    "apiVersion": "pool.kubevirt.io/v1", "kind": "VirtualMachinePool", "name": "web", "uid": "pool",
                    "controller": true,
                }],
            },
            "spec": {"runStrategy": "Always", "template": {
                "metadata": {"creationTimestamp": null, "labels": {"guestcluster.harvesterhci.io/name": "dev"}},
                "spec": {"domain": {"firmware": {"uuid": "6F1C0A52-5C0F-4A8E-9D1B-0D7A2F3B4C5D"}}},
            }},
            "status": {"printableStatus": "Running"},
        })
    }

    #[test]
    fn what_its_runs_are_made_from_counts_and_may_be_missing_or_another() {
        let expected = Facts {
            name: "shop/web-1".into(),
            uid: "aaaaaaaa-0000-4000-8000-000000000001".into(),
            lasting: "aaaaaaaa-0000-4000-8000-000000000001".into(),
            dmi: Some("6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d".into()),
            cluster: "shop/dev".into(),
            labels: Arc::new([("guestcluster.harvesterhci.io/name".to_owned(), "dev".to_owned())].into()),
            power: PowerState::Off,
            ..Facts::default()
        };
        assert_eq!(read(&whole()), Some(expected.clone()));
        let without_cluster = Facts { cluster: String::new(), labels: Arc::default(), ..expected.clone() };
        let without_dmi = Facts { dmi: None, ..expected.clone() };
        let bare = Facts { dmi: None, ..without_cluster.clone() };
        for (place, value, facts) in [
            ("/spec/template/metadata", Value::Null, &without_cluster),
            ("/spec/template/metadata/labels", json!(["a"]), &without_cluster),
            ("/spec/template/metadata/labels/guestcluster.harvesterhci.io~1name", json!(7), &without_cluster),
            ("/spec/template/spec/domain/firmware", Value::Null, &without_dmi),
            ("/spec/template/spec/domain/firmware/uuid", json!(""), &without_dmi),
            ("/spec/template", json!("yes"), &bare),
            ("/spec", Value::Null, &bare),
        ] {
            let mut object = whole();
            *object.pointer_mut(place).unwrap() = value;
            assert_eq!(read(&object).as_ref(), Some(facts), "{place}");
        }
        let mut nameless = whole();
        nameless["metadata"]["name"] = Value::Null;
        assert_eq!(read(&nameless), None);
    }

    #[test]
    fn what_is_kept_is_small() {
        let wanted: Wanted = serde_json::from_value(whole()).unwrap();
        assert_eq!((wanted.metadata.labels, wanted.metadata.owner_references), (None, None));
    }
}
