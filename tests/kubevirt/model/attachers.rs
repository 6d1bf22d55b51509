//! virt-controller's part of hot-plugged volumes: one attachment pod for all volumes of an instance, and the first and the last
//! phases of each volume's status.
//!
//! ```text
//! Pending ─▶ Bound ─▶ AttachedToNode ─▶ MountedToPod ─▶ Ready ─▶ UnMountedFromPod ─▶ Detaching ─▶ (no entry)
//! └── virt-controller ────────────┘    └── virt-handler ────────────────────────┘    └ virt-controller ┘
//! ```

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::controller::owner;
use super::instance::{NUMBER, new_pod};
use super::journal::Generation;
use super::kubelet::{ATTACHER, HOSTNAME, is_ready};
use super::objects::{Kind, claim_of, is_deleted, is_hotpluggable, items, key, name, named, text, uid};
use super::pace::Step;
use super::world::{Done, World};

/// Which attachment pod has what an instance is to have now, and which are those from before, the last made first.
struct Pods {
    current: Option<Value>,
    old: Vec<Value>,
}

impl World {
    /// Makes and ends attachment pods.
    pub(super) async fn attach_volumes(&mut self, instance: &Value, launcher: &Value) -> Done {
        let is_bound =
            |volume: &&Value| claim_of(volume).is_some_and(|it| self.volume_of(instance, it).is_some());
        let ready: Vec<Value> = hotplugged(instance).filter(is_bound).cloned().collect();
        let pods = sort(self.attachers(launcher), &ready);
        // One that still waits blocks all that come after, also while it is being deleted.
        let is_pending = pods.old.iter().any(|pod| pod["status"]["phase"] == "Pending");
        if pods.current.is_none() && !ready.is_empty() && !is_pending && !is_deleted(launcher) {
            let names: Vec<_> = ready.iter().map(|volume| text(&volume["name"]).to_owned()).collect();
            if self.may(Step::MakePod, name(instance), &format!("{}-{}", uid(launcher), names.join("/"))) {
                let node = text(&launcher["spec"]["nodeName"]).to_owned();
                self.make_attacher(instance, launcher, &ready, &node).await?;
                return Ok(());
            }
        }
        self.end_old(instance, &pods, !ready.is_empty()).await
    }

    pub(super) async fn make_attacher(
        &mut self,
        instance: &Value,
        launcher: &Value,
        volumes: &[Value],
        node: &str,
    ) -> Done<Value> {
        let mut pod = new_pod(instance, "hp-volume", ATTACHER, ATTACHER, volumes.iter());
        pod["metadata"]["ownerReferences"] = json!([owner(Kind::Pod, launcher)]);
        pod["metadata"]["annotations"] = json!({ NUMBER: self.shared.next().to_string() });
        pod["spec"]["nodeSelector"] = json!({ HOSTNAME: node });
        let made = self.create(Kind::Pod, &pod).await?;
        let volumes = volumes.iter().map(|volume| text(&volume["name"]).to_owned()).collect();
        let generation = Generation { pod: name(&made).to_owned(), volumes };
        self.shared.journal().generations.entry(key(instance)).or_default().push(generation);
        Ok(made)
    }

    async fn end_old(&mut self, instance: &Value, pods: &Pods, has_ready: bool) -> Done {
        let current_runs = pods.current.as_ref().is_some_and(is_ready);
        let mut is_one_kept = false;
        for pod in pods.old.iter().filter(|pod| !is_deleted(pod)) {
            let runs = pod["status"]["phase"] == "Running";
            // The last that ran stays until the next does.
            if !is_one_kept && runs && has_ready && !current_runs {
                is_one_kept = true;
                continue;
            }
            // What the domain still has must be unplugged first.
            let is_used = items(&pod["spec"]["volumes"]).any(|volume| {
                let volume = text(&volume["name"]);
                let is_wanted = named(&instance["spec"]["volumes"], volume).is_some();
                let entry = named(&instance["status"]["volumeStatus"], volume);
                let phase = entry.map(|entry| text(&entry["phase"]));
                !is_wanted && matches!(phase, Some("Ready" | "MountedToPod"))
            });
            if !is_used {
                self.delete(Kind::Pod, pod, false).await?;
            }
        }
        Ok(())
    }

