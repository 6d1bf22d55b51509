//! Decides which VM holds a claim, from the objects in the API of the host cluster. Pure.
//!
//! ```text
//!  a VM's spec, its instance's spec or its instance's status lists it,
//!             or a request to plug it that KubeVirt has accepted ──────▶ On that VM
//!     …those of several VMs do ────────────────────────────────────────▶ Unknown, or On the one on record
//!  none does, but a VolumeAttachment of it exists ─────────────────────▶ Unknown   (the node may still write)
//!             or a pod uses it ────────────────────────────────────────▶ Unknown   (such as a terminating hot-plug pod)
//!  none of these ──────────────────────────────────────────────────────▶ Off
//! ```
//!
//! All of this has to be read from the API server itself at the time of the decision, and not from a cache that
//! may be stale. A dead node keeps its claims until the host cluster has proved that it is dead, and therefore
//! deletes the VolumeAttachment or the pod. Until then the instance, the VolumeAttachment or the pod exists.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::names::Claim;
use super::objects::{self, Instance, InstanceSpec, VirtualMachine};
use crate::host::backends::volumes::{Holder, Place};

/// Objects that may refer to a claim.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// VMs in the claim's namespace that list claims.
    pub vms: Arc<Vec<Lister>>,
    /// Runs in that namespace that list claims or have volumes.
    pub instances: Arc<Vec<Lister>>,
    /// VolumeAttachments of the claim's PersistentVolume.
    pub attachments: Vec<Use>,
    /// Pods in the namespace that use the claim and have not ended.
    pub pods: Vec<Use>,
}

/// VM, or run of one, reduced to what shows the volumes that it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lister {
    /// Lasting identifier of the VM: its UID.
    uuid: Option<String>,
    name: Option<String>,
    /// Names of the claims in its spec or status.
    claims: Vec<String>,
    /// Names of its volumes, as the status lists them or as a request will add them.
    volumes: Vec<String>,
    /// Hot-plugged volumes among them whose source the status does not mention.
    unsaid: Vec<String>,
    /// For a run: the nodes where its disks may be open.
    nodes: Vec<String>,
    /// For a run: the UIDs of its launcher pods, which own the pods through which KubeVirt hot-plugs volumes.
    launchers: Vec<String>,
}

impl Lister {
    /// Extracts a VM, if it lists a claim, or KubeVirt has been asked to plug one into it.
    pub fn of_vm(vm: &VirtualMachine) -> Option<Self> {
        let coming = vm.asked_for().filter_map(|one| one.volume_source.claim().map(str::to_owned));
        let claims: Vec<_> = listed(&vm.spec.template.spec).into_iter().chain(coming).collect();
        let volumes: Vec<_> = vm.asked_for().map(|one| one.name.clone()).collect();
        let (uuid, name) = (vm.metadata.uid.clone(), vm.metadata.name.clone());
        let vm = Self { uuid, name, claims, volumes, ..Self::default() };
        (!vm.claims.is_empty() || !vm.volumes.is_empty()).then_some(vm)
    }

    /// Extracts a run of a VM, if it has any claim or volume, is about to get one, or has not released one yet.
    pub fn of_instance(instance: &Instance) -> Option<Self> {
        let status = &instance.status.volume_status;
        let of_claim = |info: &objects::ClaimInfo| info.claim_name.clone();
        let there =
            status.iter().filter_map(|one| one.persistent_volume_claim_info.as_ref().and_then(of_claim));
        let claims: Vec<_> = listed(&instance.spec).into_iter().chain(there).collect();
        let volumes: Vec<_> = status.iter().map(|one| one.name.clone()).collect();
        let is_unsaid = |one: &&objects::VolumeStatus| {
            one.hotplug_volume.is_some()
                && one.persistent_volume_claim_info.as_ref().and_then(of_claim).is_none()
        };
        let unsaid = status.iter().filter(is_unsaid).map(|one| one.name.clone()).collect();
        let (uuid, name) = (lasting(instance), instance.metadata.name.clone());
        let nodes = instance.nodes().map(str::to_owned).collect();
        let launchers = instance.status.active_pods.keys().cloned().collect();
        let run = Self { uuid, name, claims, volumes, unsaid, nodes, launchers };
        (!run.claims.is_empty() || !run.volumes.is_empty()).then_some(run)
    }

    /// Reports whether this is the VM with this UUID, or a run of it.
    fn is_of(&self, uuid: &str) -> bool {
        self.uuid.as_ref().is_some_and(|one| one.eq_ignore_ascii_case(uuid))
    }

