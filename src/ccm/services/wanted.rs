//! Request of a Service to the host half, from its spec and its annotations. These are the ones of
//! Harvester's cloud provider and a few of guestlet's own. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::plan::is_concerned;
use crate::ccm::net::Net;
use crate::ccm::nodes::Member;
use crate::ccm::objects::{Service, ServicePort, annotation, name, uid};
use crate::wire::proto::v1::{
    self, Announcing, EnsureLoadBalancerRequest, HealthCheck, IpFamily, Ipam, ServiceReference,
};

/// Prefix of the annotations of Harvester's cloud provider.
pub const PREFIX: &str = "cloudprovider.harvesterhci.io/";
const IPAM: &str = "cloudprovider.harvesterhci.io/ipam";
/// Annotation with the network of the address, which is also the interface that kube-vip announces it on.
pub const NETWORK: &str = "cloudprovider.harvesterhci.io/network";
/// Annotation with the Service whose address this one shares, and the label with the same meaning.
pub const PRIMARY: &str = "cloudprovider.harvesterhci.io/primary-service";
/// Annotation with the port whose node port is checked.
pub const HEALTH_PORT: &str = "cloudprovider.harvesterhci.io/healthcheck-port";
const HEALTH_SUCCESS: &str = "cloudprovider.harvesterhci.io/healthcheck-success-threshold";
const HEALTH_FAILURE: &str = "cloudprovider.harvesterhci.io/healthcheck-failure-threshold";
const HEALTH_PERIOD: &str = "cloudprovider.harvesterhci.io/healthcheck-periodseconds";
const HEALTH_TIMEOUT: &str = "cloudprovider.harvesterhci.io/healthcheck-timeoutseconds";
/// Annotation with the announcer of the address: `kube-vip`, `none` or `host`.
pub const ANNOUNCE: &str = "guestlet.io/announce";
/// Annotation with requested addresses, one for each family, separated by a comma.
const ADDRESSES: &str = "guestlet.io/load-balancer-ips";
/// Annotations without a meaning here: the host decides what they would set, or only Harvester's cloud
/// provider uses them.
const IDLE: [&str; 3] = [
    "cloudprovider.harvesterhci.io/project",
    "cloudprovider.harvesterhci.io/namespace",
    "cloudprovider.harvesterhci.io/lb-network",
];
const KNOWN: [&str; 10] = [
    IPAM,
    NETWORK,
    PRIMARY,
    HEALTH_PORT,
    HEALTH_SUCCESS,
    HEALTH_FAILURE,
    HEALTH_PERIOD,
    HEALTH_TIMEOUT,
    ANNOUNCE,
    ADDRESSES,
];

/// Limit of the VMs that are named as backends.
const BACKENDS: usize = 1024;
/// Default duration of a session affinity in seconds.
const AFFINITY_SECONDS: i32 = 10_800;

/// Settings for Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Class of the Services that this program maintains.
    pub class: String,
    /// True if Services without a class are handled, too.
    pub without_class: bool,
    /// Announcer for Services that do not name one.
    pub announcing: Announcing,
}

/// Reason why no request can be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// An annotation or a field has an invalid value; with a message for people.
    Invalid(String),
    /// The Service whose address is to be shared does not exist, or has no load balancer of its own.
    NoPrimary(String),
}

/// Returns whether this program is to provide a load balancer for a Service.
pub fn is_wanted(service: &Service, defaults: &Defaults) -> bool {
    let is_ours = match service.spec.load_balancer_class.as_deref() {
        Some(class) => class == defaults.class,
        None => defaults.without_class,
    };
    is_ours && service.spec.r#type == "LoadBalancer" && service.metadata.deletion_timestamp.is_none()
}

/// Returns the reference to a Service.
pub fn reference(service: &Service) -> ServiceReference {
    ServiceReference {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        name: name(&service.metadata).to_owned(),
        uid: uid(&service.metadata).to_owned(),
    }
}

/// Returns the announcer of a Service's address.
///
/// # Errors
/// Fails if the annotation has an unknown value.
pub fn announcing(service: &Service, defaults: &Defaults) -> Result<Announcing, Problem> {
    match annotation(&service.metadata, ANNOUNCE) {
        None => Ok(defaults.announcing),
        Some(word) => announcing_of(word)
            .ok_or_else(|| invalid(ANNOUNCE, word, "use \"kube-vip\", \"none\" or \"host\"")),
    }
}

/// Parses the name of an announcer.
pub fn announcing_of(word: &str) -> Option<Announcing> {
    match word {
        "kube-vip" => Some(Announcing::KubeVip),
        "none" => Some(Announcing::None),
        "host" => Some(Announcing::Host),
        _ => None,
    }
}

