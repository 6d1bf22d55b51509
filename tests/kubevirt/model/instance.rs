//! virt-controller's part of instances: their launchers, phases and ends.

use serde_json::{Value, json};

use super::controller::{KEEPS_INSTANCE, is_final, is_owned_by, new_uuid, owner};
use super::kubelet::{ATTACHER, HOSTNAME, LAUNCHER, OF, ROLE, is_ready};
use super::objects::{
    Kind, claim_of, is_deleted, is_hotpluggable, items, name, namespace, text, uid, with_condition,
};
use super::pace::Step;
use super::world::{Done, World};

/// Where an instance runs, and where one that is being moved will.
pub const NODE: &str = "kubevirt.io/nodeName";
pub const TARGET: &str = "kubevirt.io/migrationTargetNodeName";
/// On the launcher at the target of a migration: the UID of that.
pub const FOR: &str = "kubevirt.io/migrationJobUID";

impl World {
    pub(super) async fn instance(&mut self, key: &str) -> Done {
        let Some(instance) = self.get(Kind::Vmi, key) else { return Ok(()) };
        if is_deleted(&instance) || is_final(&instance) {
            return self.end(&instance).await;
        }
        let launcher = self.launcher(&instance);
        match (text(&instance["status"]["phase"]), launcher) {
            ("", _) => self.set_phase(&instance, "Pending").await,
            ("Pending", None) => self.make_launcher(&instance).await,
            ("Pending", Some(_)) => self.set_phase(&instance, "Scheduling").await,
            ("Scheduling", Some(launcher)) if is_ready(&launcher) => self.place(&instance, &launcher).await,
            ("Scheduled", Some(launcher)) => self.boot(&instance, &launcher).await,
            ("Running", Some(launcher)) => self.tend(&instance, &launcher).await,
            // The pod was taken away: what ran in it has ended if its kubelet could do that.
            ("Scheduled" | "Running", None) => {
                if self.shared.lives(text(&instance["status"]["nodeName"])) {
                    self.stop(&instance);
                }
                self.set_phase(&instance, "Failed").await
            }
            _ => Ok(()),
        }
    }

    async fn set_phase(&mut self, instance: &Value, phase: &str) -> Done {
        self.patch_status(Kind::Vmi, instance, &json!({ "phase": phase })).await.map(drop)
    }

    /// The launchers of an instance, also those that are going.
    pub(super) fn launchers(&self, instance: &Value) -> Vec<Value> {
        self.find(Kind::Pod, |pod| {
            pod["metadata"]["labels"][ROLE] == LAUNCHER && is_owned_by(pod, uid(instance))
        })
    }

    /// The launcher that an instance has; not one to which it is only being moved.
    pub(super) fn launcher(&self, instance: &Value) -> Option<Value> {
        let node = instance["status"]["nodeName"].as_str().unwrap_or_default();
        self.launchers(instance).into_iter().find(|pod| {
            if node.is_empty() {
                pod["metadata"]["labels"][FOR].is_null()
            } else {
                pod["spec"]["nodeName"] == node
            }
        })
    }

    /// The attachment pods of a launcher, the last made first.
    pub(super) fn attachers(&self, launcher: &Value) -> Vec<Value> {
        let mut pods = self.find(Kind::Pod, |pod| {
            pod["metadata"]["labels"][ROLE] == ATTACHER && is_owned_by(pod, uid(launcher))
        });
        let number = |pod: &Value| text(&pod["metadata"]["annotations"][NUMBER]).parse::<u64>().unwrap_or(0);
        pods.sort_by_key(|pod| std::cmp::Reverse(number(pod)));
        pods
    }

    async fn make_launcher(&mut self, instance: &Value) -> Done {
        let volumes = items(&instance["spec"]["volumes"]).filter(|volume| !is_hotpluggable(volume));
        let claims: Vec<_> = volumes.filter_map(claim_of).map(str::to_owned).collect();
        if claims.iter().all(|claim| self.volume_of(instance, claim).is_some()) {
            self.create(Kind::Pod, &new_launcher(instance, None, None)).await?;
        }
        Ok(())
    }

    /// The launcher runs: the instance has a node.
    async fn place(&mut self, instance: &Value, launcher: &Value) -> Done {
        let node = text(&launcher["spec"]["nodeName"]).to_owned();
        let mut status =
            json!({ "phase": "Scheduled", "nodeName": node, "activePods": { uid(launcher): node } });
        let wants = instance["spec"]["domain"]["devices"]["autoattachVSOCK"] == true;
        if wants && self.has_gate("VSOCK", 10) && instance["status"]["VSOCKCID"].is_null() {
            status["VSOCKCID"] = json!(self.new_cid());
        }
        let change = json!({ "metadata": { "labels": { NODE: node } }, "status": status });
        self.patch(Kind::Vmi, instance, &change).await.map(drop)
    }