    /// Reports whether it has this claim.
    fn has(&self, claim: &Claim) -> bool {
        self.claims.contains(&claim.name)
            || self.volumes.contains(&claim.volume())
            // Other programs usually name a volume after its claim.
            || self.unsaid.contains(&claim.name)
    }
}

/// Object that uses a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Use {
    /// Name of the object.
    pub name: String,
    /// Node of the object; empty if it is not decided.
    pub node: String,
    /// True for a pod through which KubeVirt hot-plugs volumes.
    pub is_attacher: bool,
    /// For a pod: the UIDs of its owners.
    pub owners: Vec<String>,
}

impl Use {
    /// Reports whether this pod belongs to one of the launchers of a run.
    fn belongs_to(&self, run: &Lister) -> bool {
        self.owners.iter().any(|owner| run.launchers.contains(owner))
    }
}

/// Finds a user of the claim other than the VM with this UUID: a pod that is not hot-plugging it into that VM,
/// or an attachment of its volume to a node where that VM does not have it. Returns a description that includes
/// the location.
///
/// After a migration the volume stays attached to the previous node for a moment, so such a finding may have
/// disappeared by the next check.
pub fn stranger(uuid: &str, evidence: &Evidence) -> Option<String> {
    let runs: Vec<&Lister> = evidence.instances.iter().filter(|run| run.is_of(uuid)).collect();
    let is_own = |pod: &Use| pod.is_attacher && runs.iter().any(|run| pod.belongs_to(run));
    if let Some(Use { name, node, .. }) = evidence.pods.iter().find(|pod| !is_own(pod)) {
        return Some(format!("the pod {name} on the node {node:?} uses it, too"));
    }
    // KubeVirt attaches the volume to the target node before the status mentions the migration.
    let is_known = |node: &String| {
        !node.is_empty()
            && (runs.iter().any(|run| run.nodes.contains(node))
                || evidence.pods.iter().any(|pod| pod.node == *node))
    };
    let elsewhere = evidence.attachments.iter().find(|one| !is_known(&one.node));
    elsewhere.map(|Use { name, node, .. }| {
        format!(
            "the host cluster has it attached to the node {node:?} as well (VolumeAttachment {name}), where the VM does not run"
        )
    })
}

/// Reports whether the claim is certain to have a user other than the VM with this UUID: another VM that lists
/// it, or a pod that KubeVirt did not create for this VM. A hot-plug pod whose owner no longer exists does not
/// count, because it may have been this VM's.
pub fn has_rival(uuid: &str, claim: &Claim, evidence: &Evidence) -> bool {
    let mut listers = evidence.instances.iter().chain(&*evidence.vms);
    let is_elsewhere = |pod: &Use| {
        let mut others = evidence.instances.iter().filter(|run| !run.is_of(uuid));
        !pod.is_attacher || others.any(|run| pod.belongs_to(run))
    };
    listers.any(|one| one.has(claim) && !one.is_of(uuid)) || evidence.pods.iter().any(is_elsewhere)
}

/// Finds what may be left of a volume's use by another VM, given that only the VM with this UUID lists it: a
/// hot-plug pod, or an attachment to a node that nothing else accounts for. Returns a description that includes
/// the location.
pub fn leftover(uuid: &str, evidence: &Evidence) -> Option<String> {
    let runs: Vec<&Lister> = evidence.instances.iter().filter(|run| run.is_of(uuid)).collect();
    let is_another = |pod: &&Use| pod.is_attacher && !runs.iter().any(|run| pod.belongs_to(run));
    if let Some(Use { name, node, .. }) = evidence.pods.iter().find(is_another) {
        return Some(format!("the pod {name} on the node {node:?} still has it"));
    }
    let accounts = |node: &String| {
        runs.iter().any(|run| run.nodes.contains(node)) || evidence.pods.iter().any(|pod| pod.node == *node)
    };
    let elsewhere = evidence.attachments.iter().find(|one| one.node.is_empty() || !accounts(&one.node));
    elsewhere.map(|Use { name, node, .. }| {
        format!("the host cluster still has it attached to the node {node:?} (VolumeAttachment {name})")
    })
}

/// Decides which VM holds a claim, given the VM on record. If other VMs list it as well, the one on record is
/// returned: it has to release the claim first.
pub fn judge_remembered(claim: &Claim, remembered: Option<&str>, evidence: &Evidence) -> Holder {
    let is_its = |place: &Place| remembered.is_some_and(|uuid| place.uuid.eq_ignore_ascii_case(uuid));
    match places(claim, evidence).find(is_its) {
        Some(place) => Holder::On(place),
        None => judge(claim, evidence),
    }
}

