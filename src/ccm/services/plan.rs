//! Plan of what is written to a Service, from the state of its load balancer that the host half reports.
//! Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::wanted::{NETWORK, PREFIX, PRIMARY};
use crate::ccm::events::News;
use crate::ccm::instance::{Instances, clean};
use crate::ccm::nodes::Member;
use crate::ccm::objects::{OWN, Service, annotation};
use crate::wire::proto::v1::load_balancer::State;
use crate::wire::proto::v1::{Announcing, LoadBalancer};

/// Finalizer that keeps a Service until its load balancer is released.
pub const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
/// Annotation with the addresses that kube-vip announces, separated by commas.
pub const VIP_ADDRESSES: &str = "kube-vip.io/loadbalancerIPs";
/// Annotation with the interface on which kube-vip announces them.
pub const VIP_INTERFACE: &str = "kube-vip.io/serviceInterface";
/// Annotation with what this program has written to both: the addresses, a space, and the interface. It tells
/// what to remove when kube-vip is no longer to announce the Service.
pub const VIP_WRITTEN: &str = "guestlet.io/kube-vip";
/// Condition that tells whether the Service has what it requests.
pub const READY: &str = "guestlet.io/LoadBalancerReady";
/// Condition that tells whether all Nodes pass its health check.
pub const HEALTHY: &str = "guestlet.io/BackendsHealthy";
/// Limit of the Nodes that are named in one message.
const NAMED: usize = 8;

/// Changes to a Service.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Merge patch of the Service.
    pub service: Option<Value>,
    /// Merge patch of its status.
    pub status: Option<Value>,
    /// Events for people.
    pub news: Vec<News>,
}

impl Plan {
    /// Returns whether conditions are to be written.
    pub fn has_conditions(&self) -> bool {
        self.status.as_ref().is_some_and(|patch| patch["status"]["conditions"].is_array())
    }

    /// Leaves the conditions for a later write.
    pub fn without_conditions(&mut self) {
        let Some(status) = self.status.as_mut().and_then(|patch| patch["status"].as_object_mut()) else {
            return;
        };
        status.remove("conditions");
        if status.is_empty() {
            self.status = None;
        }
    }
}

/// Returns whether the Service has this program's finalizer.
pub fn has_finalizer(service: &Service) -> bool {
    service.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER)
}

/// Returns the finalizers with this program's, or without it.
fn finalizers(service: &Service, with: bool) -> Value {
    let mut all = service.metadata.finalizers.clone().unwrap_or_default();
    all.retain(|one| one != FINALIZER);
    all.extend(with.then(|| FINALIZER.to_owned()));
    json!(all)
}

/// Plans what is written before any request to the host half.
pub fn begin(service: &Service) -> Option<Value> {
    (!has_finalizer(service)).then(|| json!({ "metadata": { "finalizers": finalizers(service, true) } }))
}

/// Plans what is written before a load balancer is released, so that nobody announces an address that may
/// soon belong to somebody else: first the status, and then the annotations for announcers.
pub fn withdraw(service: &Service) -> Plan {
    let mut metadata = Map::new();
    let gone = [VIP_ADDRESSES, VIP_INTERFACE, VIP_WRITTEN].into_iter();
    let gone = gone.filter(|key| annotation(&service.metadata, key).is_some());
    let gone: Map<_, _> = gone.map(|key| (key.to_owned(), Value::Null)).collect();
    if !gone.is_empty() {
        metadata.insert("annotations".to_owned(), Value::Object(gone));
    }
    let others: Vec<_> = service.status.conditions.iter().filter(|one| !is_ours(one)).collect();
    let has_status =
        !service.status.load_balancer.ingress.is_empty() || others.len() < service.status.conditions.len();
    Plan {
        service: (!metadata.is_empty()).then(|| json!({ "metadata": metadata })),
        status: has_status
            .then(|| json!({ "status": { "loadBalancer": { "ingress": null }, "conditions": others } })),
        news: Vec::new(),
    }
}

