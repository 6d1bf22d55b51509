//! Requests to the API server that read and write `Guest` objects, and create events.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde_json::json;

use super::status::Notice;
use crate::host::backends::kubevirt::node::Instance;
use crate::host::backends::kubevirt::objects;
use crate::host::text;
use crate::wire::guest_object::{Guest, Status};

/// Field manager of these objects, for server-side apply.
const MANAGER: &str = "guestlet-host";
/// Timeout of a request to the API server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads the status of a guest's object; `None` if this instance has no object, or one that cannot be parsed.
pub async fn found(client: &Client, instance: &Instance) -> Result<Option<Status>, String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    let got = async {
        match guests.get_opt(&instance.name).await {
            Err(kube::Error::SerdeError(_)) => Ok(None),
            got => got,
        }
    };
    let is_its_own = |guest: &Guest| {
        guest.metadata.owner_references.iter().flatten().any(|owner| owner.uid == instance.uid)
    };
    Ok(answer(got).await?.filter(is_its_own).map(|guest| guest.status))
}

/// Writes the status of a guest; with `make`, creates its object first.
pub async fn guest(client: &Client, instance: &Instance, status: &Status, make: bool) -> Result<(), String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    // Forced, because no other manager may own these fields.
    let params = PatchParams::apply(MANAGER).force();
    let head = json!({"apiVersion": Guest::api_version(&()), "kind": Guest::kind(&())});
    let patch = |rest: serde_json::Value| {
        let mut object = head.clone();
        if let (Some(object), serde_json::Value::Object(rest)) = (object.as_object_mut(), rest) {
            object.extend(rest);
        }
        Patch::Apply(object)
    };
    if make {
        let metadata = json!({"name": instance.name, "namespace": instance.namespace, "ownerReferences": [owner(instance)]});
        answer(guests.patch(&instance.name, &params, &patch(json!({"metadata": metadata})))).await?;
    }
    answer(guests.patch_status(&instance.name, &params, &patch(json!({"status": status})))).await?;
    Ok(())
}

/// Creates an event of the VirtualMachineInstance.
pub async fn event(client: &Client, instance: &Instance, node: &str, notice: &Notice) -> Result<(), String> {
    let events: Api<Event> = Api::namespaced(client.clone(), &instance.namespace);
    let now = Time(Timestamp::now());
    let OwnerReference { api_version, kind, name, uid, .. } = owner(instance);
    // The name of an event is limited to 253 characters, and the server appends five random ones.
    let prefix: String = instance.name.chars().take(240).collect();
    let event = Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}.", prefix.trim_end_matches('.'))),
            namespace: Some(instance.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(api_version),
            kind: Some(kind),
            name: Some(name),
            namespace: Some(instance.namespace.clone()),
            uid: Some(uid),
            ..ObjectReference::default()
        },
        type_: Some(if notice.is_warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(notice.reason.to_owned()),
        message: Some(notice.message.clone()),
        source: Some(EventSource { component: Some(MANAGER.to_owned()), host: Some(node.to_owned()) }),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        ..Event::default()
    };
    answer(events.create(&PostParams::default(), &event)).await?;
    Ok(())
}

fn owner(instance: &Instance) -> OwnerReference {
    OwnerReference {
        api_version: objects::Instance::api_version(&()).into_owned(),
        kind: objects::Instance::kind(&()).into_owned(),
        name: instance.name.clone(),
        uid: instance.uid.clone(),
        ..OwnerReference::default()
    }
}

async fn answer<T: Debug>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
        Ok(Err(error)) => Err(text::chain(&error)),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}
