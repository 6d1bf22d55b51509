//! The kinds of snapshots, and how the tests make some.

use std::time::SystemTime;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::api::Api;
use crate::client::{JSON, call};
use crate::model::objects::text;
use crate::patience::until;
use crate::pool::add_kind;

pub const KINDS: [(&str, &str); 3] = [
    ("virtualmachinesnapshots.snapshot.kubevirt.io", include_str!("crds/virtualmachinesnapshots.yaml")),
    ("volumesnapshots.snapshot.storage.k8s.io", include_str!("crds/volumesnapshots.yaml")),
    ("volumesnapshotcontents.snapshot.storage.k8s.io", include_str!("crds/volumesnapshotcontents.yaml")),
];
pub const OF_VMS: &str = "/apis/snapshot.kubevirt.io/v1beta1/namespaces/default/virtualmachinesnapshots";
pub const OF_CLAIMS: &str = "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots";
const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
pub const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// Has the cluster know snapshots, and none of an earlier test.
pub async fn install(api: &Api) {
    for (_, kind) in KINDS {
        add_kind(api, kind).await;
    }
    for path in [OF_VMS, OF_CLAIMS, CONTENTS] {
        until(&format!("{path} is served"), async || {
            (status(api, path).await? == StatusCode::OK).then_some(())
        })
        .await;
        for left in api.list(path).await {
            api.delete(&format!("{path}/{}", text(&left["metadata"]["name"]))).await;
        }
    }
}

/// Has it not know them.
pub async fn remove(api: &Api) {
    for (name, _) in KINDS {
        api.delete(&format!("{CRDS}/{name}")).await;
        until(&format!("{name} is gone"), async || {
            api.get(&format!("{CRDS}/{name}")).await.is_none().then_some(())
        })
        .await;
    }
    for path in [OF_VMS, OF_CLAIMS] {
        let is_gone = async || (status(api, path).await? == StatusCode::NOT_FOUND).then_some(());
        until("the kind is not served", is_gone).await;
    }
}

/// How the server answers a request for this, which may be no JSON.
async fn status(api: &Api, path: &str) -> Option<StatusCode> {
    call(api, Method::GET, path, JSON, None).await.ok().map(|(status, _)| status)
}

/// Makes an object of this kind among those of a path.
async fn create(api: &Api, path: &str, kind: &str, mut object: Value) -> Value {
    let version = path.trim_start_matches("/apis/").split('/').take(2).collect::<Vec<_>>().join("/");
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    api.create(path, &object).await
}

/// Makes the snapshot of a claim, with these owners.
pub async fn ask(api: &Api, name: &str, claim: &str, owners: Value) -> Value {
    let source = json!({"persistentVolumeClaimName": claim});
    let metadata = json!({"name": name, "ownerReferences": owners});
    create(api, OF_CLAIMS, "VolumeSnapshot", json!({"metadata": metadata, "spec": {"source": source}})).await
}

/// What owns the snapshots of claims that belong to this snapshot of a VM.
pub fn owners(of: &str) -> Value {
    json!([{
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshotContent",
        "name": format!("content-{of}"), "uid": "5c0f0a52-5c0f-4a8e-9d1b-0d7a2f3b4c01", "controller": true,
    }])
}

/// In microseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros().try_into().unwrap()
}

pub const SECOND: i64 = 1_000_000;

/// Has the snapshot of a claim cut at this moment, in microseconds since 1970.
pub async fn cut(api: &Api, snapshot: &Value, at: i64) {
    let metadata = &snapshot["metadata"];
    let name = text(&metadata["name"]);
    let content = json!({
        "metadata": {"name": format!("content-of-{name}")},
        "spec": {
            "deletionPolicy": "Delete", "driver": "test", "source": {"volumeHandle": "1"},
            "volumeSnapshotRef": {"namespace": "default", "name": name, "uid": metadata["uid"]},
        },
    });
    let content = create(api, CONTENTS, "VolumeSnapshotContent", content).await;
    let bound = text(&content["metadata"]["name"]);
    let status = json!({"status": {"creationTime": at * 1000, "readyToUse": true}});
    api.patch(&format!("{CONTENTS}/{bound}/status"), &status).await.unwrap();
    let seconds = prost_types::Timestamp { seconds: at / SECOND, nanos: 0 };
    let status = json!({"status": {
        "creationTime": seconds.to_string(), "boundVolumeSnapshotContentName": bound, "readyToUse": true,
    }});
    api.patch(&format!("{OF_CLAIMS}/{name}/status"), &status).await.unwrap();
}

/// Makes the snapshot of a VM, all of which is cut.
pub async fn machine(api: &Api, name: &str, uid: &str, included: &[&str], excluded: &[&str]) {
    let source = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "web"});
    let snapshot = json!({"metadata": {"name": name}, "spec": {"source": source}});
    create(api, OF_VMS, "VirtualMachineSnapshot", snapshot).await;
    let seconds = prost_types::Timestamp { seconds: now() / SECOND, nanos: 0 };
    let status = json!({"status": {
        "phase": "Succeeded", "sourceUID": uid, "creationTime": seconds.to_string(),
        "virtualMachineSnapshotContentName": format!("content-{name}"),
        "snapshotVolumes": {"includedVolumes": included, "excludedVolumes": excluded},
    }});
    api.patch(&format!("{OF_VMS}/{name}/status"), &status).await.unwrap();
}
