//! Carries out what was decided for a Service, one step after the other.

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

/// What is to be done.
#[derive(Debug)]
pub enum Job {
    /// Tell people; nothing else can be done.
    Tell(News),
    /// Ask for a load balancer.
    Ensure {
        /// What is asked for.
        request: Box<EnsureLoadBalancerRequest>,
        /// What tells it from others.
        number: u64,
        /// What people are told besides.
        remark: Option<News>,
        /// People are not told yet of what passes by itself.
        is_patient: bool,
    },
    /// Write what it has.
    Write {
        /// What is written.
        plan: Plan,
        /// What its conditions say then.
        conditions: Conditions,
    },
    /// Give back what it has.
    Release(ServiceReference),
}

/// What came of it.
#[derive(Debug)]
pub enum Done {
    /// The host half has taken the request with this number over.
    Taken {
        /// The request's.
        number: u64,
        /// What the Service has.
        balancer: Arc<LoadBalancer>,
    },
    /// What it has is written.
    Written(Conditions),
    /// Nothing is left of what it had.
    Released,
    /// It is being given back.
    Releasing,
    /// Nothing more is to be done before something changes.
    Nothing,
    /// It did not work; it is tried again.
    Failed,
}

/// What it is done with.
#[derive(Clone)]
pub struct Hands {
    /// Asks the API server.
    pub client: Client,
    /// Asks the host half.
    pub host: Host,
    /// Lets changes pass.
    pub fence: Fence,
    /// Tells people.
    pub recorder: Arc<Recorder>,
}

impl Hands {
    /// Does it.
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
            // It is decided anew when that is heard of, or after a moment.
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

    /// Takes care that it does not go before what it has was given back, and asks for that.
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

    /// Writes what was decided: the Service itself before its status.
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

    /// Patches the very Service that was decided about, and returns what it is then. Where a list is written as a whole, only if it is as
    /// it was.
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

/// A Service, for people.
fn shown(service: &Service) -> String {
    format!("{}/{}", service.metadata.namespace.as_deref().unwrap_or_default(), name(&service.metadata))
}
