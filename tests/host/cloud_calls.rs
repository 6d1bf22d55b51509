//! The calls of `guestlet.v1.Cloud`, for whoever makes them in its own way.

/// Hands all of them to a macro that makes a method of each: name, request and answer.
macro_rules! each_cloud_call {
    ($methods:ident) => {
        $methods! {
            ensure_load_balancer: EnsureLoadBalancerRequest => EnsureLoadBalancerResponse;
            release_load_balancer: ReleaseLoadBalancerRequest => ReleaseLoadBalancerResponse;
            list_load_balancers: ListLoadBalancersRequest => ListLoadBalancersResponse;
            watch_load_balancers: WatchLoadBalancersRequest => WatchLoadBalancersResponse;
            watch_instances: WatchInstancesRequest => WatchInstancesResponse;
            get_instance: GetInstanceRequest => GetInstanceResponse;
            report_health_checks: ReportHealthChecksRequest => ReportHealthChecksResponse;
        }
    };
}
