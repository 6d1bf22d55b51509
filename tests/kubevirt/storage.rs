//! The claims of the host cluster.

use http::{Method, StatusCode};
use serde_json::json;

use crate::client::{MERGE, call};
use crate::lab::{HOSTS, Lab, NEVER, SHARED, wait};
use crate::model::objects::{Kind, name, text, uid};
use crate::model::pace::Step;
use crate::patience::until;

#[test]
fn a_claim_is_bound_grows_and_leaves_nothing() {
    wait(async {
        let lab = Lab::start().await;
        let path = Kind::Claim.path("default/data");
        lab.model.fail(Step::Bind, "data", "no disk has room");
        lab.claim("data", 8).await;
        assert_eq!(lab.told("data", "ProvisioningFailed").await, "no disk has room");
        lab.model.succeed(Step::Bind, "data");
        let claim = until("the claim is bound", async || {
            lab.api.get(&path).await.filter(|claim| claim["status"]["phase"] == "Bound")
        })
        .await;
        assert_eq!(claim["spec"]["volumeName"], format!("pvc-{}", uid(&claim)));

        lab.running("web").await;
        lab.plug("web", "data").await;
        lab.is_in("web", "data", "Ready").await;
        let bigger = json!({ "spec": { "resources": { "requests": { "storage": "16Mi" } } } });
        lab.api.patch(&path, &bigger).await.unwrap();
        until("the VM sees the size", async || {
            let entry = lab.entry("web", "data").await?;
            (entry["size"] == 16 << 20).then_some(())
        })
        .await;
        let claim = lab.api.get(&path).await.unwrap();
        assert_eq!(claim["status"]["capacity"]["storage"], "16Mi");
        let smaller = json!({ "spec": { "resources": { "requests": { "storage": "8Mi" } } } });
        let (status, _) = call(&lab.api, Method::PATCH, &path, MERGE, Some(&smaller)).await.unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);

        // A claim that is used stays until it is not.
        lab.api.delete(&path).await;
        assert!(lab.api.get(&path).await.unwrap()["metadata"]["deletionTimestamp"].is_string());
        lab.model.hold(Step::Detach, "data");
        lab.unplug("web", &["data"]).await;
        lab.has_left("web", "data").await;
        until("the claim is gone", async || lab.api.get(&path).await.is_none().then_some(())).await;
        lab.model.reaches(Step::Detach, "data").await;
        assert_eq!(lab.api.list(&Kind::Attachment.all()).await.len(), 1);
        assert_eq!(lab.api.list(&Kind::Volume.all()).await.len(), 1);
        lab.model.release(Step::Detach, "data");
        until("the volume is gone", async || {
            lab.api.list(&Kind::Volume.all()).await.is_empty().then_some(())
        })
        .await;
        assert!(lab.api.list(&Kind::Attachment.all()).await.is_empty());
    });
}

#[test]
fn a_class_that_nobody_serves_gives_nothing() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim_of(NEVER, "never", 8, "ReadWriteMany").await;
        lab.told("never", "ExternalProvisioning").await;
        lab.claim_of(SHARED, "data", 8, "ReadWriteMany").await;
        until("the other claim is bound", async || {
            let claim = lab.api.get(&Kind::Claim.path("default/data")).await?;
            (claim["status"]["phase"] == "Bound").then_some(())
        })
        .await;
        let claim = lab.api.get(&Kind::Claim.path("default/never")).await.unwrap();
        assert_eq!(claim["status"]["phase"], "Pending");
    });
}

#[test]
fn a_volume_for_one_node_is_not_attached_to_two() {
    wait(async {
        let lab = Lab::start().await;
        lab.claim_of(SHARED, "data", 8, "ReadWriteOnce").await;
        for (vm, host) in ["one", "two"].into_iter().zip(HOSTS) {
            let selector = json!({ "kubernetes.io/hostname": host });
            lab.vm_with(vm, |vm| vm["spec"]["template"]["spec"]["nodeSelector"] = selector).await;
            lab.runs(vm).await;
        }
        lab.plug("one", "data").await;
        lab.is_in("one", "data", "Ready").await;
        lab.plug("two", "data").await;
        let entry = lab.is_in("two", "data", "AttachedToNode").await;
        let pod = text(&entry["hotplugVolume"]["attachPodName"]).to_owned();
        assert!(lab.told(&pod, "FailedAttachVolume").await.contains("Multi-Attach"));
        assert_eq!(lab.attached("data").await, [HOSTS[0]]);
        lab.unplug("one", &["data"]).await;
        lab.is_in("two", "data", "Ready").await;
        assert_eq!(lab.attached("data").await, [HOSTS[1]]);
        assert!(lab.model.journal().conflicts().is_empty());
        assert_eq!(name(&lab.instance("two").await.unwrap()), "two");
    });
}