/// Returns the VMs that list a claim.
fn places(claim: &Claim, evidence: &Evidence) -> impl Iterator<Item = Place> {
    let mut places = BTreeMap::new();
    for one in evidence.instances.iter().chain(&*evidence.vms).filter(|one| one.has(claim)) {
        places.insert(one.uuid.clone(), one.name.clone());
    }
    // A VM counts as a holder even if its UID or name is missing.
    places.into_iter().map(|(uuid, name)| Place {
        uuid: uuid.unwrap_or_default().to_lowercase(),
        vm: format!("{}/{}", claim.namespace, name.unwrap_or_default()),
    })
}

/// Decides which VM holds a claim.
pub fn judge(claim: &Claim, evidence: &Evidence) -> Holder {
    let mut places = places(claim, evidence);
    match (places.next(), places.next()) {
        (Some(place), None) => Holder::On(place),
        (Some(one), Some(other)) => Holder::Unknown(format!(
            "both the VM {} and the VM {} list the claim {}; remove it from the spec of one of them",
            one.vm, other.vm, claim.name
        )),
        (None, _) => nobody(claim, evidence),
    }
}

fn nobody(claim: &Claim, evidence: &Evidence) -> Holder {
    let Claim { namespace, name } = claim;
    if let Some(Use { name: attachment, node, .. }) = evidence.attachments.first() {
        return Holder::Unknown(format!(
            "no VM lists the claim {namespace}/{name}, but the host cluster has its volume attached to the node {node:?} \
             (VolumeAttachment {attachment})"
        ));
    }
    match evidence.pods.first() {
        Some(Use { name: pod, node, .. }) => Holder::Unknown(format!(
            "no VM lists the claim {namespace}/{name}, but the pod {pod} on the node {node:?} uses it"
        )),
        None => Holder::Off,
    }
}

/// Returns the lasting identifier of an instance: the UID of its VM, or its own UID if no VM owns it.
pub fn lasting(instance: &Instance) -> Option<String> {
    objects::owner(&instance.metadata).map(str::to_owned).or_else(|| instance.metadata.uid.clone())
}

