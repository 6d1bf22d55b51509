//! Live migrations: pods at the target, memory that is copied, and a domain that runs at the other node from one moment to the
//! next. Its disks are plugged at both ends by one domain all the while.

use serde_json::{Value, json};

use super::attachers::hotplugged;
use super::controller::is_final;
use super::instance::{FOR, NODE, TARGET, new_launcher};
use super::kubelet::{HOSTNAME, is_ready};
use super::objects::{Kind, claim_of, is_deleted, name, namespace, text, uid};
use super::pace::{Step, Turn};
use super::world::{Done, World, now};

impl World {
    pub(super) async fn migration(&mut self, key: &str) -> Done {
        let Some(migration) = self.get(Kind::Migration, key) else { return Ok(()) };
        let phase = text(&migration["status"]["phase"]).to_owned();
        if is_deleted(&migration) || matches!(phase.as_str(), "Succeeded" | "Failed") {
            return Ok(());
        }
        let of = format!("{}/{}", namespace(&migration), text(&migration["spec"]["vmiName"]));
        let Some(instance) = self.get(Kind::Vmi, &of) else { return self.enter(&migration, "Failed").await };
        if is_deleted(&instance) || is_final(&instance) {
            return self.enter(&migration, "Failed").await;
        }
        let target = self
            .launchers(&instance)
            .into_iter()
            .find(|pod| pod["metadata"]["labels"][FOR] == uid(&migration) && !is_deleted(pod));
        match (phase.as_str(), target) {
            ("", _) => self.enter(&migration, "Pending").await,
            ("Pending", None) => self.make_target(&migration, &instance).await,
            ("Pending", Some(_)) => self.enter(&migration, "Scheduling").await,
            (_, None) => self.fail(&migration, &instance, "the pod at the target is gone").await,
            ("Scheduling", Some(target)) if is_ready(&target) => {
                self.prepare(&migration, &instance, &target).await
            }
            ("TargetReady", Some(_)) => {
                if self.may(Step::Migrate, name(&instance), uid(&migration)) {
                    self.enter(&migration, "Running").await?;
                }
                Ok(())
            }
            ("Running", Some(target)) => match self.turn(Step::HandOver, name(&instance), uid(&migration)) {
                Turn::Wait => Ok(()),
                Turn::Go => self.hand_over(&migration, &instance, &target).await,
                Turn::Fail(message) => self.fail(&migration, &instance, &message).await,
            },
            _ => Ok(()),
        }
    }

    async fn enter(&mut self, migration: &Value, phase: &str) -> Done {
        self.patch_status(Kind::Migration, migration, &json!({ "phase": phase })).await.map(drop)
    }

    async fn make_target(&mut self, migration: &Value, instance: &Value) -> Done {
        let can = instance["status"]["phase"] == "Running"
            && self.shared.lives(text(&instance["status"]["nodeName"]));
        if !can || !self.may(Step::Target, name(instance), uid(migration)) {
            return Ok(());
        }
        let source = text(&instance["status"]["nodeName"]);
        let wanted = text(&migration["spec"]["addedNodeSelector"][HOSTNAME]);
        let nodes = self.find(Kind::Node, |node| {
            let is_meant = if wanted.is_empty() { name(node) != source } else { name(node) == wanted };
            is_meant && self.shared.lives(name(node))
        });
        let Some(node) = nodes.first() else { return Ok(()) };
        let pod = new_launcher(instance, Some(uid(migration)), Some(name(node)));
        self.create(Kind::Pod, &pod).await.map(drop)
    }

    /// The launcher at the target runs: all volumes come there in one attachment pod, and the instance says where it goes.
    async fn prepare(&mut self, migration: &Value, instance: &Value, target: &Value) -> Done {
        let volumes: Vec<_> = hotplugged(instance)
            .filter(|volume| claim_of(volume).is_some_and(|claim| self.volume_of(instance, claim).is_some()))
            .cloned()
            .collect();
        let node = text(&target["spec"]["nodeName"]).to_owned();
        if instance["status"]["activePods"][uid(target)] != node {
            let change = json!({ "activePods": { uid(target): node } });
            return self.patch_status(Kind::Vmi, instance, &change).await.map(drop);
        }
        let attacher = self.attachers(target).into_iter().next();
        match &attacher {
            None if !volumes.is_empty() => {
                return self.make_attacher(instance, target, &volumes, &node).await.map(drop);
            }
            Some(attacher) if !is_ready(attacher) => return Ok(()),
            _ => {}
        }
        let source = self.launcher(instance).unwrap_or_default();
        let state = json!({
            "migrationUid": uid(migration),
            "sourceNode": instance["status"]["nodeName"],
            "sourcePod": name(&source),
            "targetNode": node,
            "targetPod": name(target),
            "targetAttachmentPodUID": attacher.as_ref().map(uid),
            "startTimestamp": now(),
            "endTimestamp": null,
            "completed": null,
            "failed": null,
            "failureReason": null,
        });
        let change = json!({
            "metadata": { "labels": { TARGET: node } },
            "status": { "migrationState": state },
        });
        self.patch(Kind::Vmi, instance, &change).await?;
        self.enter(migration, "TargetReady").await
    }

    async fn hand_over(&mut self, migration: &Value, instance: &Value, target: &Value) -> Done {
        let node = text(&target["spec"]["nodeName"]).to_owned();
        let source = self.launcher(instance);
        let mut pods = json!({ uid(target): node });
        if let Some(source) = &source {
            pods[uid(source)] = Value::Null;
        }
        let change = json!({
            "metadata": { "labels": { NODE: node, TARGET: null } },
            "status": {
                "nodeName": node,
                "migrationState": { "completed": true, "endTimestamp": now() },
                "activePods": pods,
            },
        });
        let moved = self.patch(Kind::Vmi, instance, &change).await?;
        self.shared.begin(uid(instance), uid(target), &node);
        self.moved(&moved, &node);
        if let Some(source) = source {
            self.remove_launcher(&source).await?;
        }
        self.enter(migration, "Succeeded").await
    }

    async fn fail(&mut self, migration: &Value, instance: &Value, why: &str) -> Done {
        if instance["status"]["migrationState"]["migrationUid"] == uid(migration) {
            let change = json!({
                "metadata": { "labels": { TARGET: null } },
                "status": { "migrationState": { "failed": true, "failureReason": why, "endTimestamp": now() } },
            });
            self.patch(Kind::Vmi, instance, &change).await?;
        }
        for pod in
            self.launchers(instance).iter().filter(|pod| pod["metadata"]["labels"][FOR] == uid(migration))
        {
            self.remove_launcher(pod).await?;
        }
        self.enter(migration, "Failed").await
    }

    /// A launcher goes, and its attachment pods with it.
    async fn remove_launcher(&mut self, launcher: &Value) -> Done {
        for pod in self.attachers(launcher).iter().chain([launcher]).filter(|pod| !is_deleted(pod)) {
            self.delete(Kind::Pod, pod, false).await?;
        }
        Ok(())
    }
}
