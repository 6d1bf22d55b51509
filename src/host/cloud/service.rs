//! `guestlet.v1.Cloud` for one guest: validates its requests, sends them to the desk, and turns the results into
//! answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::{Code, Request as Call, Response, Status};
use tower_service::Service as _;

use super::journal::News;
use super::wanted::{self, Wanted};
use super::{Asker, Found, Handle, Poll, Problem, Reply, Request};
use crate::access::verb::{self, Verb};
use crate::host::audit::{Audit, What};
use crate::host::backends::Vm;
use crate::host::caller::{Behalf, Caller};
use crate::host::for_guests::{Answering, Asking, Checks, Cloud as ForGuests};
use crate::wire::proto::v1;
use crate::wire::proto::v1::cloud_server::{Cloud, CloudServer};
use crate::wire::proto::v1::get_instance_response::Existence;

/// Largest request in bytes.
const MAX_REQUEST: usize = 64 * 1024;
/// Longest time that a long poll waits, in seconds.
const LONGEST_WAIT: u32 = 20;
/// Time for which a poll waits for further changes, to report them together.
const TOGETHER: Duration = Duration::from_millis(50);
/// Long polls of each kind that a VM may have under way.
const MOST_POLLS: u32 = 2;
/// Longest position, and longest identifier of a VM, in bytes.
const LONGEST_POSITION: usize = 256;
const LONGEST_UID: usize = 64;

/// Number of long polls under way, by VM and kind.
#[derive(Debug, Clone, Default)]
pub struct Polls(Arc<Mutex<HashMap<(String, &'static str), u32>>>);

/// Long poll that counts until it is dropped.
struct Polling {
    polls: Polls,
    key: (String, &'static str),
}

impl Polls {
    fn begin(&self, vm: &str, kind: &'static str) -> Option<Polling> {
        let key = (vm.to_owned(), kind);
        let mut polls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = polls.entry(key.clone()).or_default();
        if *count == MOST_POLLS {
            return None;
        }
        *count += 1;
        drop(polls);
        Some(Polling { polls: self.clone(), key })
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        let mut polls = self.polls.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = polls.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                polls.remove(&self.key);
            }
        }
    }
}

impl Asker {
    fn of(vm: &Vm) -> Self {
        Self { vm: vm.name.clone(), uid: vm.ids.lasting.clone(), cluster: vm.cluster.clone() }
    }
}

impl From<Problem> for Status {
    fn from(problem: Problem) -> Self {
        let words = problem.to_string();
        match problem {
            Problem::Unavailable(_) => Self::unavailable(words),
            Problem::Contradiction(_) => Self::failed_precondition(words),
            Problem::Exhausted(_) => Self::resource_exhausted(words),
            Problem::Nothing(_) => Self::unimplemented(words),
            Problem::Denied(_) => Self::permission_denied(words),
            Problem::NotFound(_) => Self::not_found(words),
        }
    }
}

#[tonic::async_trait]
impl ForGuests for Handle {
    fn answer(&self, guest: Asking, call: http::Request<Body>) -> Answering {
        let service = Service { desk: self.clone(), asker: Asker::of(&guest.vm), audit: guest.audit.clone() };
        let mut server = CloudServer::new(service).max_decoding_message_size(MAX_REQUEST);
        Box::pin(async move {
            match server.call(call).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            }
        })
    }

    async fn checks(&self, vm: &Vm) -> Option<watch::Receiver<Arc<Checks>>> {
        if vm.cluster.is_empty() {
            return None;
        }
        self.ask(|reply| Request::Checks(vm.cluster.clone(), reply)).await.ok()
    }

    async fn checked(&self, vm: &Vm, generation: u64, results: Vec<v1::HealthCheckResult>) {
        // Fails only if the desk has ended: then the process is ending.
        drop(self.requests.send(Request::Checked(Asker::of(vm), generation, results)).await);
    }
}

/// Server of `guestlet.v1.Cloud` for one guest.
#[derive(Debug, Clone)]
struct Service {
    desk: Handle,
    asker: Asker,
    audit: Audit,
}

type Answer<T> = Result<Response<T>, Status>;

impl Service {
    /// Sends a request of the guest on behalf of its cluster; refuses it if the VM belongs to no cluster.
    async fn ask<T>(
        &self,
        request: impl FnOnce(Asker, Reply<Result<T, Problem>>) -> Request,
    ) -> Result<T, Status> {
        if self.asker.cluster.is_empty() {
            return Err(Status::permission_denied(
                "this VM belongs to no cluster; set cluster in the settings of its host",
            ));
        }
        let asker = self.asker.clone();
        Ok(self.desk.ask(|reply| request(asker, reply)).await??)
    }

    /// Sends a request that changes a load balancer, and records it in the audit log.
    async fn change<T>(
        &self,
        verb: &'static Verb,
        of: &wanted::Service,
        request: impl FnOnce(Asker, Reply<Result<T, Problem>>) -> Request,
    ) -> Result<T, Status> {
        let behalf = Behalf::of(Caller::Guest(self.asker.vm.clone()));
        let subject = format!("{}/{}/{}", self.asker.cluster, of.namespace, of.name);
        let entry = self.audit.begin(&behalf, What { verb, vm: String::new(), subject });
        let outcome = self.ask(request).await;
        match &outcome {
            Ok(_) => entry.end(Code::Ok),
            Err(status) if status.code() == Code::PermissionDenied => entry.denied(),
            Err(status) => entry.end(status.code()),
        }
        outcome
    }

