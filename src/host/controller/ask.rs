//! Requests of nodes on behalf of their guests.

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

/// Longest time in seconds that a node may wait for changed health checks.
const LONGEST_WAIT: u32 = 60;
/// Timeout of the API server for looking up where a VM runs.
const DEADLINE: Duration = Duration::from_secs(10);

/// Handler of the requests of nodes.
pub struct Asked {
    /// Client of the API server, which knows where VMs run.
    pub client: kube::Client,
    /// Handler of guests' calls about volumes.
    pub volumes: Arc<dyn Volumes>,
    /// Handler of guests' calls about their clusters.
    pub cloud: Arc<dyn Cloud>,
    /// Annotates snapshots with their consistency.
    pub snapshots: Snapshots,
    /// This run of the host half.
    pub half: Arc<Half>,
    /// Settings of VMs.
    pub options: watch::Receiver<Options>,
}

impl Asked {
    /// Answers a guest's call that a node has forwarded.
    ///
    /// # Errors
    /// The errors of the call; also if its VM does not run on that node, or if that cannot be determined.
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

    /// Returns the health checks for the agents of a VM's cluster: as soon as their generation differs from the one
    /// that the node has, and otherwise when the wait is over.
    ///
    /// # Errors
    /// The errors of [`Asked::answer`]; also if the checks are not known yet, or the VM has no cluster.
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
        // On timeout, the unchanged checks are a valid answer as well.
        drop(tokio::time::timeout(wait, told.wait_for(is_other)).await);
        let Checks { generation, report_seconds, targets } = Checks::clone(&told.borrow());
        Ok(WatchChecksResponse { generation, report_seconds, checks: targets })
    }

    /// Annotates the snapshots of a VM with their consistency, according to a receipt.
    ///
    /// # Errors
    /// The errors of [`Asked::answer`]; also if the receipt is malformed, or not all snapshots could be annotated.
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

    /// Looks up a VM that runs on this node, and what is known of it, in the API server.
    async fn on(&self, node: &str, vm: &RunningVirtualMachine) -> Result<(Instance, Arc<Facts>), Status> {
        let RunningVirtualMachine { namespace, name, uid } = vm;
        if !is_label(namespace) || !is_subdomain(name) {
            return Err(Status::invalid_argument("vm has no namespace, or no name"));
        }
        let read = Api::<Instance>::namespaced(self.client.clone(), namespace);
        // The error goes to the log only: guests must not learn details of the API server or of its access rules.
        let unknown = |why: String| {
            tracing::warn!(node, vm = %format_args!("{namespace}/{name}"), "cannot find out where a VM runs: {why}");
            let words = "the API of the host cluster cannot say now where this guest runs; repeat the call";
            Status::unavailable(words)
        };
        let found = tokio::time::timeout(DEADLINE, read.get_opt(name)).await;
        let late = |_| unknown("the API server does not answer".to_owned());
        let found = found.map_err(late)?.map_err(|error| unknown(text::chain(&error)))?;
        // The label says where KubeVirt looks for the VM. Only the status says where it really runs.
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
                    "a node requests a VM that does not run there"
                );
                let words = format!("the VM {namespace}/{name} ({uid}) does not run on the node {node}");
                Err(Status::unavailable(words))
            }
        }
    }
}
