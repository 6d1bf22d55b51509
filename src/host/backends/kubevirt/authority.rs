//! Who holds a claim, as the API of the host cluster says. Pure.
//!
//! ```text
//!  a VM's spec, its instance's spec or its instance's status lists it,
//!             or a request to plug it that KubeVirt has accepted ──────▶ On that VM
//!     …those of several VMs do ────────────────────────────────────────▶ Unknown, or On the one that is remembered
//!  none does, but a VolumeAttachment of it is there ───────────────────▶ Unknown   (the node may still write)
//!             or a pod uses it ────────────────────────────────────────▶ Unknown   (as the dying pod of a hot-plug does)
//!  none of these ──────────────────────────────────────────────────────▶ Off
//! ```
//!
//! All of it has to be read from the API server itself, when it is asked, and not from a copy that may be old. A node that is
//! dead keeps what it had until the host cluster has proved that (it deletes the VolumeAttachment, or the pod): until then the
//! instance, the VolumeAttachment or the pod is there.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::names::Claim;
use super::objects::{self, Instance, InstanceSpec, VirtualMachine};
use crate::host::backends::volumes::{Holder, Place};

/// What was read.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// The VMs of the claim's namespace that list claims.
    pub vms: Arc<Vec<Lister>>,
    /// The runs of VMs that do, or have volumes.
    pub instances: Arc<Vec<Lister>>,
    /// The VolumeAttachments of the claim's PersistentVolume.
    pub attachments: Vec<Use>,
    /// The pods of the namespace that use the claim and have not ended.
    pub pods: Vec<Use>,
}

/// A VM, or a run of one: what is kept of it to tell what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lister {
    /// What lasts of it: the UID of the VM.
    uuid: Option<String>,
    name: Option<String>,
    /// The claims that its spec lists, or its status.
    claims: Vec<String>,
    /// What its status calls its volumes, or those that are to come.
    volumes: Vec<String>,
    /// Those of them that came while it ran, and of which the status does not say what they are made of.
    unsaid: Vec<String>,
    /// Of a run: where its disks may be open.
    nodes: Vec<String>,
    /// Of a run: the UIDs of its launchers, to which the pods belong by which KubeVirt plugs its volumes.
    launchers: Vec<String>,
}

impl Lister {
    /// A VM, if it lists a claim, or KubeVirt has been asked to plug one into it.
    pub fn of_vm(vm: &VirtualMachine) -> Option<Self> {
        let coming = vm.asked_for().filter_map(|one| one.volume_source.claim().map(str::to_owned));
        let claims: Vec<_> = listed(&vm.spec.template.spec).into_iter().chain(coming).collect();
        let volumes: Vec<_> = vm.asked_for().map(|one| one.name.clone()).collect();
        let (uuid, name) = (vm.metadata.uid.clone(), vm.metadata.name.clone());
        let vm = Self { uuid, name, claims, volumes, ..Self::default() };
        (!vm.claims.is_empty() || !vm.volumes.is_empty()).then_some(vm)
    }

    /// A run of a VM, if it has a claim or a volume, or is about to, or has not let go of it.
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

    /// Whether it is the VM with this UUID, or a run of it.
    fn is_of(&self, uuid: &str) -> bool {
        self.uuid.as_ref().is_some_and(|one| one.eq_ignore_ascii_case(uuid))
    }

    /// Whether it has this claim.
    fn has(&self, claim: &Claim) -> bool {
        self.claims.contains(&claim.name)
            || self.volumes.contains(&claim.volume())
            // Who plugs a claim otherwise calls the volume like it.
            || self.unsaid.contains(&claim.name)
    }
}

/// Something that uses a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Use {
    /// Its name.
    pub name: String,
    /// Where; empty if that is not decided.
    pub node: String,
    /// It is a pod by which KubeVirt plugs volumes.
    pub is_attacher: bool,
    /// Of a pod: the UIDs of what it belongs to.
    pub owners: Vec<String>,
}

impl Use {
    /// Whether it is a pod of one of the launchers of a run.
    fn belongs_to(&self, run: &Lister) -> bool {
        self.owners.iter().any(|owner| run.launchers.contains(owner))
    }
}

/// Finds whoever uses the claim beside the VM with this UUID: a pod that is not there to plug it into that VM, or the attachment of its
/// volume to a node where that VM does not have it. In words, with where it is.
///
/// After a migration the volume stays attached to the node before for a moment; what is found then is gone when it is asked again.
pub fn stranger(uuid: &str, evidence: &Evidence) -> Option<String> {
    let runs: Vec<&Lister> = evidence.instances.iter().filter(|run| run.is_of(uuid)).collect();
    let is_own = |pod: &Use| pod.is_attacher && runs.iter().any(|run| pod.belongs_to(run));
    if let Some(Use { name, node, .. }) = evidence.pods.iter().find(|pod| !is_own(pod)) {
        return Some(format!("the pod {name} on the node {node:?} uses it, too"));
    }
    // KubeVirt attaches it to the target of a migration before it says that there is one.
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

/// Whether something else than the VM with this UUID is certain to use a claim: another VM lists it, or a pod that KubeVirt has not
/// made for this VM uses it. Of a pod that plugs volumes and belongs to no VM any more, it is not known whose it was.
pub fn has_rival(uuid: &str, claim: &Claim, evidence: &Evidence) -> bool {
    let mut listers = evidence.instances.iter().chain(&*evidence.vms);
    let is_elsewhere = |pod: &Use| {
        let mut others = evidence.instances.iter().filter(|run| !run.is_of(uuid));
        !pod.is_attacher || others.any(|run| pod.belongs_to(run))
    };
    listers.any(|one| one.has(claim) && !one.is_of(uuid)) || evidence.pods.iter().any(is_elsewhere)
}

/// What may still be there of a volume for another VM than the one with this UUID, which is the only one that lists it: a pod by
/// which KubeVirt plugs volumes, or the attachment of the volume to a node that nothing else accounts for. In words, with where it is.
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

/// Who holds a claim that the VM with this UUID is remembered to have. If others list it as well, it is to be taken from that one first.
pub fn judge_remembered(claim: &Claim, remembered: Option<&str>, evidence: &Evidence) -> Holder {
    let is_its = |place: &Place| remembered.is_some_and(|uuid| place.uuid.eq_ignore_ascii_case(uuid));
    match places(claim, evidence).find(is_its) {
        Some(place) => Holder::On(place),
        None => judge(claim, evidence),
    }
}

/// The VMs that list a claim.
fn places(claim: &Claim, evidence: &Evidence) -> impl Iterator<Item = Place> {
    let mut places = BTreeMap::new();
    for one in evidence.instances.iter().chain(&*evidence.vms).filter(|one| one.has(claim)) {
        places.insert(one.uuid.clone(), one.name.clone());
    }
    // What lacks a UID or a name holds it all the same.
    places.into_iter().map(|(uuid, name)| Place {
        uuid: uuid.unwrap_or_default().to_lowercase(),
        vm: format!("{}/{}", claim.namespace, name.unwrap_or_default()),
    })
}

/// Who holds a claim.
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

/// What lasts of an instance: the UID of its VM, or its own if it has none.
pub fn lasting(instance: &Instance) -> Option<String> {
    objects::owner(&instance.metadata).map(str::to_owned).or_else(|| instance.metadata.uid.clone())
}

/// The claims that a spec lists.
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

    /// One that KubeVirt has been asked to plug a claim into.
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

    /// What is kept of them.
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
        // The last generation of pods goes while the next one comes, also where it is being migrated to.
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
        // A migration may have left both of these.
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
