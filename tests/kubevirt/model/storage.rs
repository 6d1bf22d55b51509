//! The storage of the hosts: the volumes of claims, how they grow and go, and where they are attached.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::{Value, json};

use super::objects::{Kind, bytes, claim_of, is_deleted, items, key, name, namespace, text, uid};
use super::pace::{Step, Turn};
use super::world::{Done, World, now};

/// The provisioner and attacher that the model plays. A class with another one never gets a volume.
pub const PROVISIONER: &str = "storage.model.test";
const FINALIZER: &str = "external-attacher/storage-model-test";

impl World {
    pub(super) async fn claim(&mut self, key: &str) -> Done {
        let Some(claim) = self.get(Kind::Claim, key) else { return Ok(()) };
        if text(&claim["spec"]["volumeName"]).is_empty() {
            let annotation =
                &claim["metadata"]["annotations"]["volume.beta.kubernetes.io/storage-provisioner"];
            if annotation == PROVISIONER && !is_deleted(&claim) {
                self.provision(&claim).await?;
            }
            return Ok(());
        }
        self.expand(&claim).await
    }

    async fn provision(&mut self, claim: &Value) -> Done {
        let volume = format!("pvc-{}", uid(claim));
        if self.objects.get(Kind::Volume, &volume).is_some() {
            return Ok(());
        }
        match self.turn(Step::Bind, name(claim), uid(claim)) {
            Turn::Wait => return Ok(()),
            Turn::Fail(message) => {
                return self.tell(Kind::Claim, claim, "ProvisioningFailed", &message).await;
            }
            Turn::Go => {}
        }
        let spec = &claim["spec"];
        let class = self.get(Kind::Class, text(&spec["storageClassName"])).unwrap_or_default();
        let volume = json!({
            "metadata": { "name": volume, "annotations": { "pv.kubernetes.io/provisioned-by": PROVISIONER } },
            "spec": {
                "capacity": spec["resources"]["requests"],
                "accessModes": spec["accessModes"],
                "volumeMode": spec["volumeMode"],
                "storageClassName": spec["storageClassName"],
                "persistentVolumeReclaimPolicy": class["reclaimPolicy"],
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": namespace(claim),
                    "name": name(claim),
                    "uid": uid(claim),
                },
                "csi": { "driver": PROVISIONER, "volumeHandle": volume },
            },
        });
        self.create(Kind::Volume, &volume).await.map(drop)
    }

    async fn expand(&mut self, claim: &Value) -> Done {
        let wanted = &claim["spec"]["resources"]["requests"]["storage"];
        let has = &claim["status"]["capacity"]["storage"];
        if has.is_null() || bytes(wanted) <= bytes(has) {
            return Ok(());
        }
        let Some(volume) = self.get(Kind::Volume, text(&claim["spec"]["volumeName"])) else { return Ok(()) };
        match self.turn(Step::Expand, name(claim), &format!("{}={wanted}", uid(claim))) {
            Turn::Wait => return Ok(()),
            Turn::Fail(message) => {
                return self.tell(Kind::Claim, claim, "VolumeResizeFailed", &message).await;
            }
            Turn::Go => {}
        }
        let capacity = json!({ "storage": wanted });
        self.patch(Kind::Volume, &volume, &json!({ "spec": { "capacity": capacity } })).await?;
        self.patch_status(Kind::Claim, claim, &json!({ "capacity": capacity })).await.map(drop)
    }

    /// Deletes a volume whose claim is gone.
    pub(super) async fn volume(&mut self, key: &str) -> Done {
        let Some(volume) = self.get(Kind::Volume, key) else { return Ok(()) };
        let is_to_go = volume["status"]["phase"] == "Released"
            && volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
            && volume["spec"]["csi"]["driver"] == PROVISIONER
            && !is_deleted(&volume);
        let is_attached = self.objects.of(Kind::Attachment).any(|it| attached(it) == key);
        if is_to_go && !is_attached && self.may(Step::Erase, claim_named(&volume), key) {
            return self.delete(Kind::Volume, &volume, false).await;
        }
        Ok(())
    }

    /// Wants the volumes attached that pods of nodes need.
    pub(super) async fn attach(&mut self) -> Done {
        for (volume, node, pod) in self.needed() {
            let id = attachment(&volume, &node);
            if self.objects.get(Kind::Attachment, &id).is_some() {
                continue;
            }
            let Some(object) = self.objects.get(Kind::Volume, &volume) else { continue };
            let is_shared = items(&object["spec"]["accessModes"]).any(|mode| mode != "ReadWriteOnce");
            let is_elsewhere = self.objects.of(Kind::Attachment).any(|it| attached(it) == volume);
            if is_elsewhere && !is_shared {
                let Some(pod) = self.get(Kind::Pod, &pod) else { continue };
                let message =
                    format!("Multi-Attach error for volume \"{volume}\": it is attached to another node");
                self.tell(Kind::Pod, &pod, "FailedAttachVolume", &message).await?;
                continue;
            }
            let wanted = json!({
                "metadata": { "name": id, "finalizers": [FINALIZER] },
                "spec": {
                    "attacher": PROVISIONER,
                    "nodeName": node,
                    "source": { "persistentVolumeName": volume },
                },
            });
            self.create(Kind::Attachment, &wanted).await?;
        }
        Ok(())
    }

    pub(super) async fn attachment(&mut self, key: &str) -> Done {
        let Some(object) = self.get(Kind::Attachment, key) else { return Ok(()) };
        if object["spec"]["attacher"] != PROVISIONER {
            return Ok(());
        }
        let (volume, node) = (attached(&object).to_owned(), text(&object["spec"]["nodeName"]).to_owned());
        let claim = self.objects.get(Kind::Volume, &volume).map(|it| claim_named(it).to_owned());
        let claim = claim.unwrap_or_else(|| volume.clone());
        let pods: Vec<_> = self
            .needed()
            .into_iter()
            .filter(|(its, at, _)| *its == volume && *at == node)
            .map(|(.., pod)| pod)
            .collect();
        if is_deleted(&object) {
            let is_to_go = object["metadata"]["finalizers"].is_array() && self.can_detach(&node);
            if is_to_go && self.may(Step::Detach, &claim, uid(&object)) {
                self.patch(Kind::Attachment, &object, &json!({ "metadata": { "finalizers": null } })).await?;
            }
            return Ok(());
        }
        if pods.is_empty() {
            return self.delete(Kind::Attachment, &object, false).await;
        }
        if object["status"]["attached"] == true {
            return Ok(());
        }
        match self.turn(Step::Attach, &claim, uid(&object)) {
            Turn::Wait => Ok(()),
            Turn::Go => {
                let status = json!({ "attached": true, "attachError": null });
                self.patch_status(Kind::Attachment, &object, &status).await.map(drop)
            }
            Turn::Fail(message) => self.refuse(&object, &pods, &message).await,
        }
    }

    /// Whether the volumes of a node can be detached: it answers, is gone, or was declared to be off. (Kubernetes does it
    /// after six minutes as well, which no test waits for.)
    fn can_detach(&self, node: &str) -> bool {
        const OFF: &str = "node.kubernetes.io/out-of-service";
        let found = self.objects.get(Kind::Node, node);
        let is_off = |node: &Value| items(&node["spec"]["taints"]).any(|taint| taint["key"] == OFF);
        self.shared.lives(node) || found.is_none_or(is_off)
    }

    async fn refuse(&mut self, attachment: &Value, pods: &[String], message: &str) -> Done {
        if attachment["status"]["attachError"]["message"] != message {
            let error = json!({ "message": message, "time": now() });
            let status = json!({ "attached": false, "attachError": error });
            self.patch_status(Kind::Attachment, attachment, &status).await?;
        }
        let message =
            format!("AttachVolume.Attach failed for volume \"{}\" : {message}", attached(attachment));
        for pod in pods {
            let Some(pod) = self.get(Kind::Pod, pod) else { continue };
            self.tell(Kind::Pod, &pod, "FailedAttachVolume", &message).await?;
        }
        Ok(())
    }

    /// Which volumes are needed on which nodes, and the key of the pod that needs each. A pod needs them until it is gone.
    fn needed(&self) -> BTreeSet<(String, String, String)> {
        let mut needed = BTreeSet::new();
        for pod in self.objects.of(Kind::Pod) {
            let node = text(&pod["spec"]["nodeName"]);
            let has_ended = matches!(text(&pod["status"]["phase"]), "Succeeded" | "Failed");
            if node.is_empty() || (has_ended && !is_deleted(pod)) {
                continue;
            }
            for claim in items(&pod["spec"]["volumes"]).filter_map(claim_of) {
                if let Some(volume) = self.volume_of(pod, claim) {
                    needed.insert((volume.to_owned(), node.to_owned(), key(pod)));
                }
            }
        }
        needed
    }

    /// The volume to which a claim of an object's namespace is bound.
    pub(super) fn volume_of(&self, object: &Value, claim: &str) -> Option<&str> {
        let claim = self.claim_beside(object, claim)?;
        (claim["status"]["phase"] == "Bound").then(|| text(&claim["spec"]["volumeName"]))
    }

    /// Whether all volumes of a pod are attached to its node.
    pub(super) fn is_attached(&self, pod: &Value) -> bool {
        let node = text(&pod["spec"]["nodeName"]);
        items(&pod["spec"]["volumes"]).filter_map(claim_of).all(|claim| {
            let Some(volume) = self.volume_of(pod, claim) else { return false };
            let found = self.objects.get(Kind::Attachment, &attachment(volume, node));
            found.is_some_and(|found| found["status"]["attached"] == true && !is_deleted(found))
        })
    }
}

/// The volume that an attachment is of.
fn attached(attachment: &Value) -> &str {
    text(&attachment["spec"]["source"]["persistentVolumeName"])
}

/// The name of the claim that a volume was made for.
pub fn claim_named(volume: &Value) -> &str {
    text(&volume["spec"]["claimRef"]["name"])
}

/// The name of the attachment of a volume to a node.
fn attachment(volume: &str, node: &str) -> String {
    let mut hasher = DefaultHasher::new();
    (volume, node).hash(&mut hasher);
    format!("csi-{:016x}", hasher.finish())
}
