//! What nodes ask for their guests.

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use tokio::sync::watch;
use tonic::Status;

use crate::host::backends::kubevirt::controller::Options;
use crate::host::backends::kubevirt::names::{is_label, is_subdomain};
use crate::host::backends::kubevirt::objects::Instance;
use crate::host::backends::kubevirt::seen::{self, Facts};
use crate::host::backends::kubevirt::snapshots::{Freeze, Snapshots};
use crate::host::for_guests::{Asking, Checks, Cloud, Volumes};
use crate::host::half::Half;
use crate::host::place::Topology;
use crate::host::text;
use crate::transport::{callback, http2};
use crate::wire::proto::csi::controller_server::SERVICE_NAME as CONTROLLER;
use crate::wire::proto::v1::cloud_server::SERVICE_NAME as CLOUD;
use crate::wire::proto::v1::{
    AskRequest, AttachReceiptRequest, AttachReceiptResponse, RunningVirtualMachine, WatchChecksRequest,
    WatchChecksResponse,
};

/// Seconds for which a node waits for other health checks at most.
const LONGEST_WAIT: u32 = 60;
/// How long the API server may take to say where a VM runs.
const DEADLINE: Duration = Duration::from_secs(10);

/// Answers what nodes ask.
pub struct Asked {
    /// Says where VMs run.
    pub client: kube::Client,
    /// Answers what guests ask of volumes.
    pub volumes: Arc<dyn Volumes>,
    /// Answers what guests ask of their clusters.
    pub cloud: Arc<dyn Cloud>,
    /// Says at snapshots what they are worth.
    pub snapshots: Snapshots,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// What the settings say of VMs.
    pub options: watch::Receiver<Options>,
}

impl Asked {
    /// The answer to a call of a guest that a node hands on.
    ///
    /// # Errors
    /// As the call, and if its VM does not run on that node, or that cannot be told.
    pub async fn answer(&self, node: &str, request: AskRequest) -> Result<Vec<u8>, Status> {
        let AskRequest { vm, method, request } = request;
        let vm = vm.ok_or_else(|| Status::invalid_argument("vm is missing"))?;
        let call = callback::request(&method, &request)?;
        let path = call.uri().path();
        let (of_volumes, of_cloud) = (http2::is_of(path, CONTROLLER), http2::is_of(path, CLOUD));
        if !of_volumes && !of_cloud {
            return Err(Status::permission_denied(format!("{method} is not supported for guests on nodes")));
        }
        let (_, facts) = self.on(node, &vm).await?;
        let here = Topology { host: node.to_owned(), ..Topology::default() };
        let (_, place) = watch::channel(Some(Arc::new(here)));
        let vm = self.options.borrow().vm(&facts);
        let guest = Asking { vm, place, audit: self.half.audit.clone() };
        let answer = if of_cloud { self.cloud.answer(guest, call) } else { self.volumes.answer(guest, call) };
        let answer = answer.await;
        callback::response_message(answer).await.map(Vec::from)
    }

    /// What the agents of a VM's cluster are to check, as soon as that is of another generation than the node knows.
    ///
    /// # Errors
    /// As of [`Asked::answer`], and if it is not known yet, or the VM has no cluster.
    pub async fn checks(
        &self,
        node: &str,
        request: WatchChecksRequest,
    ) -> Result<WatchChecksResponse, Status> {
        let WatchChecksRequest { vm, generation, wait_seconds } = request;
        let vm = vm.ok_or_else(|| Status::invalid_argument("vm is missing"))?;
        let (_, facts) = self.on(node, &vm).await?;
        if facts.cluster.is_empty() {
            return Err(Status::permission_denied("this VM belongs to no cluster"));
        }
        let vm = self.options.borrow().vm(&facts);
        let unknown = || Status::unavailable("it is not known yet what is to be checked; repeat the call");
        let mut told = self.cloud.checks(&vm).await.ok_or_else(unknown)?;
        let wait = Duration::from_secs(wait_seconds.min(LONGEST_WAIT).into());
        let is_other = |checks: &Arc<Checks>| checks.generation != generation;
        // What there is when the time is over is an answer as well.
        drop(tokio::time::timeout(wait, told.wait_for(is_other)).await);
        let Checks { generation, report_seconds, targets } = Checks::clone(&told.borrow());
        Ok(WatchChecksResponse { generation, report_seconds, checks: targets })
    }

    /// Says at the snapshots of a VM what they are worth by a receipt.
    ///
    /// # Errors
    /// As of [`Asked::answer`]; if the receipt is none, or not all could be done.
    pub async fn attach(
        &self,
        node: &str,
        request: AttachReceiptRequest,
    ) -> Result<AttachReceiptResponse, Status> {
        let vm = request.vm.as_ref().ok_or_else(|| Status::invalid_argument("vm is missing"))?;
        let (instance, facts) = self.on(node, vm).await?;
        let freeze = Freeze::told(request).map_err(Status::invalid_argument)?;
        let done = self.snapshots.attach(&instance, &facts.lasting, &freeze).await;
        let done = done.map_err(|error| {
            tracing::warn!(
                vm = facts.name,
                receipt = freeze.receipt.id,
                "cannot annotate all snapshots with their consistency: {error}"
            );
            Status::unavailable("not all snapshots of this VM could be read or written; repeat the call")
        })?;
        Ok(AttachReceiptResponse { attached: done.attached, pending: done.pending })
    }

    /// A VM that runs on this node, and what is known of it: as the API server says now.
    async fn on(&self, node: &str, vm: &RunningVirtualMachine) -> Result<(Instance, Arc<Facts>), Status> {
        let RunningVirtualMachine { namespace, name, uid } = vm;
        if !is_label(namespace) || !is_subdomain(name) {
            return Err(Status::invalid_argument("vm has no namespace, or no name"));
        }
        let read = Api::<Instance>::namespaced(self.client.clone(), namespace);
        // What the API server says of itself, and of whom it lets in, is no guest's business.
        let unknown = |why: String| {
            tracing::warn!(node, vm = %format_args!("{namespace}/{name}"), "cannot find out where a VM runs: {why}");
            let words = "the API of the host cluster cannot say now where this guest runs; repeat the call";
            Status::unavailable(words)
        };
        let found = tokio::time::timeout(DEADLINE, read.get_opt(name)).await;
        let late = |_| unknown("the API server does not answer".to_owned());
        let found = found.map_err(late)?.map_err(|error| unknown(text::chain(&error)))?;
        // Its label says where KubeVirt looks for it; where it runs its status alone says.
        let runs_on = found.as_ref().and_then(|instance| instance.status.node_name.clone());
        let facts =
            found.as_ref().and_then(seen::facts).filter(|facts| runs_on.as_deref() == Some(&facts.node));
        match found.zip(facts.map(Arc::new)) {
            Some((instance, facts)) if facts.uid.eq_ignore_ascii_case(uid) && facts.node == node => {
                Ok((instance, facts))
            }
            _ => {
                tracing::warn!(
                    node,
                    vm = %format_args!("{namespace}/{name}"),
                    uid,
                    ?runs_on,
                    "a node asks for a VM that does not run there"
                );
                let words = format!("the VM {namespace}/{name} ({uid}) does not run on the node {node}");
                Err(Status::unavailable(words))
            }
        }
    }
}