/// Returns the annotations of a Service that have a known prefix but an unknown name.
pub fn unknown(service: &Service) -> Vec<&str> {
    let all = service.metadata.annotations.iter().flat_map(BTreeMap::keys).map(String::as_str);
    let is_unknown = |key: &&str| is_concerned(key) && !KNOWN.contains(key) && !IDLE.contains(key);
    all.filter(is_unknown).collect()
}

/// Builds the request of a Service. `primary` finds another Service by namespace and name.
///
/// # Errors
/// Fails if the Service does not define a valid request.
pub fn request(
    service: &Service,
    defaults: &Defaults,
    members: &[Member],
    primary: impl FnOnce(&str, &str) -> Option<ServiceReference>,
) -> Result<EnsureLoadBalancerRequest, Problem> {
    let spec = &service.spec;
    let announcing = announcing(service, defaults)?;
    let ipam = match annotation(&service.metadata, IPAM) {
        None => Ipam::Unspecified,
        Some("pool") => Ipam::Pool,
        Some("dhcp") => Ipam::Dhcp,
        Some(word) => return Err(invalid(IPAM, word, "use \"pool\" or \"dhcp\"")),
    };
    let share_with = match annotation(&service.metadata, PRIMARY) {
        None => None,
        Some(text) => Some(shared(service, text, primary)?),
    };
    let health_check = health_check(service)?;
    let is_local = spec.external_traffic_policy == "Local";
    // An announcer in the cluster knows its Nodes by itself.
    let needs_backends = announcing == Announcing::Host || health_check.is_some();
    let backends = members.iter().filter(|member| needs_backends && member.takes_traffic);
    let (families, all_families) = families(service);
    Ok(EnsureLoadBalancerRequest {
        service: Some(reference(service)),
        ipam: ipam.into(),
        network: annotation(&service.metadata, NETWORK).unwrap_or_default().to_owned(),
        addresses: addresses(service)?,
        families: families.into_iter().map(i32::from).collect(),
        all_families,
        ports: spec.ports.iter().map(port).collect(),
        share_with,
        announcing: announcing.into(),
        health_check,
        local_traffic: is_local,
        health_check_node_port: if is_local { number(spec.health_check_node_port) } else { 0 },
        backends: backends.take(BACKENDS).map(|member| member.vm_uid.clone()).collect(),
        source_ranges: source_ranges(service)?,
        affinity_seconds: affinity(service),
    })
}

fn invalid(key: &str, value: &str, rule: &str) -> Problem {
    Problem::Invalid(format!("the annotation {key} is {value:?}: {rule}"))
}

fn number(of_kubernetes: i32) -> u32 {
    u32::try_from(of_kubernetes).unwrap_or_default()
}

fn port(port: &ServicePort) -> v1::ServicePort {
    let protocol = if port.protocol.is_empty() { "TCP" } else { &port.protocol };
    v1::ServicePort {
        name: port.name.clone(),
        protocol: protocol.to_owned(),
        port: number(port.port),
        node_port: number(port.node_port),
    }
}

fn shared(
    service: &Service,
    text: &str,
    primary: impl FnOnce(&str, &str) -> Option<ServiceReference>,
) -> Result<ServiceReference, Problem> {
    let own = service.metadata.namespace.as_deref().unwrap_or_default();
    let (namespace, other) = text.split_once('/').unwrap_or((own, text));
    if namespace.is_empty() || other.is_empty() || other.contains('/') {
        return Err(invalid(
            PRIMARY,
            text,
            "it must be the namespace and the name of a Service, separated by \"/\"",
        ));
    }
    if (namespace, other) == (own, name(&service.metadata)) {
        return Err(invalid(PRIMARY, text, "a Service cannot share its own address; remove the annotation"));
    }
    primary(namespace, other).ok_or_else(|| {
        Problem::NoPrimary(format!(
            "the Service {namespace}/{other}, whose address it is to share ({PRIMARY}), does not exist or \
             has no load balancer"
        ))
    })
}

fn health_check(service: &Service) -> Result<Option<HealthCheck>, Problem> {
    let value = |key: &str, most: u32| match annotation(&service.metadata, key) {
        None => Ok(0),
        Some(text) => match text.parse::<u32>() {
            Ok(number) if (1..=most).contains(&number) => Ok(number),
            _ => Err(invalid(key, text, &format!("it must be a number from 1 to {most}"))),
        },
    };
    let check = HealthCheck {
        port: value(HEALTH_PORT, 65_535)?,
        success_threshold: value(HEALTH_SUCCESS, 100)?,
        failure_threshold: value(HEALTH_FAILURE, 100)?,
        period_seconds: value(HEALTH_PERIOD, 3600)?,
        timeout_seconds: value(HEALTH_TIMEOUT, 3600)?,
    };
    if check == HealthCheck::default() {
        return Ok(None);
    }
    let port = check.port.to_string();
    if check.port == 0 {
        return Err(invalid(
            HEALTH_PORT,
            "",
            "the other healthcheck annotations need the port that is to be checked",
        ));
    }
    let found = service.spec.ports.iter().find(|one| number(one.port) == check.port && is_tcp(one));
    match found {
        None => Err(invalid(HEALTH_PORT, &port, "it is not a TCP port of the Service")),
        Some(found) if found.node_port <= 0 => {
            Err(invalid(HEALTH_PORT, &port, "the port has no node port, so nothing can be checked on Nodes"))
        }
        Some(_) => Ok(Some(check)),
    }
}

