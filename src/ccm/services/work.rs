//! Execution of the jobs of a Service, one step after the other.

use std::sync::Arc;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::Conditions;
use super::plan::{self, Plan};
use crate::ccm::events::{COMPONENT, News, Recorder};
use crate::ccm::host::{Host, is_passing};
use crate::ccm::instance::clean;
use crate::ccm::objects::{Service, name};
use crate::ccm::refused::Refused;
use crate::kubernetes::fence::Fence;
use crate::kubernetes::lists;
use crate::wire::proto::v1::{EnsureLoadBalancerRequest, LoadBalancer, ServiceReference};

/// Work to be done for a Service.
#[derive(Debug)]
pub enum Job {
    /// Record an event; nothing else can be done.
    Tell(News),
    /// Request a load balancer.
    Ensure {
        /// Request to the host half.
        request: Box<EnsureLoadBalancerRequest>,
        /// Number that identifies the request.
        number: u64,
        /// Further event for people.
        remark: Option<News>,
        /// True if people are not informed of temporary failures yet.
        is_patient: bool,
    },
    /// Write the state of its load balancer.
    Write {
        /// Changes to write.
        plan: Plan,
        /// Conditions of the Service after the write.
        conditions: Conditions,
    },
    /// Release its load balancer.
    Release(ServiceReference),
}

/// Result of a job.
#[derive(Debug)]
pub enum Done {
    /// The host half has accepted the request with this number.
    Taken {
        /// Number of the request.
        number: u64,
        /// Load balancer that the Service has.
        balancer: Arc<LoadBalancer>,
    },
    /// The changes are written; the Service has these conditions.
    Written(Conditions),
    /// The load balancer is completely released.
    Released,
    /// The release is under way.
    Releasing,
    /// Nothing more is to be done until something changes.
    Nothing,
    /// The job failed and is tried again.
    Failed,
}

/// Clients that jobs are carried out with.
#[derive(Clone)]
pub struct Hands {
    /// Client of the API server.
    pub client: Client,
    /// Client of the host half.
    pub host: Host,
    /// Fence that every change has to pass.
    pub fence: Fence,
    /// Recorder of events for people.
    pub recorder: Arc<Recorder>,
}

impl Hands {
    /// Carries out a job.
    pub async fn carry_out(&self, service: Arc<Service>, job: Job) -> Done {
        let outcome = match job {
            Job::Tell(news) => {
                self.recorder.tell(&*service, &news).await;
                return Done::Nothing;
            }
            Job::Ensure { request, number, remark, is_patient } => {
                if let Some(remark) = remark {
                    self.recorder.tell(&*service, &remark).await;
                }
                let asked = self.ensure(&service, *request).await;
                if let Err(Refused::Host(status)) = &asked
                    && !(is_patient && is_passing(status))
                {
                    let reason = if is_passing(status) { "HostUnavailable" } else { "LoadBalancerRefused" };
                    self.recorder.tell(&*service, &News::warning(reason, clean(status.message()))).await;
                }
                asked.map(|balancer| Done::Taken { number, balancer: Arc::new(balancer) })
            }
            Job::Write { plan, conditions } => {
                self.write(&service, &plan).await.map(|()| Done::Written(conditions))
            }
            Job::Release(of) => self.release(&service, of).await,
        };
        match outcome {
            Ok(done) => done,
            // It is decided again when the change is reported, or after a short wait.
            Err(Refused::Other) => Done::Failed,
            Err(Refused::Host(status)) => {
                let service = shown(&service);
                tracing::debug!(service, "the host half: {} ({})", clean(status.message()), status.code());
                Done::Failed
            }
            Err(why) => {
                why.tell(&self.recorder, &*service).await;
                tracing::warn!(service = shown(&service), "cannot change a Service, retrying: {why}");
                Done::Failed
            }
        }
    }

    /// Adds the finalizer, so that the Service stays until its load balancer is released, and sends the request.
    async fn ensure(
        &self,
        service: &Service,
        request: EnsureLoadBalancerRequest,
    ) -> Result<LoadBalancer, Refused> {
        if let Some(patch) = plan::begin(service) {
            self.patch(service, &patch, false).await?;
        }
        self.fence.change(async { Ok(self.host.ensure(request).await?) }).await
    }

    async fn release(&self, service: &Service, of: ServiceReference) -> Result<Done, Refused> {
        let mut service = service.clone();
        let withdrawn = plan::withdraw(&service);
        for (patch, is_status) in [(&withdrawn.service, false), (&withdrawn.status, true)] {
            if let Some(patch) = patch {
                service = self.patch(&service, patch, is_status).await?;
            }
        }
        let released = self.fence.change(async { Ok(self.host.release(of).await?) }).await;
        if let Err(Refused::Host(status)) = &released {
            let news = News::warning("LoadBalancerNotReleased", clean(status.message()));
            self.recorder.tell(&service, &news).await;
        }
        if !released? {
            return Ok(Done::Releasing);
        }
        self.write(&service, &plan::end(&service)).await?;
        Ok(Done::Released)
    }

    /// Writes the planned changes: the Service itself before its status.
    async fn write(&self, service: &Service, plan: &Plan) -> Result<(), Refused> {
        for (patch, is_status) in [(&plan.service, false), (&plan.status, true)] {
            if let Some(patch) = patch {
                self.patch(service, patch, is_status).await?;
            }
        }
        for news in &plan.news {
            self.recorder.tell(service, news).await;
        }
        Ok(())
    }

    /// Patches exactly the Service that was decided about, and returns its new state. A patch that replaces a
    /// whole list is applied only if the Service is unchanged.
    async fn patch(&self, service: &Service, patch: &Value, is_status: bool) -> Result<Service, Refused> {
        let mut patch = patch.clone();
        let has_list = patch["metadata"]["finalizers"].is_array();
        patch["metadata"]["uid"] = json!(service.metadata.uid);
        if has_list {
            patch["metadata"]["resourceVersion"] = json!(service.metadata.resource_version);
        }
        let api = Api::<Service>::namespaced(
            self.client.clone(),
            service.metadata.namespace.as_deref().unwrap_or_default(),
        );
        let parameters = PatchParams { field_manager: Some(COMPONENT.to_owned()), ..PatchParams::default() };
        let (of, patch) = (name(&service.metadata), Patch::Merge(patch));
        self.fence
            .change(async {
                let patched = if is_status {
                    lists::in_time(api.patch_status(of, &parameters, &patch)).await
                } else {
                    lists::in_time(api.patch(of, &parameters, &patch)).await
                };
                patched.map_err(Refused::from)
            })
            .await
    }
}

/// Names a Service for people.
fn shown(service: &Service) -> String {
    format!("{}/{}", service.metadata.namespace.as_deref().unwrap_or_default(), name(&service.metadata))
}
