//! Operations of people on load balancers and pools: list and remove.

use tonic::Status;

use super::{Handle, Request};
use crate::wire::proto::v1;

/// Lists the load balancers of one cluster, or of all.
///
/// # Errors
/// When the program is ending.
pub async fn list(
    desk: &Handle,
    asked: v1::ListClusterLoadBalancersRequest,
) -> Result<v1::ListClusterLoadBalancersResponse, Status> {
    let mut load_balancers = desk.ask(Request::AllBalancers).await?;
    load_balancers.retain(|one| asked.cluster.is_empty() || one.cluster == asked.cluster);
    Ok(v1::ListClusterLoadBalancersResponse { load_balancers })
}

/// Returns all pools, and the problems that keep load balancers from being created.
///
/// # Errors
/// When the program is ending.
pub async fn pools(desk: &Handle) -> Result<v1::ListAddressPoolsResponse, Status> {
    Ok(desk.ask(Request::AllPools).await?)
}

/// Releases the load balancer of a Service at the request of a person.
///
/// # Errors
/// If it does not exist, others share its address, or the change cannot be written.
pub async fn remove(
    desk: &Handle,
    asked: v1::RemoveClusterLoadBalancerRequest,
) -> Result<v1::RemoveClusterLoadBalancerResponse, Status> {
    let v1::RemoveClusterLoadBalancerRequest { cluster, service_uid } = asked;
    desk.ask(|reply| Request::Remove(cluster, service_uid, reply)).await??;
    Ok(v1::RemoveClusterLoadBalancerResponse {})
}