    /// What virt-controller has to say of an instance's volumes: the entries that are, in their order.
    pub(super) fn entries(&self, instance: &Value, launcher: &Value) -> Vec<Value> {
        let known = &instance["status"]["volumeStatus"];
        let pods = self.attachers(launcher);
        let mut entries = Vec::new();
        for volume in items(&instance["spec"]["volumes"]) {
            let entry = named(known, text(&volume["name"])).cloned();
            let mut entry = entry.unwrap_or_else(|| json!({ "name": volume["name"], "target": "" }));
            if is_hotpluggable(volume) {
                self.hot_entry(instance, volume, &pods, &mut entry);
            }
            if let Some(claim) = claim_of(volume).and_then(|claim| self.claim_beside(instance, claim)) {
                entry["persistentVolumeClaimInfo"] = json!({
                    "claimName": name(claim),
                    "accessModes": claim["spec"]["accessModes"],
                    "volumeMode": claim["spec"]["volumeMode"],
                    "capacity": claim["status"]["capacity"],
                    "requests": claim["spec"]["resources"]["requests"],
                });
                let info = entry["persistentVolumeClaimInfo"].as_object_mut().expect("an object");
                info.retain(|_, value| !value.is_null());
            }
            entries.push(entry);
        }
        let is_gone = |entry: &&Value| named(&instance["spec"]["volumes"], text(&entry["name"])).is_none();
        for entry in items(known).filter(is_gone) {
            // The entry outlives the volume in the spec for as long as there is a pod that has it.
            let Some(pod) = pod_with(&pods, text(&entry["name"])) else { continue };
            let mut entry = entry.clone();
            entry["hotplugVolume"] = json!({ "attachPodName": name(pod), "attachPodUID": uid(pod) });
            if is_deleted(pod) && !matches!(text(&entry["phase"]), "Ready" | "MountedToPod") {
                say(&mut entry, "Detaching", "SuccessfulDelete", "the attachment pod is deleted");
            }
            entries.push(entry);
        }
        entries
    }

    fn hot_entry(&self, instance: &Value, volume: &Value, pods: &[Value], entry: &mut Value) {
        let phase = text(&entry["phase"]).to_owned();
        let has_begun = matches!(phase.as_str(), "AttachedToNode" | "MountedToPod" | "Ready");
        let before = entry["hotplugVolume"]["attachPodName"].clone();
        match pod_with(pods, text(&volume["name"])) {
            Some(pod) => {
                let uid = if is_ready(pod) { uid(pod) } else { "" };
                entry["hotplugVolume"] = json!({ "attachPodName": name(pod), "attachPodUID": uid });
                if !has_begun {
                    say(entry, "AttachedToNode", "SuccessfulCreate", "the attachment pod is made");
                }
            }
            None if has_begun => {
                entry["hotplugVolume"] = json!({ "attachPodName": before, "attachPodUID": "" });
                entry["hotplugVolume"]
                    .as_object_mut()
                    .expect("an object")
                    .retain(|_, value| !value.is_null());
            }
            None => {
                entry["hotplugVolume"] = json!({});
                let name = claim_of(volume).unwrap_or_default();
                match self.claim_beside(instance, name).map(|claim| claim["status"]["phase"] == "Bound") {
                    None => say(entry, "Pending", "FailedPvcNotFound", &format!("there is no claim {name}")),
                    Some(false) => say(entry, "Pending", "PVCNotReady", "the claim is not bound"),
                    Some(true) => say(entry, "Bound", "PVCNotReady", "the claim is bound"),
                }
            }
        }
    }
}

/// The hot-plugged volumes in an instance's spec.
pub fn hotplugged(instance: &Value) -> impl Iterator<Item = &Value> {
    items(&instance["spec"]["volumes"]).filter(|volume| is_hotpluggable(volume))
}

fn sort(pods: Vec<Value>, ready: &[Value]) -> Pods {
    let wanted: BTreeSet<_> = ready.iter().map(|volume| text(&volume["name"])).collect();
    let (mut current, mut old) = (None, Vec::new());
    for pod in pods {
        let has: BTreeSet<_> = items(&pod["spec"]["volumes"]).map(|volume| text(&volume["name"])).collect();
        let is_usable = !is_deleted(&pod) && pod["status"]["phase"] != "Failed";
        if current.is_none() && is_usable && has == wanted {
            current = Some(pod);
        } else {
            old.push(pod);
        }
    }
    Pods { current, old }
}

/// The last made of the pods that have a volume.
fn pod_with<'p>(pods: &'p [Value], volume: &str) -> Option<&'p Value> {
    pods.iter().find(|pod| named(&pod["spec"]["volumes"], volume).is_some())
}

/// Puts an entry into a phase.
pub fn say(entry: &mut Value, phase: &str, reason: &str, message: &str) {
    entry["phase"] = json!(phase);
    entry["reason"] = json!(reason);
    entry["message"] = json!(message);
}