/// Plans what is written once the load balancer is completely released.
pub fn end(service: &Service) -> Plan {
    let mut metadata = Map::new();
    if has_finalizer(service) {
        metadata.insert("finalizers".to_owned(), finalizers(service, false));
    }
    if service.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(PRIMARY)) {
        metadata.insert("labels".to_owned(), json!({ PRIMARY: null }));
    }
    let is_told = service.metadata.deletion_timestamp.is_none();
    let news = is_told.then(|| News::normal("DeletedLoadBalancer", "its load balancer is released"));
    Plan {
        service: (!metadata.is_empty()).then(|| json!({ "metadata": metadata })),
        status: None,
        news: news.into_iter().collect(),
    }
}

fn is_ours(condition: &Condition) -> bool {
    condition.type_ == READY || condition.type_ == HEALTHY
}

/// Plans what is written to a Service that has this load balancer. `told` are the conditions that were last
/// written to it; an old API server does not keep them.
pub fn plan(
    service: &Service,
    balancer: &LoadBalancer,
    instances: &Instances,
    members: &[Member],
    told: Option<&BTreeMap<String, (bool, String, String)>>,
) -> (Plan, BTreeMap<String, (bool, String, String)>) {
    let mut plan = Plan::default();
    let state = balancer.state();
    let mut ready = (state == State::Ready, reason(balancer), clean(&balancer.message));
    let addresses: Vec<&str> = balancer
        .addresses
        .iter()
        .map(|one| one.address.as_str())
        .filter(|text| text.parse::<IpAddr>().is_ok())
        .collect();
    if state == State::Ready && addresses.is_empty() {
        ready = (
            false,
            "NoAddress".to_owned(),
            "the host half reports it as ready, but without an address".to_owned(),
        );
    }
    let is_vip = balancer.announcing() == Announcing::KubeVip;
    let mut metadata = Map::new();
    if !is_vip {
        let withdrawn = withdrawn(service, &addresses.join(","));
        if !withdrawn.is_empty() {
            metadata.insert("annotations".to_owned(), Value::Object(withdrawn));
        }
    }
    // The former annotations stay in force until there is a replacement.
    if !addresses.is_empty() {
        match interface(service, balancer, instances, members).filter(|_| is_vip).transpose() {
            Ok(interface) => {
                if is_vip {
                    announce(service, &addresses, interface.as_deref(), &mut plan, &mut metadata);
                }
                label(service, &mut metadata);
            }
            Err(why) => ready = (false, "InterfaceUnclear".to_owned(), why),
        }
    }
    if !metadata.is_empty() {
        plan.service = Some(json!({ "metadata": metadata }));
    }
    if !ready.0 && state == State::Failed || ready.1 == "InterfaceUnclear" || ready.1 == "NoAddress" {
        plan.news.push(News::warning(&ready.1, ready.2.clone()));
    }
    let mut conditions = BTreeMap::from([(READY.to_owned(), ready)]);
    if let Some(healthy) = healthy(balancer, &mut plan.news) {
        conditions.insert(HEALTHY.to_owned(), healthy);
    }
    let ingress: Vec<_> = addresses.iter().map(|address| json!({ "ip": address })).collect();
    let has: Vec<_> = service.status.load_balancer.ingress.iter().map(|one| one.ip.as_str()).collect();
    let mut status = Map::new();
    // Where kube-vip announces the address, it sets the status itself.
    if !is_vip && !addresses.is_empty() && has != addresses {
        status.insert("loadBalancer".to_owned(), json!({ "ingress": ingress }));
        plan.news.push(News::normal("EnsuredLoadBalancer", format!("it has {}", addresses.join(", "))));
    }
    if told != Some(&conditions) && conditions != said(service) {
        status.insert("conditions".to_owned(), json!(written(service, &conditions)));
    }
    if !status.is_empty() {
        plan.status = Some(json!({ "status": status }));
    }
    (plan, conditions)
}

