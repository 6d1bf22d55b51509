//! Execution of the jobs of a Node, one step after the other.

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

/// Work to be done for a Node.
#[derive(Debug, Clone, PartialEq)]
pub enum Job {
    /// Change the Node.
    Change(Plan),
    /// Record an event.
    Tell(News),
    /// Ask whether the VM with this identifier exists.
    Ask(String),
    /// Delete the Node, because this VM no longer exists.
    Delete(String),
}

/// Result of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// The job is done. The watch reports the changes, or the Node is examined again.
    Changed,
    /// The job failed and is tried again.
    Failed,
    /// Answer of the host half about the VM of the Node with this UID.
    Answered {
        /// UID of the Node.
        node: String,
        /// Answer whether the VM exists; `None` without an answer.
        existence: Option<Existence>,
    },
}

/// Clients and channels that jobs are carried out with.
#[derive(Clone)]
pub struct Hands {
    /// Client of the API server.
    pub api: Api<Node>,
    /// Client of the host half.
    pub host: Host,
    /// Fence that every change has to pass.
    pub fence: Fence,
    /// Recorder of events for people.
    pub recorder: Arc<Recorder>,
}

impl Hands {
    /// Carries out a job.
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
        // The status comes first: whoever sees the Node initialised then finds its addresses.
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

    /// Patches exactly the Node that was decided about. The version is not compared for its status, because
    /// kubelet writes that all the time.
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

    /// Deletes exactly the Node that was decided about, if it is unchanged.
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