/// Returns the claims that a spec lists.
fn listed(spec: &InstanceSpec) -> Vec<String> {
    spec.volumes.iter().filter_map(|volume| volume.claim().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim() -> Claim {
        Claim { namespace: "dev".to_owned(), name: "pvc-1".to_owned() }
    }

    fn vm(name: &str, volumes: &Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": format!("uid-{name}")},
            "spec": {"template": {"spec": {"volumes": volumes}}},
        }))
        .unwrap()
    }

    /// Builds a VM that KubeVirt has been asked to plug a claim into.
    fn asked(name: &str, volume: &str, claim: &str) -> VirtualMachine {
        let source = json!({"persistentVolumeClaim": {"claimName": claim}});
        let request = json!({"addVolumeOptions": {"name": volume, "disk": {}, "volumeSource": source}});
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": format!("uid-{name}")},
            "status": {"volumeRequests": [request]},
        }))
        .unwrap()
    }

    fn instance(name: &str, volumes: &Value, status: &Value) -> Instance {
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name,
                            "uid": format!("uid-{name}"), "controller": true}]);
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": "run", "ownerReferences": owner},
            "spec": {"volumes": volumes},
            "status": {"volumeStatus": status},
        }))
        .unwrap()
    }

    /// Builds the evidence from one VM and its instance.
    fn evidence(vm: &VirtualMachine, instance: &Instance) -> Evidence {
        let (vms, instances) = (Lister::of_vm(vm), Lister::of_instance(instance));
        let [vms, instances] = [vms, instances].map(|one| Arc::new(Vec::from_iter(one)));
        Evidence { vms, instances, ..Evidence::default() }
    }

    fn holder(evidence: &Evidence) -> String {
        match judge(&claim(), evidence) {
            Holder::On(place) => format!("on {} {}", place.vm, place.uuid),
            Holder::Off => "off".to_owned(),
            Holder::Unknown(why) => format!("unknown: {why}"),
        }
    }

    #[test]
    fn a_claim_is_held_by_whoever_lists_it_anywhere() {
        let (none, no_status) = (json!([]), json!([]));
        let source = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "pvc-1"}}]);
        let data = json!([{"name": "x", "dataVolume": {"name": "pvc-1"}}]);
        let other = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "pvc-2"}}]);
        let by_claim = json!([{"name": "y", "persistentVolumeClaimInfo": {"claimName": "pvc-1"}}]);
        let by_name = json!([{"name": claim().volume()}]);
        let cases = [
            (vm("a", &source), instance("b", &none, &no_status), "on dev/a uid-a"),
            (vm("a", &data), instance("a", &none, &no_status), "on dev/a uid-a"),
            (vm("a", &none), instance("a", &source, &no_status), "on dev/a uid-a"),
            (vm("a", &none), instance("a", &none, &by_claim), "on dev/a uid-a"),
            (vm("a", &none), instance("a", &none, &by_name), "on dev/a uid-a"),
            (vm("a", &source), instance("a", &source, &by_claim), "on dev/a uid-a"),
            (asked("a", "x", "pvc-1"), instance("a", &none, &no_status), "on dev/a uid-a"),
            (asked("a", &claim().volume(), "pvc-2"), instance("a", &none, &no_status), "on dev/a uid-a"),
            (asked("a", "x", "pvc-2"), instance("a", &none, &no_status), "off"),
            (vm("a", &other), instance("a", &other, &no_status), "off"),
        ];
        for (vm, instance, expected) in cases {
            let evidence = evidence(&vm, &instance);
            assert_eq!(holder(&evidence), expected, "{evidence:?}");
        }
        let both = evidence(&vm("a", &source), &instance("b", &none, &by_claim));
        assert!(
            holder(&both).starts_with("unknown: both the VM dev/a and the VM dev/b"),
            "{}",
            holder(&both)
        );
    }

    #[test]
    fn a_claim_that_no_vm_lists_is_held_until_nothing_uses_it() {
        let one = |name: &str| vec![Use { name: name.to_owned(), node: "n1".to_owned(), ..Use::default() }];
        let attached =
            Evidence { attachments: one("csi-1"), pods: one("hp-volume-1"), ..Evidence::default() };
        assert!(holder(&attached).contains("VolumeAttachment csi-1"), "{}", holder(&attached));
        let used = Evidence { pods: one("hp-volume-1"), ..Evidence::default() };
        assert!(holder(&used).contains("the pod hp-volume-1 on the node \"n1\""), "{}", holder(&used));
        assert_eq!(holder(&Evidence::default()), "off");
    }

    #[test]
    fn of_several_that_list_a_claim_the_one_that_is_remembered_has_it() {
        let source = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "pvc-1"}}]);
        let both = evidence(&vm("a", &source), &instance("b", &source, &json!([])));
        for (remembered, expected) in [("uid-a", "dev/a"), ("UID-B", "dev/b")] {
            let holder = judge_remembered(&claim(), Some(remembered), &both);
            assert!(matches!(&holder, Holder::On(place) if place.vm == expected), "{holder:?}");
        }
        for remembered in [None, Some("uid-c")] {
            let holder = judge_remembered(&claim(), remembered, &both);
            assert!(matches!(holder, Holder::Unknown(_)), "{holder:?}");
        }
        let one = evidence(&vm("a", &source), &instance("a", &source, &json!([])));
        assert!(
            matches!(judge_remembered(&claim(), Some("uid-c"), &one), Holder::On(place) if place.vm == "dev/a")
        );
    }

    #[test]
    fn what_is_left_of_a_volume_where_another_vm_had_it_is_named() {
        let uses =
            |name: &str, node: &str| Use { name: name.to_owned(), node: node.to_owned(), ..Use::default() };
        let attacher = |owner: &str| Use {
            is_attacher: true,
            owners: vec![owner.to_owned()],
            ..uses("hp-volume-1", "n1")
        };
        let left = |pods: Vec<Use>, attachments: Vec<Use>| {
            let source = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "pvc-1"}}]);
            let mut run = instance("a", &source, &json!([]));
            run.status.node_name = Some("n1".to_owned());
            run.status.active_pods = [("launcher-1".to_owned(), "n1".to_owned())].into();
            let evidence = Evidence { attachments, pods, ..evidence(&vm("a", &source), &run) };
            leftover("uid-a", &evidence).unwrap_or_default()
        };
        assert_eq!(left(vec![attacher("launcher-1")], vec![uses("csi-1", "n1")]), "");
        assert_eq!(left(vec![], vec![]), "");
        let (backup, its) = (uses("backup", "n3"), uses("csi-3", "n3"));
        assert_eq!(left(vec![backup], vec![its]), "", "a pod that has it by itself accounts for its node");
        let of_another = left(vec![attacher("launcher-0")], vec![uses("csi-1", "n1")]);
        assert!(of_another.contains("the pod hp-volume-1"), "{of_another}");
        for node in ["n2", ""] {
            let elsewhere =
                left(vec![attacher("launcher-1")], vec![uses("csi-1", "n1"), uses("csi-2", node)]);
            assert!(elsewhere.contains("VolumeAttachment csi-2"), "{elsewhere}");
        }
    }

    #[test]
    fn whatever_uses_a_claim_elsewhere_is_named() {
        let uses =
            |name: &str, node: &str| Use { name: name.to_owned(), node: node.to_owned(), ..Use::default() };
        let attacher = |node: &str, owner: &str| Use {
            is_attacher: true,
            owners: vec![owner.to_owned()],
            ..uses("hp-volume-1", node)
        };
        let entry = json!([{"name": "y", "persistentVolumeClaimInfo": {"claimName": "pvc-1"}}]);
        let found = |state: Value, pods: Vec<Use>, attachments: Vec<Use>| {
            let mut run = instance("a", &json!([]), &entry);
            run.status.node_name = Some("n1".to_owned());
            run.status.active_pods = [("launcher-1", "n1"), ("launcher-2", "n2")]
                .map(|(uid, node)| (uid.to_owned(), node.to_owned()))
                .into();
            run.status.migration_state = serde_json::from_value(state).unwrap();
            let evidence = Evidence { attachments, pods, ..evidence(&vm("a", &json!([])), &run) };
            stranger("UID-A", &evidence).unwrap_or_default()
        };
        let own = || attacher("n1", "launcher-1");
        let here = || uses("csi-1", "n1");
        let there = || uses("csi-2", "n2");
        let to = |completed: bool, failed: bool| json!({"targetNode": "n2", "completed": completed, "failed": failed});
        // The old attachment pod ends while the new one starts, on the target of a migration too.
        assert_eq!(found(json!({}), vec![own(), own()], vec![here()]), "");
        assert_eq!(found(to(false, false), vec![own()], vec![here(), there()]), "");
        assert_eq!(found(json!({}), vec![own(), attacher("n2", "launcher-2")], vec![here(), there()]), "");
        for ended in
            [to(true, false), to(false, true), json!({"targetNode": "n2", "failed": true}), json!({})]
        {
            let words = found(ended.clone(), vec![own()], vec![here(), there()]);
            assert!(
                words.contains("to the node \"n2\" as well (VolumeAttachment csi-2)"),
                "{ended}: {words}"
            );
        }
        assert!(found(json!({}), vec![own()], vec![uses("csi-3", "")]).contains("VolumeAttachment csi-3"));
        for other in [
            attacher("n1", "launcher-3"),
            Use { owners: Vec::new(), ..own() },
            Use { is_attacher: false, ..own() },
        ] {
            let words = found(json!({}), vec![own(), other], vec![here()]);
            assert_eq!(words, "the pod hp-volume-1 on the node \"n1\" uses it, too");
        }
    }

    #[test]
    fn a_rival_is_certain_to_be_one() {
        let (none, source) =
            (json!([]), json!([{"name": "x", "persistentVolumeClaim": {"claimName": "pvc-1"}}]));
        let mine = instance("a", &source, &none);
        let mut other = instance("b", &none, &json!([{"name": "root"}]));
        other.status.active_pods = [("launcher-b".to_owned(), "n2".to_owned())].into();
        let pod =
            |is_attacher, owner: &str| Use { is_attacher, owners: vec![owner.to_owned()], ..Use::default() };
        let attachment = Use { name: "csi-1".to_owned(), node: "n2".to_owned(), ..Use::default() };
        let found = |vm: &VirtualMachine, pods: Vec<Use>| {
            let instances = [&mine, &other].into_iter().filter_map(Lister::of_instance).collect();
            let evidence = Evidence {
                vms: Arc::new(Lister::of_vm(vm).into_iter().collect()),
                instances: Arc::new(instances),
                attachments: vec![attachment.clone()],
                pods,
            };
            has_rival("UID-A", &claim(), &evidence)
        };
        // Both may be leftovers of a migration.
        assert!(!found(&vm("a", &source), vec![pod(true, "launcher-of-nobody")]));
        assert!(found(&vm("a", &source), vec![pod(true, "launcher-b")]));
        assert!(found(&vm("a", &source), vec![pod(false, "")]));
        assert!(found(&vm("b", &source), Vec::new()));
    }

    #[test]
    fn an_instance_without_a_vm_is_known_by_itself() {
        let mut alone = instance("a", &json!([]), &json!([]));
        assert_eq!(lasting(&alone).as_deref(), Some("uid-a"));
        alone.metadata.owner_references = None;
        assert_eq!(lasting(&alone).as_deref(), Some("run"));
    }
}