fn is_tcp(port: &ServicePort) -> bool {
    port.protocol.is_empty() || port.protocol == "TCP"
}

fn addresses(service: &Service) -> Result<Vec<String>, Problem> {
    let (text, what) = match annotation(&service.metadata, ADDRESSES) {
        Some(text) => (text, ADDRESSES),
        None => (service.spec.load_balancer_ip.as_str(), "spec.loadBalancerIP"),
    };
    let mut all: Vec<IpAddr> = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let address: IpAddr = word
            .parse()
            .map_err(|_| Problem::Invalid(format!("{what} contains {word:?}, which is not an IP address")))?;
        if all.iter().any(|other| other.is_ipv4() == address.is_ipv4()) {
            return Err(Problem::Invalid(format!(
                "{what} contains more than one address of a family: {text:?}"
            )));
        }
        all.push(address);
    }
    Ok(all.iter().map(IpAddr::to_string).collect())
}

/// Returns the families, the first one first, and whether all of them are required.
fn families(service: &Service) -> (Vec<IpFamily>, bool) {
    let spec = &service.spec;
    let mut families: Vec<_> = spec
        .ip_families
        .iter()
        .filter_map(|family| match family.as_str() {
            "IPv4" => Some(IpFamily::Ipv4),
            "IPv6" => Some(IpFamily::Ipv6),
            _ => None,
        })
        .collect();
    families.dedup();
    families.truncate(2);
    if families.is_empty() {
        let is_v6 = spec.cluster_ip.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6());
        families.push(if is_v6 { IpFamily::Ipv6 } else { IpFamily::Ipv4 });
    }
    (families, spec.ip_family_policy == "RequireDualStack")
}

fn source_ranges(service: &Service) -> Result<Vec<String>, Problem> {
    let ranges = service.spec.load_balancer_source_ranges.iter().map(|text| text.trim());
    let checked = ranges.map(|text| match text.parse::<Net>() {
        Ok(_) => Ok(text.to_owned()),
        Err(why) => Err(Problem::Invalid(format!("spec.loadBalancerSourceRanges: {why}"))),
    });
    checked.collect()
}