/// Returns one word that an event and a condition accept as a reason.
fn reason(balancer: &LoadBalancer) -> String {
    let is_word = |text: &str| {
        !text.is_empty() && text.len() <= 64 && text.chars().all(|one| one.is_ascii_alphanumeric())
    };
    match balancer.state() {
        State::Ready => "Ready",
        State::Pending if balancer.reason.is_empty() => "Pending",
        State::Releasing => "Releasing",
        _ if is_word(&balancer.reason) => &balancer.reason,
        _ => "Failed",
    }
    .to_owned()
}

/// Plans the annotations that tell kube-vip which addresses to announce.
fn announce(
    service: &Service,
    addresses: &[&str],
    interface: Option<&str>,
    plan: &mut Plan,
    metadata: &mut Map<String, Value>,
) {
    let has = |key| annotation(&service.metadata, key);
    let joined = addresses.join(",");
    let mut annotations = Map::new();
    if has(VIP_ADDRESSES) != Some(&joined) {
        annotations.insert(VIP_ADDRESSES.to_owned(), json!(joined));
        let words = format!("it has {}; kube-vip announces it", addresses.join(", "));
        plan.news.push(News::normal("EnsuredLoadBalancer", words));
    }
    if let Some(interface) = interface.filter(|interface| has(VIP_INTERFACE) != Some(interface)) {
        annotations.insert(VIP_INTERFACE.to_owned(), json!(interface));
    }
    let written = format!("{joined} {}", interface.unwrap_or_default());
    if has(VIP_WRITTEN) != Some(written.trim_end()) {
        annotations.insert(VIP_WRITTEN.to_owned(), json!(written.trim_end()));
    }
    if !annotations.is_empty() {
        metadata.insert("annotations".to_owned(), Value::Object(annotations));
    }
}

/// Plans the removal of the annotations for kube-vip that this program has written, or that equal them.
/// Otherwise two announcers might announce one address, or kube-vip one that the Service no longer has and
/// another may have. Other values stay.
fn withdrawn(service: &Service, joined: &str) -> Map<String, Value> {
    let has = |key| annotation(&service.metadata, key);
    let (addresses, interface) =
        has(VIP_WRITTEN).map(|text| text.split_once(' ').unwrap_or((text, ""))).unwrap_or_default();
    let mut gone = Vec::new();
    if has(VIP_WRITTEN).is_some() {
        gone.push(VIP_WRITTEN);
    }
    if has(VIP_ADDRESSES).is_some_and(|found| found == addresses || found == joined) {
        gone.push(VIP_ADDRESSES);
        // If the Service names no network, this value was not written by this program.
        if has(VIP_INTERFACE).is_some_and(|found| found == interface || has(NETWORK).is_some()) {
            gone.push(VIP_INTERFACE);
        }
    }
    gone.into_iter().map(|key| (key.to_owned(), Value::Null)).collect()
}

/// Sets the primary Service as a label, by which Harvester's cloud provider finds the Services that share an
/// address.
fn label(service: &Service, metadata: &mut Map<String, Value>) {
    let label = annotation(&service.metadata, PRIMARY).map(|primary| {
        let own = service.metadata.namespace.as_deref().unwrap_or_default();
        let (namespace, name) = primary.split_once('/').unwrap_or((own, primary));
        format!("{namespace}.{name}")
    });
    let present = service.metadata.labels.as_ref().and_then(|labels| labels.get(PRIMARY));
    if label.as_ref() != present {
        metadata.insert("labels".to_owned(), json!({ PRIMARY: label }));
    }
}

