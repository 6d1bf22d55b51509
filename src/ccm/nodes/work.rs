//! Carries out what was decided for a Node, one step after the other.

use std::sync::Arc;

use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::{Value, json};

use super::plan::Plan;
use crate::ccm::events::{COMPONENT, News, Recorder};
use crate::ccm::host::Host;
use crate::ccm::instance::clean;
use crate::ccm::objects::{Node, name, uid};
use crate::ccm::refused::Refused;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::lists;
use crate::wire::proto::v1::get_instance_response::Existence;

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Job {
    /// Change it.
    Change(Plan),
    /// Tell people.
    Tell(News),
    /// Ask whether its VM, which has this identifier, exists.
    Ask(String),
    /// Delete it: that VM is gone.
    Delete(String),
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// It is done, and what has changed is heard of, or it will be decided anew.
    Changed,
    /// It did not work; it is tried again.
    Failed,
    /// What the host half says of the VM of the Node with this UID; none if it does not say anything.
    Answered {
        /// The Node's UID.
        node: String,
        /// Whether the VM exists.
        existence: Option<Existence>,
    },
}

/// What it is done with.
#[derive(Clone)]
pub struct Hands {
    /// Asks the API server.
    pub api: Api<Node>,
    /// Asks the host half.
    pub host: Host,
    /// Lets changes pass.
    pub fence: Fence,
    /// Tells people.
    pub recorder: Arc<Recorder>,
}

impl Hands {
    /// Does it.
    pub async fn carry_out(&self, node: Arc<Node>, job: Job) -> Done {
        match job {
            Job::Tell(news) => {
                self.recorder.tell(&*node, &news).await;
                Done::Changed
            }
            Job::Change(plan) => self.change(&node, plan).await,
            Job::Ask(vm) => self.ask(&node, vm).await,
            Job::Delete(vm) => self.delete(&node, &vm).await,
        }
    }

    async fn change(&self, node: &Node, plan: Plan) -> Done {
        // First: who sees that it is initialised finds its addresses.
        for (patch, is_status) in [(plan.status, true), (plan.node, false)] {
            let Some(patch) = patch else { continue };
            match self.patch(node, patch, is_status).await {
                Ok(()) => {}
                Err(Refused::Other) => return Done::Changed,
                Err(why) => {
                    why.tell(&self.recorder, node).await;
                    tracing::warn!(node = name(&node.metadata), "cannot change a Node, retrying: {why}");
                    return Done::Failed;
                }
            }
        }
        for news in plan.news {
            self.recorder.tell(node, &news).await;
        }
        Done::Changed
    }

    /// Patches the very Node that was decided about. Its version is not named for its status: its kubelet writes that all the time.
    async fn patch(&self, node: &Node, mut patch: Value, is_status: bool) -> Result<(), Refused> {
        let metadata = &node.metadata;
        let bound = if is_status {
            json!({ "uid": metadata.uid })
        } else {
            json!({ "uid": metadata.uid, "resourceVersion": metadata.resource_version })
        };
        for (key, value) in bound.as_object().into_iter().flatten() {
            patch["metadata"][key] = value.clone();
        }
        let parameters = PatchParams { field_manager: Some(COMPONENT.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(patch);
        self.fence
            .change(async {
                let name = name(metadata);
                let patched = if is_status {
                    lists::in_time(self.api.patch_status(name, &parameters, &patch)).await
                } else {
                    lists::in_time(self.api.patch(name, &parameters, &patch)).await
                };
                patched.map(drop).map_err(Refused::from)
            })
            .await
    }

    async fn ask(&self, node: &Node, vm: String) -> Done {
        let asked = self.host.instance(vm.clone()).await;
        let existence = match asked {
            Ok(answer) => {
                let existence = Existence::try_from(answer.existence).ok();
                if existence == Some(Existence::Unknown) {
                    let words = format!(
                        "it is not ready, and the host half cannot say whether its VM {vm} exists, so it stays: {}",
                        clean(&answer.reason)
                    );
                    self.recorder.tell(node, &News::warning("VmUnknown", words)).await;
                }
                existence
            }
            Err(status) => {
                let why = clean(status.message());
                tracing::warn!(node = name(&node.metadata), vm, "cannot find out whether a VM exists: {why}");
                None
            }
        };
        Done::Answered { node: uid(&node.metadata).to_owned(), existence }
    }

    /// Deletes the very Node that was decided about, as it was.
    async fn delete(&self, node: &Node, vm: &str) -> Done {
        let metadata = &node.metadata;
        let words = format!("its VM {vm} no longer exists, so it is deleted");
        self.recorder.tell(node, &News::normal("DeletingNode", words)).await;
        let preconditions =
            Preconditions { uid: metadata.uid.clone(), resource_version: metadata.resource_version.clone() };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let deleted = self.fence.change(async {
            let deleted = lists::in_time(self.api.delete(name(metadata), &parameters)).await;
            deleted.map(drop).map_err(Refused::from)
        });
        match deleted.await {
            Ok(()) | Err(Refused::Other) => Done::Changed,
            Err(why) => {
                why.tell(&self.recorder, node).await;
                tracing::warn!(node = name(metadata), "cannot delete a Node, retrying: {why}");
                Done::Failed
            }
        }
    }
}