    /// Waits for news until the poll's timeout.
    async fn poll<V>(
        &self,
        kind: &'static str,
        bounds: Option<v1::WatchBounds>,
        request: impl Fn(Asker, String, Reply<Result<Poll<V>, Problem>>) -> Request,
    ) -> Result<News<V>, Status> {
        let v1::WatchBounds { position, wait_seconds } = bounds.unwrap_or_default();
        if position.len() > LONGEST_POSITION {
            return Err(Status::invalid_argument(format!(
                "position has more than {LONGEST_POSITION} characters"
            )));
        }
        let Some(_polling) = self.desk.polls.begin(&self.asker.uid, kind) else {
            return Err(Status::resource_exhausted(format!(
                "{MOST_POLLS} calls of this VM are already waiting for the same"
            )));
        };
        let end = Instant::now() + Duration::from_secs(wait_seconds.min(LONGEST_WAIT).into());
        loop {
            let poll = self.ask(|asker, reply| request(asker, position.clone(), reply)).await?;
            let mut told = match poll {
                Poll::News(news) => return Ok(news),
                Poll::Wait(told) => told,
            };
            match tokio::time::timeout_at(end, told.changed()).await {
                Ok(Ok(())) => tokio::time::sleep(TOGETHER).await,
                Ok(Err(_)) => return Err(Status::unavailable("guestlet-host is stopping")),
                Err(_) => return Ok(News { position, complete: false, there: Vec::new(), gone: Vec::new() }),
            }
        }
    }
}

#[tonic::async_trait]
impl Cloud for Service {
    async fn ensure_load_balancer(
        &self,
        call: Call<v1::EnsureLoadBalancerRequest>,
    ) -> Answer<v1::EnsureLoadBalancerResponse> {
        let (service, wanted) = Wanted::read(call.into_inner()).map_err(Status::invalid_argument)?;
        let of = service.clone();
        let request = |asker, reply| Request::Ensure(asker, service, Box::new(wanted), reply);
        let balancer = self.change(&verb::LB_ENSURE, &of, request).await?;
        Ok(Response::new(v1::EnsureLoadBalancerResponse { load_balancer: Some(balancer) }))
    }

    async fn release_load_balancer(
        &self,
        call: Call<v1::ReleaseLoadBalancerRequest>,
    ) -> Answer<v1::ReleaseLoadBalancerResponse> {
        let service = wanted::service_of_before(call.into_inner().service, "service")
            .map_err(Status::invalid_argument)?;
        let of = service.clone();
        let request = |asker, reply| Request::Release(asker, service, reply);
        let released = self.change(&verb::LB_RM, &of, request).await?;
        Ok(Response::new(v1::ReleaseLoadBalancerResponse { released }))
    }

    async fn list_load_balancers(
        &self,
        _: Call<v1::ListLoadBalancersRequest>,
    ) -> Answer<v1::ListLoadBalancersResponse> {
        let load_balancers = self.ask(Request::List).await?;
        Ok(Response::new(v1::ListLoadBalancersResponse { load_balancers }))
    }

    async fn watch_load_balancers(
        &self,
        call: Call<v1::WatchLoadBalancersRequest>,
    ) -> Answer<v1::WatchLoadBalancersResponse> {
        let news = self.poll("load balancers", call.into_inner().bounds, Request::Balancers).await?;
        let News { position, complete, there: load_balancers, gone } = news;
        let gone = gone.into_iter().filter_map(|balancer| balancer.service).collect();
        Ok(Response::new(v1::WatchLoadBalancersResponse { position, complete, load_balancers, gone }))
    }

    async fn watch_instances(
        &self,
        call: Call<v1::WatchInstancesRequest>,
    ) -> Answer<v1::WatchInstancesResponse> {
        let news = self.poll("instances", call.into_inner().bounds, Request::Instances).await?;
        let News { position, complete, there: instances, gone } = news;
        let withdrawn = gone.into_iter().map(|instance| instance.vm_uid).collect();
        Ok(Response::new(v1::WatchInstancesResponse { position, complete, instances, withdrawn }))
    }

    async fn get_instance(&self, call: Call<v1::GetInstanceRequest>) -> Answer<v1::GetInstanceResponse> {
        let uid = call.into_inner().vm_uid;
        if uid.is_empty() || uid.len() > LONGEST_UID || uid.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(Status::invalid_argument(format!(
                "vm_uid has to have 1 to {LONGEST_UID} characters, in lower case"
            )));
        }
        let found = self.ask(|asker, reply| Request::Instance(asker, uid, reply)).await?;
        let (existence, instance, reason) = match found {
            Found::There(instance) => (Existence::Exists, Some(*instance), String::new()),
            #[cfg(feature = "kubevirt")]
            Found::Gone => (Existence::Gone, None, String::new()),
            Found::Unknown(reason) => (Existence::Unknown, None, reason),
        };
        Ok(Response::new(v1::GetInstanceResponse { existence: existence.into(), instance, reason }))
    }

    async fn report_health_checks(
        &self,
        call: Call<v1::ReportHealthChecksRequest>,
    ) -> Answer<v1::ReportHealthChecksResponse> {
        let v1::ReportHealthChecksRequest { generation, results } = call.into_inner();
        let request = Request::Reported(self.asker.clone(), generation, results);
        if self.desk.requests.send(request).await.is_err() {
            return Err(Status::unavailable("guestlet-host is stopping"));
        }
        Ok(Response::new(v1::ReportHealthChecksResponse {}))
    }
}
