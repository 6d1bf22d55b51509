use super::*;

/// Builds a request for one TCP port of this Service.
pub fn request(name: &str, uid: &str) -> v1::EnsureLoadBalancerRequest {
    v1::EnsureLoadBalancerRequest {
        service: Some(v1::ServiceReference { namespace: "shop".into(), name: name.into(), uid: uid.into() }),
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![tcp(80, 30080)],
        announcing: v1::Announcing::KubeVip.into(),
        ..v1::EnsureLoadBalancerRequest::default()
    }
}

pub fn tcp(port: u32, node_port: u32) -> v1::ServicePort {
    v1::ServicePort { name: String::new(), protocol: "TCP".into(), port, node_port }
}

fn refused(change: impl FnOnce(&mut v1::EnsureLoadBalancerRequest), words: &str) {
    let mut request = request("web", "u-1");
    change(&mut request);
    let problem = Wanted::read(request).unwrap_err();
    assert!(problem.contains(words), "{problem}");
}

#[test]
fn what_contradicts_itself_is_refused_by_the_name_of_its_field() {
    refused(|one| one.service = None, "service is missing");
    refused(|one| one.service.as_mut().unwrap().uid = "a/b".into(), "service.uid");
    refused(|one| one.service.as_mut().unwrap().uid = String::new(), "service.uid");
    refused(|one| one.service.as_mut().unwrap().name = "../x".into(), "service.name");
    refused(|one| one.service.as_mut().unwrap().namespace = "x".repeat(64), "service.namespace");
    refused(|one| one.announcing = 0, "announcing is missing");
    refused(|one| one.families = vec![], "families must have");
    refused(|one| one.families = vec![1, 1], "IPv4 twice");
    refused(|one| one.families = vec![1, 9], "families");
    refused(|one| one.addresses = vec!["::1".into()], "families does not have IPv6");
    refused(|one| one.addresses = vec!["192.0.2.1".into(), "192.0.2.2".into()], "more than one of IPv4");
    refused(|one| one.addresses = vec!["example.com".into()], "is not an IP address");
    refused(|one| one.ports = vec![], "ports must have");
    refused(|one| one.ports = vec![tcp(80, 1), tcp(80, 2)], "TCP 80 twice");
    refused(|one| one.ports = vec![tcp(0, 1)], "ports.port = 0");
    refused(|one| one.ports[0].protocol = "tcp".into(), "is not TCP");
    refused(
        |one| one.health_check = Some(v1::HealthCheck { port: 81, ..Default::default() }),
        "health_check.port = 81",
    );
    let check = |period_seconds, timeout_seconds| {
        Some(v1::HealthCheck { port: 80, period_seconds, timeout_seconds, ..Default::default() })
    };
    refused(|one| one.health_check = check(5, 6), "timeout_seconds = 6 is more than 5");
    refused(|one| one.health_check = check(3601, 0), "period_seconds");
    refused(|one| one.source_ranges = vec!["10.0.0.0".into()], "source_ranges");
    refused(|one| one.affinity_seconds = 86_401, "affinity_seconds");
    refused(|one| one.backends = vec![String::new()], "backends");
    let host = i32::from(v1::Announcing::Host);
    refused(|one| (one.announcing, one.ports[0].node_port) = (host, 0), "ports.node_port = 0");
    refused(
        |one| (one.announcing, one.ports[0].node_port) = (host, 22),
        "ports.node_port = 22 is less than 1024",
    );
    refused(|one| (one.announcing, one.ports[0].protocol) = (host, "SCTP".into()), "SCTP");
    refused(
        |one| (one.announcing, one.local_traffic, one.health_check_node_port) = (host, true, 80),
        "health_check_node_port = 80 is less than 1024",
    );
    refused(|one| (one.announcing, one.local_traffic) = (host, true), "health_check_node_port is missing");
    refused(
        |one| {
            one.share_with.clone_from(&one.service);
            one.addresses = vec!["192.0.2.1".into()];
        },
        "cannot be requested",
    );
}

#[test]
fn what_is_left_out_has_its_default() {
    let mut asked = request("web", "u-1");
    asked.health_check = Some(v1::HealthCheck { port: 80, ..Default::default() });
    asked.source_ranges = vec!["10.1.2.3/8".into(), "10.0.0.0/8".into()];
    let (service, wanted) = Wanted::read(asked).unwrap();
    assert_eq!((service.namespace.as_str(), service.uid.as_str()), ("shop", "u-1"));
    let check = wanted.check.unwrap();
    assert_eq!((check.node_port, check.period_seconds, check.timeout_seconds), (30080, 5, 3));
    assert_eq!((check.success_threshold, check.failure_threshold), (1, 3));
    assert_eq!(wanted.sources, ["10.0.0.0/8"]);
    assert_eq!(wanted.ipam, Ipam::Pool);
}
