//! The scheduler and the kubelets of the hosts, as far as the pods of VMs go.

use serde_json::{Value, json};

use super::objects::{Kind, is_deleted, name, text, uid};
use super::pace::{Step, Turn};
use super::world::{Done, World, now};

/// On each pod of the model: what it is, and the name of the instance that it is of.
pub const ROLE: &str = "kubevirt.io";
pub const OF: &str = "vm.kubevirt.io/name";
pub const LAUNCHER: &str = "virt-launcher";
pub const ATTACHER: &str = "hotplug-disk";
/// Where a pod has to run.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

impl World {
    pub(super) async fn pod(&mut self, key: &str) -> Done {
        let Some(pod) = self.get(Kind::Pod, key) else { return Ok(()) };
        let role = text(&pod["metadata"]["labels"][ROLE]).to_owned();
        let of = text(&pod["metadata"]["labels"][OF]).to_owned();
        let is_launcher = role == LAUNCHER;
        if !is_launcher && role != ATTACHER {
            return Ok(());
        }
        let node = text(&pod["spec"]["nodeName"]);
        if is_deleted(&pod) {
            // A domain that still runs keeps its launcher.
            let has_ended = !is_launcher || !self.runs_in(&pod);
            let step = if is_launcher { Step::EndLauncher } else { Step::EndPod };
            if has_ended && (node.is_empty() || self.shared.lives(node)) && self.may(step, &of, uid(&pod)) {
                return self.delete(Kind::Pod, &pod, true).await;
            }
            return Ok(());
        }
        match text(&pod["status"]["phase"]) {
            "Pending" if node.is_empty() => self.schedule(&pod, &of, is_launcher).await,
            "Pending" if self.shared.lives(node) && self.is_attached(&pod) => {
                self.start(&pod, &of, is_launcher).await
            }
            _ => Ok(()),
        }
    }

    async fn schedule(&mut self, pod: &Value, of: &str, is_launcher: bool) -> Done {
        let wanted = text(&pod["spec"]["nodeSelector"][HOSTNAME]).to_owned();
        let steps = if is_launcher { Step::Launch } else { Step::Schedule };
        match self.turn(steps, of, &format!("{}-node", uid(pod))) {
            Turn::Wait => Ok(()),
            Turn::Go => {
                let nodes = self.find(Kind::Node, |node| {
                    self.shared.lives(name(node))
                        && node["spec"]["unschedulable"] != true
                        && (wanted.is_empty() || name(node) == wanted)
                });
                // Where there are fewest pods.
                let load = |node: &&Value| {
                    let is_there = |pod: &&Value| text(&pod["spec"]["nodeName"]) == name(node);
                    self.objects.of(Kind::Pod).filter(is_there).count()
                };
                match nodes.iter().min_by_key(load) {
                    Some(node) => self.bind(pod, name(node)).await,
                    None => self.cannot_schedule(pod, "no node is available").await,
                }
            }
            Turn::Fail(message) => self.cannot_schedule(pod, &message).await,
        }
    }

    async fn cannot_schedule(&mut self, pod: &Value, message: &str) -> Done {
        let known = pod["status"]["conditions"][0]["message"] == message;
        if !known {
            let condition = json!({
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
                "lastTransitionTime": now(),
            });
            self.patch_status(Kind::Pod, pod, &json!({ "conditions": [condition] })).await?;
        }
        self.tell(Kind::Pod, pod, "FailedScheduling", message).await
    }

    async fn start(&mut self, pod: &Value, of: &str, is_launcher: bool) -> Done {
        let turn = if is_launcher { Turn::Go } else { self.turn(Step::RunPod, of, uid(pod)) };
        let (phase, is_ready) = match &turn {
            Turn::Wait => return Ok(()),
            Turn::Go => ("Running", true),
            Turn::Fail(_) => ("Failed", false),
        };
        let state = if is_ready {
            json!({ "running": { "startedAt": now() } })
        } else {
            json!({ "terminated": { "exitCode": 1 } })
        };
        let container = json!({
            "name": pod["spec"]["containers"][0]["name"],
            "image": pod["spec"]["containers"][0]["image"],
            "imageID": "",
            "ready": is_ready,
            "restartCount": 0,
            "state": state,
        });
        let ready = json!({ "type": "Ready", "status": if is_ready { "True" } else { "False" } });
        let status = json!({ "phase": phase, "containerStatuses": [container], "conditions": [ready] });
        let pod = self.patch_status(Kind::Pod, pod, &status).await?;
        if let Turn::Fail(message) = turn {
            self.tell(Kind::Pod, &pod, "Failed", &message).await?;
        }
        Ok(())
    }
}

/// Whether the pod's container is up.
pub fn is_ready(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["ready"] == true
}