/// Returns the interface on which kube-vip announces addresses of the network that the Service names; `None`
/// if it names none. kube-vip uses the same name on all Nodes that it runs on.
fn interface(
    service: &Service,
    balancer: &LoadBalancer,
    instances: &Instances,
    members: &[Member],
) -> Option<Result<String, String>> {
    let asked = annotation(&service.metadata, NETWORK)?;
    let network = if balancer.network.is_empty() { asked } else { &balancer.network };
    let is_run_on = |member: &&Member| member.is_control_plane;
    let control_plane: Vec<_> = members.iter().filter(is_run_on).collect();
    let on: Vec<_> = if control_plane.is_empty() { members.iter().collect() } else { control_plane };
    let mut names: Vec<&str> = Vec::new();
    for member in on {
        let instance = instances.all.get(&member.vm_uid);
        let found =
            instance.and_then(|instance| instance.interfaces.iter().find(|one| one.network == network));
        let Some(name) = found.map(|one| one.name.as_str()).filter(|name| !name.is_empty()) else {
            let vm = instance.map_or(member.vm_uid.as_str(), |instance| &instance.name);
            return Some(Err(format!(
                "cannot tell kube-vip which interface the network {network} is on: the interface of the VM \
                 {vm} is not known"
            )));
        };
        names.push(name);
    }
    names.sort_unstable();
    names.dedup();
    Some(match names.as_slice() {
        [name] => Ok((*name).to_owned()),
        [] => Err(format!(
            "cannot tell kube-vip which interface the network {network} is on: there is no Node to read it \
             from"
        )),
        several => Err(format!(
            "the network {network} is on interfaces of different names ({}), but kube-vip needs one name for all Nodes",
            several.join(", ")
        )),
    })
}

/// Returns whether all Nodes pass their health checks; `None` if they are not checked.
fn healthy(balancer: &LoadBalancer, news: &mut Vec<News>) -> Option<(bool, String, String)> {
    if balancer.failing.is_empty() {
        let words = format!("{} Nodes receive its traffic", balancer.healthy);
        return (balancer.healthy > 0).then(|| (true, "Healthy".to_owned(), words));
    }
    let mut failing: Vec<_> = balancer
        .failing
        .iter()
        .take(NAMED)
        .map(|one| format!("{}: {}", clean(&one.vm_name), clean(&one.problem)))
        .collect();
    if balancer.failing.len() > NAMED {
        failing.push("…".to_owned());
    }
    let words = match (balancer.healthy, balancer.announcing()) {
        // The host forwards nothing in this case, and nothing in the cluster performs the check.
        (0, Announcing::KubeVip | Announcing::None) => format!(
            "no Node passes its health check, and its address stays: what announces it in the cluster \
             ignores health checks: {}",
            failing.join("; ")
        ),
        (healthy, _) => format!(
            "{healthy} Nodes receive its traffic; these do not, as they fail its health check: {}",
            failing.join("; ")
        ),
    };
    news.push(News::warning("BackendsUnhealthy", words.clone()));
    Some((false, "Unhealthy".to_owned(), words))
}

/// Returns this program's conditions of a Service.
fn said(service: &Service) -> BTreeMap<String, (bool, String, String)> {
    let ours = service.status.conditions.iter().filter(|one| is_ours(one));
    ours.map(|one| (one.type_.clone(), (one.status == "True", one.reason.clone(), one.message.clone())))
        .collect()
}

/// Returns all conditions of a Service, with this program's replaced by the wanted ones.
fn written(service: &Service, wanted: &BTreeMap<String, (bool, String, String)>) -> Vec<Condition> {
    let mut all: Vec<_> = service.status.conditions.iter().filter(|one| !is_ours(one)).cloned().collect();
    for (kind, (is_true, reason, message)) in wanted {
        let status = if *is_true { "True" } else { "False" };
        let before = service.status.conditions.iter().find(|one| one.type_ == *kind && one.status == status);
        let since =
            before.map_or_else(|| Time(Timestamp::now()), |before| before.last_transition_time.clone());
        all.push(Condition {
            type_: kind.clone(),
            status: status.to_owned(),
            reason: reason.clone(),
            message: message.chars().take(1024).collect(),
            last_transition_time: since,
            observed_generation: None,
        });
    }
    all
}

