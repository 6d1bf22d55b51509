//! Labels of a guest's object: which of the VM's labels are still to be written, and which are left to others. Pure.
//!
//! The labels of a VM are applied without force, by a field manager that applies nothing else. A label that somebody
//! else has set to another value is then a conflict, and is left as it is. Once its VM no longer has it, a label of
//! that manager is removed.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Status;

use crate::labels::Labels;

/// Field manager of the labels.
pub const MANAGER: &str = "guestlet-host-labels";

/// Returns the labels that need not be written again: those that an earlier process has written, and of `wanted`
/// those that somebody else has set. They are equal to `wanted` if nothing is to be written.
pub fn settled(object: &ObjectMeta, wanted: &Labels) -> Labels {
    let owned = owned(object);
    let settled = object.labels.iter().flatten().filter_map(|(key, value)| {
        let value = if owned.contains(key.as_str()) { value } else { wanted.get(key)? };
        Some((key.clone(), value.clone()))
    });
    settled.collect()
}

/// Returns the keys of the labels that the manager owns.
fn owned(object: &ObjectMeta) -> BTreeSet<&str> {
    let entries = object.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| entry.manager.as_deref() == Some(MANAGER));
    let fields = ours.filter_map(|entry| entry.fields_v1.as_ref());
    let labels = fields.filter_map(|fields| fields.0["f:metadata"]["f:labels"].as_object());
    labels.flat_map(serde_json::Map::keys).filter_map(|key| key.strip_prefix("f:")).collect()
}

/// Returns the keys of the labels that others have set, from the API server's refusal to apply them.
pub fn of_others(refusal: &Status) -> Vec<&str> {
    let causes = refusal.details.iter().flat_map(|details| &details.causes);
    causes.filter_map(|cause| cause.field.strip_prefix(".metadata.labels.")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(of: &[(&str, &str)]) -> Labels {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    /// As the API server shows an object with labels of guestlet-host, and of kubectl label and kubectl apply.
    fn object() -> ObjectMeta {
        serde_json::from_value(json!({
            "labels": { "app.kubernetes.io/name": "web", "gone": "", "team": "a", "tier": "db" },
            "managedFields": [
                {
                    "manager": "guestlet-host", "operation": "Apply", "apiVersion": "guestlet.io/v1alpha1", "fieldsType": "FieldsV1",
                    "fieldsV1": { "f:metadata": { "f:ownerReferences": { "k:{\"uid\":\"1\"}": {} } } },
                },
                {
                    "manager": "guestlet-host-labels", "operation": "Apply", "apiVersion": "guestlet.io/v1alpha1",
                    "fieldsV1": { "f:metadata": { "f:labels": { "f:app.kubernetes.io/name": {}, "f:gone": {} } } },
                },
                {
                    "manager": "kubectl-label", "operation": "Update", "apiVersion": "guestlet.io/v1alpha1",
                    "fieldsV1": { "f:metadata": { "f:labels": { ".": {}, "f:team": {}, "f:tier": {} } } },
                },
            ],
        }))
        .unwrap()
    }

    #[test]
    fn what_is_there_need_not_be_written() {
        let wanted = labels(&[("app.kubernetes.io/name", "web"), ("gone", ""), ("tier", "web")]);
        assert_eq!(settled(&object(), &wanted), wanted, "the tier is of somebody else");
        for other in [
            labels(&[("app.kubernetes.io/name", "web")]),
            labels(&[("app.kubernetes.io/name", "mail"), ("gone", "")]),
            labels(&[("app.kubernetes.io/name", "web"), ("gone", ""), ("rack", "7")]),
            labels(&[]),
        ] {
            assert_ne!(settled(&object(), &other), other);
        }
        assert_eq!(settled(&ObjectMeta::default(), &wanted), Labels::new());
    }

    #[test]
    fn labels_of_others_are_known_from_the_refusal() {
        let refusal: Status = serde_json::from_value(json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 409, "reason": "Conflict",
            "message": "Apply failed with 2 conflicts: conflicts with \"kubectl-label\" using guestlet.io/v1alpha1: …",
            "details": { "causes": [
                { "reason": "FieldManagerConflict", "message": "conflict with \"kubectl-label\"", "field": ".metadata.labels.tier" },
                {
                    "reason": "FieldManagerConflict", "message": "conflict with \"kubectl-edit\"",
                    "field": ".metadata.labels.app.kubernetes.io/name",
                },
            ] },
        }))
        .unwrap();
        assert_eq!(of_others(&refusal), ["tier", "app.kubernetes.io/name"]);
        let deleted = Status::failure(
            "uid mismatch: the provided object specified uid 1, and no existing object was found",
            "Conflict",
        );
        assert_eq!(of_others(&deleted), [""; 0]);
    }
}