fn affinity(service: &Service) -> u32 {
    if service.spec.session_affinity != "ClientIP" {
        return 0;
    }
    let seconds = service.spec.session_affinity_config.client_ip.timeout_seconds;
    number(if seconds > 0 { seconds } else { AFFINITY_SECONDS })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn defaults() -> Defaults {
        Defaults { class: "guestlet.io/lb".into(), without_class: true, announcing: Announcing::KubeVip }
    }

    fn service(annotations: &[(&str, &str)]) -> Service {
        let annotations: BTreeMap<_, _> = annotations.iter().copied().collect();
        serde_json::from_value(json!({
            "metadata": { "name": "web", "namespace": "shop", "uid": "u1", "annotations": annotations },
            "spec": {
                "type": "LoadBalancer",
                "ports": [
                    { "name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080 },
                    { "name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053 },
                    { "name": "bare", "port": 81 },
                ],
            },
        }))
        .unwrap()
    }

    fn asked(service: &Service) -> Result<EnsureLoadBalancerRequest, Problem> {
        let members = [("vm-1", true), ("vm-2", false)].map(|(vm_uid, takes_traffic)| Member {
            vm_uid: vm_uid.into(),
            is_control_plane: false,
            takes_traffic,
        });
        let other = |namespace: &str, name: &str| {
            (namespace, name)
                .eq(&("shop", "main"))
                .then(|| ServiceReference { uid: "u0".into(), ..ServiceReference::default() })
        };
        request(service, &defaults(), &members, other)
    }

    #[track_caller]
    fn is_refused(annotations: &[(&str, &str)], words: &str) {
        match asked(&service(annotations)) {
            Err(Problem::Invalid(why) | Problem::NoPrimary(why)) => assert!(why.contains(words), "{why}"),
            Ok(request) => panic!("{annotations:?}: {request:?}"),
        }
    }

    #[test]
    fn a_service_without_annotations() {
        let request = asked(&service(&[])).unwrap();
        assert_eq!((request.ipam(), request.announcing()), (Ipam::Unspecified, Announcing::KubeVip));
        assert_eq!(
            (request.families().collect::<Vec<_>>(), request.all_families),
            (vec![IpFamily::Ipv4], false)
        );
        let ports: Vec<_> =
            request.ports.iter().map(|port| (port.protocol.as_str(), port.node_port)).collect();
        assert_eq!(ports, [("TCP", 30080), ("UDP", 30053), ("TCP", 0)]);
        assert!(
            request.backends.is_empty() && request.addresses.is_empty() && request.health_check.is_none()
        );
    }

    #[test]
    fn annotations_keep_their_meaning() {
        let all = [
            (IPAM, "dhcp"),
            (NETWORK, "ns/net"),
            (PRIMARY, "shop/main"),
            (ANNOUNCE, "host"),
            (ADDRESSES, "192.0.2.7, 2001:db8::7"),
        ];
        let request = asked(&service(&all)).unwrap();
        assert_eq!((request.ipam(), request.network.as_str()), (Ipam::Dhcp, "ns/net"));
        assert_eq!(
            (request.announcing(), request.backends.as_slice()),
            (Announcing::Host, &["vm-1".to_owned()][..])
        );
        assert_eq!(request.addresses, ["192.0.2.7", "2001:db8::7"]);
        assert_eq!(request.share_with.unwrap().uid, "u0");
        assert!(asked(&service(&[(PRIMARY, "main")])).is_ok(), "in its own namespace");
        let check = asked(&service(&[(HEALTH_PORT, "80"), (HEALTH_FAILURE, "5")])).unwrap();
        assert_eq!(check.backends, ["vm-1"]);
        let check = check.health_check.unwrap();
        assert_eq!((check.port, check.failure_threshold, check.success_threshold), (80, 5, 0));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_key() {
        is_refused(&[(IPAM, "Pool")], "ipam is \"Pool\"");
        is_refused(&[(ANNOUNCE, "everybody")], "guestlet.io/announce is \"everybody\"");
        is_refused(&[(PRIMARY, "a/b/c")], "separated by \"/\"");
        is_refused(&[(PRIMARY, "shop/web")], "its own address");
        is_refused(&[(PRIMARY, "shop/none")], "does not exist");
        is_refused(&[(HEALTH_PORT, "http")], "a number from 1");
        is_refused(&[(HEALTH_PORT, "0")], "a number from 1");
        is_refused(&[(HEALTH_PORT, "53")], "not a TCP port of");
        is_refused(&[(HEALTH_PORT, "81")], "no node port");
        is_refused(&[(HEALTH_PERIOD, "5")], "need the port");
        is_refused(&[(HEALTH_PORT, "80"), (HEALTH_TIMEOUT, "-1")], "a number from 1");
        is_refused(&[(ADDRESSES, "192.0.2.7,192.0.2.8")], "more than one");
        is_refused(&[(ADDRESSES, "web")], "which is not an IP address");
        let mut ranges = service(&[]);
        ranges.spec.load_balancer_source_ranges = vec!["192.0.2.0/99".into()];
        assert!(matches!(asked(&ranges), Err(Problem::Invalid(_))));
        assert_eq!(
            unknown(&service(&[("guestlet.io/x", "1"), (NETWORK, "n"), (IDLE[0], "p"), ("other/x", "1")])),
            ["guestlet.io/x"]
        );
    }

    #[test]
    fn classes_say_whose_a_service_is() {
        let of = |class: Option<&str>, without_class| {
            let mut one = service(&[]);
            one.spec.load_balancer_class = class.map(str::to_owned);
            is_wanted(&one, &Defaults { without_class, ..defaults() })
        };
        assert!(of(None, true) && of(Some("guestlet.io/lb"), false));
        assert!(!of(None, false) && !of(Some("other"), true));
        let mut other = service(&[]);
        other.spec.r#type = "ClusterIP".into();
        assert!(!is_wanted(&other, &defaults()));
    }

    #[test]
    fn families_affinity_and_policies() {
        let mut dual = service(&[]);
        dual.spec.ip_families = vec!["IPv6".into(), "IPv4".into()];
        dual.spec.ip_family_policy = "RequireDualStack".into();
        dual.spec.session_affinity = "ClientIP".into();
        (dual.spec.external_traffic_policy, dual.spec.health_check_node_port) = ("Local".into(), 31000);
        let request = asked(&dual).unwrap();
        assert_eq!(request.families().collect::<Vec<_>>(), [IpFamily::Ipv6, IpFamily::Ipv4]);
        assert!(request.all_families && request.local_traffic);
        assert_eq!((request.affinity_seconds, request.health_check_node_port), (10_800, 31_000));
        let mut old = service(&[]);
        old.spec.cluster_ip = "fd00::1".into();
        assert_eq!(asked(&old).unwrap().families().collect::<Vec<_>>(), [IpFamily::Ipv6]);
    }
}