/// Returns whether an annotation of a Service matters here, so that its change has to be handled.
pub fn is_concerned(key: &str) -> bool {
    key != VIP_WRITTEN && (key.starts_with(PREFIX) || key.starts_with(OWN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::LoadBalancerAddress;

    fn service(annotations: &[(&str, &str)]) -> Service {
        let mut service = Service::default();
        let all = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        service.metadata.annotations = Some(all.collect());
        service
    }

    /// Returns the changes to the annotations of a Service with this address and announcer.
    fn written(annotations: &[(&str, &str)], by: Announcing, address: &str) -> Value {
        let address = LoadBalancerAddress { address: address.into(), pool: "pool".into() };
        let balancer = LoadBalancer {
            state: State::Ready.into(),
            announcing: by.into(),
            addresses: vec![address],
            ..LoadBalancer::default()
        };
        let (plan, _) = plan(&service(annotations), &balancer, &Instances::default(), &[], None);
        plan.service.map(|patch| patch["metadata"]["annotations"].clone()).unwrap_or_default()
    }

    /// After a change of the announcer the host assigns another address, but kube-vip continued to announce the
    /// first.
    #[test]
    fn kube_vip_keeps_nothing_that_it_was_told_by_this_program() {
        let told = written(&[], Announcing::KubeVip, "192.0.2.1");
        assert_eq!(told, json!({ VIP_ADDRESSES: "192.0.2.1", VIP_WRITTEN: "192.0.2.1" }));
        let has = [(VIP_ADDRESSES, "192.0.2.1"), (VIP_WRITTEN, "192.0.2.1")];
        assert_eq!(written(&has, Announcing::KubeVip, "192.0.2.1"), Value::Null);
        for by in [Announcing::Host, Announcing::None] {
            let gone = json!({ VIP_ADDRESSES: null, VIP_WRITTEN: null });
            assert_eq!(written(&has, by, "198.51.100.1"), gone);
            assert_eq!(written(&has, by, "192.0.2.1"), gone);
        }
        let has =
            [(VIP_ADDRESSES, "192.0.2.1"), (VIP_INTERFACE, "enp1s0"), (VIP_WRITTEN, "192.0.2.1 enp1s0")];
        let gone = json!({ VIP_ADDRESSES: null, VIP_INTERFACE: null, VIP_WRITTEN: null });
        assert_eq!(written(&has, Announcing::Host, "198.51.100.1"), gone);
        // Values of others stay, but those that Harvester's cloud provider has written for the same address do not.
        let others = [(VIP_ADDRESSES, "203.0.113.9"), (VIP_INTERFACE, "eth9")];
        assert_eq!(written(&others, Announcing::Host, "198.51.100.1"), Value::Null);
        let same = [(VIP_ADDRESSES, "198.51.100.1")];
        assert_eq!(written(&same, Announcing::Host, "198.51.100.1"), json!({ VIP_ADDRESSES: null }));
        assert!(!is_concerned(VIP_WRITTEN) && is_concerned("guestlet.io/announce"));
    }

    #[test]
    fn what_is_given_back_is_not_announced_any_more_before_it_is() {
        let mut of = service(&[(VIP_ADDRESSES, "192.0.2.1"), (VIP_WRITTEN, "192.0.2.1")]);
        of.metadata.finalizers = Some(vec![FINALIZER.to_owned(), "example.com/other".to_owned()]);
        of.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        of.status.load_balancer.ingress = vec![crate::ccm::objects::Ingress { ip: "192.0.2.1".into() }];
        let first = withdraw(&of);
        let gone = json!({ "metadata": { "annotations": { VIP_ADDRESSES: null, VIP_WRITTEN: null } } });
        assert_eq!(first.service, Some(gone));
        assert_eq!(first.status.unwrap()["status"]["loadBalancer"], json!({ "ingress": null }));
        let last = end(&of).service.unwrap();
        assert_eq!(last, json!({ "metadata": { "finalizers": ["example.com/other"] } }));
        assert_eq!(withdraw(&service(&[])), Plan::default());
    }
}
