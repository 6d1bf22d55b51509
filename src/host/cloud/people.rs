//! What people are told of load balancers and pools, and do to them.

use tonic::Status;

use super::{Handle, Request};
use crate::wire::proto::v1;

/// The load balancers of a cluster, or of all.
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

/// All pools, and what keeps load balancers from being made.
///
/// # Errors
/// When the program is ending.
pub async fn pools(desk: &Handle) -> Result<v1::ListAddressPoolsResponse, Status> {
    Ok(desk.ask(Request::AllPools).await?)
}

/// Gives back what a Service of a cluster has, by the word of a person.
///
/// # Errors
/// If there is no such load balancer, others share its address, or it cannot be written down.
pub async fn remove(
    desk: &Handle,
    asked: v1::RemoveClusterLoadBalancerRequest,
) -> Result<v1::RemoveClusterLoadBalancerResponse, Status> {
    let v1::RemoveClusterLoadBalancerRequest { cluster, service_uid } = asked;
    desk.ask(|reply| Request::Remove(cluster, service_uid, reply)).await??;
    Ok(v1::RemoveClusterLoadBalancerResponse {})
}