    /// One that no instance has.
    fn new_cid(&self) -> u32 {
        loop {
            let random = u32::from_str_radix(&new_uuid()[..8], 16).expect("hexadecimal digits").max(3);
            if self.objects.of(Kind::Vmi).all(|instance| instance["status"]["VSOCKCID"] != random) {
                return random;
            }
        }
    }

    /// Says whether an instance could be moved.
    pub(super) async fn judge(&mut self, instance: &Value) -> Done<Value> {
        let is_shared =
            |claim: &Value| items(&claim["spec"]["accessModes"]).any(|mode| mode == "ReadWriteMany");
        let mut claims = items(&instance["spec"]["volumes"]).filter_map(claim_of);
        let can_move = claims.all(|claim| self.claim_beside(instance, claim).is_none_or(is_shared));
        let (status, reason) = if can_move { ("True", "") } else { ("False", "DisksNotLiveMigratable") };
        let conditions = with_condition(instance, "LiveMigratable", status, reason);
        if conditions == instance["status"]["conditions"] {
            return Ok(instance.clone());
        }
        self.patch_status(Kind::Vmi, instance, &json!({ "conditions": conditions })).await
    }

    /// The instance is to go, or its domain has ended: its pods go, then what keeps it.
    async fn end(&mut self, instance: &Value) -> Done {
        if self.runs(instance) {
            let lives = self.shared.lives(text(&instance["status"]["nodeName"]));
            let can_end = lives && self.may(Step::ShutDown, name(instance), uid(instance));
            if can_end {
                self.stop(instance);
            } else if lives || !self.launchers(instance).is_empty() {
                return self.end_pods(instance).await;
            }
            // Else its pods were taken away by force, and what runs on a node that nobody reaches runs on.
        }
        if !is_final(instance) {
            return self.set_phase(instance, "Succeeded").await;
        }
        self.end_pods(instance).await?;
        let is_kept = is_deleted(instance) && instance["metadata"]["finalizers"].is_array();
        if is_kept && self.launchers(instance).is_empty() {
            let rest: Vec<_> = items(&instance["metadata"]["finalizers"])
                .filter(|finalizer| *finalizer != KEEPS_INSTANCE && *finalizer != "foregroundDeletion")
                .collect();
            let rest = if rest.is_empty() { Value::Null } else { json!(rest) };
            self.patch(Kind::Vmi, instance, &json!({ "metadata": { "finalizers": rest } })).await?;
        }
        Ok(())
    }

    async fn end_pods(&mut self, instance: &Value) -> Done {
        for launcher in self.launchers(instance) {
            for pod in self.attachers(&launcher).into_iter().chain([launcher]) {
                if !is_deleted(&pod) {
                    self.delete(Kind::Pod, &pod, false).await?;
                }
            }
        }
        Ok(())
    }
}

/// Tells the attachment pods of a launcher apart: a later one has a higher number.
pub const NUMBER: &str = "model.test/number";

/// A launcher, for a migration of this UID to a node, if it is for one.
pub fn new_launcher(instance: &Value, migration: Option<&str>, node: Option<&str>) -> Value {
    let volumes = items(&instance["spec"]["volumes"]).filter(|volume| !is_hotpluggable(volume));
    let mut pod = new_pod(instance, "virt-launcher", LAUNCHER, "compute", volumes);
    pod["metadata"]["labels"]["kubevirt.io/created-by"] = json!(uid(instance));
    pod["metadata"]["annotations"] = json!({ "kubevirt.io/domain": name(instance) });
    pod["metadata"]["ownerReferences"] = json!([owner(Kind::Vmi, instance)]);
    if let Some(migration) = migration {
        pod["metadata"]["labels"][FOR] = json!(migration);
    }
    let selector = node.map_or(instance["spec"]["nodeSelector"].clone(), |node| json!({ HOSTNAME: node }));
    pod["spec"]["nodeSelector"] = selector;
    pod
}

/// A pod of an instance that has the claims of these volumes.
pub fn new_pod<'v>(
    instance: &Value,
    prefix: &str,
    role: &str,
    container: &str,
    volumes: impl Iterator<Item = &'v Value>,
) -> Value {
    let volumes: Vec<_> = volumes
        .filter_map(|volume| {
            let claim = claim_of(volume)?;
            Some(json!({ "name": volume["name"], "persistentVolumeClaim": { "claimName": claim } }))
        })
        .collect();
    let end = &new_uuid()[..8];
    let of = if role == LAUNCHER { format!("-{}", name(instance)) } else { String::new() };
    // A pod's name has an end, however long that of its VM is.
    let start: String = format!("{prefix}{of}").chars().take(240).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("{}-{end}", start.trim_end_matches(['-', '.'])),
            "namespace": namespace(instance),
            "labels": { ROLE: role, OF: label(name(instance)) },
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [{ "name": container, "image": "registry.test/virt-launcher" }],
            "volumes": volumes,
        },
    })
}

/// A name as the value of a label, which is shorter than names may be.
fn label(name: &str) -> &str {
    let end = name.char_indices().nth(63).map_or(name.len(), |(end, _)| end);
    name[..end].trim_end_matches(['-', '.'])
}
