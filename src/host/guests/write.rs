//! Requests to the API server that read and write `Guest` objects, and create events.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde_json::json;

use super::labels;
use super::status::Notice;
use crate::host::backends::kubevirt::node::Instance;
use crate::host::backends::kubevirt::objects;
use crate::host::text;
use crate::labels::Labels;
use crate::wire::guest_object::{Guest, Status};

/// Field manager of these objects but for their labels, for server-side apply.
const MANAGER: &str = "guestlet-host";
/// Timeout of a request to the API server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Object under the name of an instance.
pub enum Found {
    /// There is none.
    Nothing,
    /// It is that of an earlier instance, or it cannot be parsed.
    Unusable,
    /// It is that of the instance.
    Own(Box<Guest>),
}

/// Reads a guest's object.
pub async fn found(client: &Client, instance: &Instance) -> Result<Found, String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    let is_its_own = |guest: &Guest| {
        guest.metadata.owner_references.iter().flatten().any(|owner| owner.uid == instance.uid)
    };
    match in_time(guests.get_opt(&instance.name)).await? {
        Ok(None) => Ok(Found::Nothing),
        Ok(Some(guest)) if is_its_own(&guest) => Ok(Found::Own(Box::new(guest))),
        Ok(Some(_)) | Err(kube::Error::SerdeError(_)) => Ok(Found::Unusable),
        Err(error) => Err(words(error)),
    }
}

/// Returns how fields are applied that are guestlet's own: forced, because no other manager may own them.
fn own() -> PatchParams {
    PatchParams::apply(MANAGER).force()
}

/// Builds a patch that applies these fields of a guest's object.
fn patch(fields: serde_json::Value) -> Patch<serde_json::Value> {
    let mut object = json!({"apiVersion": Guest::api_version(&()), "kind": Guest::kind(&())});
    if let (Some(object), serde_json::Value::Object(fields)) = (object.as_object_mut(), fields) {
        object.extend(fields);
    }
    Patch::Apply(object)
}

/// Creates the object of a guest, or makes an existing one that of this instance. Returns its UID.
pub async fn object(client: &Client, instance: &Instance) -> Result<Option<String>, String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    let metadata =
        json!({"name": instance.name, "namespace": instance.namespace, "ownerReferences": [owner(instance)]});
    let fields = patch(json!({"metadata": metadata}));
    let made = answer(guests.patch(&instance.name, &own(), &fields)).await?;
    Ok(made.metadata.uid)
}

/// Writes the status of a guest's object.
pub async fn status(client: &Client, instance: &Instance, status: &Status) -> Result<(), String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    let fields = patch(json!({"status": status}));
    answer(guests.patch_status(&instance.name, &own(), &fields)).await?;
    Ok(())
}

/// Writes the labels of a guest, but for those that others have set on its object.
pub async fn labels(
    client: &Client,
    instance: &Instance,
    object: &str,
    labels: &Labels,
) -> Result<(), String> {
    let guests: Api<Guest> = Api::namespaced(client.clone(), &instance.namespace);
    let params = PatchParams::apply(labels::MANAGER);
    let mut ours = labels.clone();
    loop {
        // With the UID, an object that has been deleted is not created again, without an owner.
        let mut metadata = json!({"name": instance.name, "namespace": instance.namespace, "uid": object});
        // An empty map would be a field of its own, and owned.
        if !ours.is_empty() {
            metadata["labels"] = json!(ours);
        }
        let fields = patch(json!({"metadata": metadata}));
        let refusal = match in_time(guests.patch(&instance.name, &params, &fields)).await? {
            Ok(guest) if guest.metadata.uid.as_deref() == Some(object) => return Ok(()),
            // An old API server has created it all the same.
            Ok(_) => return Err(format!("the Guest {} was deleted", instance.name)),
            Err(kube::Error::Api(refusal)) => refusal,
            Err(error) => return Err(words(error)),
        };
        let before = ours.len();
        for key in labels::of_others(&refusal) {
            ours.remove(key);
        }
        // Each round leaves at least one more label to others.
        if ours.len() == before {
            return Err(refusal.message);
        }
    }
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

async fn answer<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    in_time(asked).await?.map_err(words)
}

/// Returns the API server's own message for an error, or the reason why there is no answer.
fn words(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message,
        error => text::chain(&error),
    }
}

/// Waits for the answer to a request, for at most `PATIENCE`.
async fn in_time<T>(asked: impl Future<Output = T>) -> Result<T, String> {
    let late = |_| format!("no answer within {} s", PATIENCE.as_secs());
    tokio::time::timeout(PATIENCE, asked).await.map_err(late)
}
