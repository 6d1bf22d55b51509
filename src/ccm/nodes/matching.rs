//! Assignment of Nodes to VMs. Pure.
//!
//! A Node with a provider identifier belongs to that VM. A Node without one is recognised by two values that
//! arrive by different paths: the name of the Node, which the VM's own agent reads from kubelet's credential,
//! and the system UUID, which kubelet reads from the firmware and the host half knows. Neither the VM's name
//! nor a host name counts. Where these values contradict each other, are missing, or fit more than one VM,
//! people are informed and nothing is changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ccm::instance::{Instance, Instances, uid_of};
use crate::ccm::objects::{Node, name};

/// Knowledge about which VM a Node is.
#[derive(Debug, Clone, PartialEq)]
pub enum Identity {
    /// This VM, by the provider identifier; the host half reports it.
    Known(Arc<Instance>),
    /// VM with this identifier, which the host half does not report.
    Absent(String),
    /// This VM, by the reports of its agent and firmware. The Node is to get its provider identifier.
    Found(Arc<Instance>),
    /// Node of another provider.
    Foreign,
    /// No VM fits (yet).
    Nobody,
    /// More than one VM fits, or the values contradict each other; with the reason.
    Doubtful(String),
}

/// Nodes that have each VM's provider identifier: name, and whether it is ready.
pub type Taken = BTreeMap<String, Vec<(String, bool)>>;

/// Identifies the VM of one Node. `taken` has the provider identifiers of all Nodes.
pub fn identify(node: &Node, instances: &Instances, taken: &Taken) -> Identity {
    if !node.provider_id.is_empty() {
        let Some(uid) = uid_of(&node.provider_id) else { return Identity::Foreign };
        return match instances.all.get(&uid) {
            Some(instance) if contradict(node, instance) => Identity::Doubtful(format!(
                "its provider identifier is that of the VM {}, but its system UUID is {}, not {}; its disk may have been copied",
                described(instance),
                node.system_uuid,
                instance.system_uuid
            )),
            Some(instance) => Identity::Known(Arc::clone(instance)),
            None => Identity::Absent(uid),
        };
    }
    let named: Vec<_> = instances.all.values().filter(|one| one.node_name == name(&node.metadata)).collect();
    let of_uuid: Vec<_> = instances
        .all
        .values()
        .filter(|one| !node.system_uuid.is_empty() && one.system_uuid == node.system_uuid)
        .collect();
    let found = match (named.as_slice(), of_uuid.as_slice()) {
        ([], []) => return Identity::Nobody,
        // The agent has not reported yet which Node it is.
        ([], [one]) if one.node_name.is_empty() => *one,
        ([], [one]) => {
            return Identity::Doubtful(format!(
                "the VM {} has its system UUID, but reports to be the Node {:?}",
                described(one),
                one.node_name
            ));
        }
        (named, of_uuid) => {
            let both: Vec<_> = named.iter().filter(|one| !contradict(node, one)).copied().collect();
            match both.as_slice() {
                [one] if of_uuid.iter().all(|other| other.uid == one.uid) => *one,
                [] if of_uuid.is_empty() => {
                    return Identity::Doubtful(format!(
                        "none of the VMs that report to be this Node ({}) has its system UUID {}",
                        listed(named),
                        node.system_uuid
                    ));
                }
                _ => {
                    let all: Vec<_> = named.iter().chain(of_uuid).copied().collect();
                    return Identity::Doubtful(format!(
                        "more than one VM may be this Node: {}",
                        listed(&all)
                    ));
                }
            }
        }
    };
    // Two Nodes claim one VM. It has joined again under another name, unless the other Node is still alive.
    let others = taken.get(&found.uid).map(Vec::as_slice).unwrap_or_default();
    match others.iter().find(|(_, is_ready)| *is_ready) {
        Some((other, _)) => Identity::Doubtful(format!(
            "the VM {} already is the Node {other}, which is ready",
            described(found)
        )),
        None => Identity::Found(Arc::clone(found)),
    }
}

/// Returns whether kubelet and the host half name different machines.
fn contradict(node: &Node, instance: &Instance) -> bool {
    !node.system_uuid.is_empty()
        && !instance.system_uuid.is_empty()
        && node.system_uuid != instance.system_uuid
}

/// Describes a VM for people.
pub fn described(instance: &Instance) -> String {
    format!("{} ({})", instance.name, instance.uid)
}

fn listed(instances: &[&Arc<Instance>]) -> String {
    let mut words: Vec<_> = instances.iter().map(|one| described(one)).collect();
    words.sort_unstable();
    words.dedup();
    words.truncate(4);
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(uid: &str, node_name: &str, system_uuid: &str) -> Arc<Instance> {
        Arc::new(Instance {
            uid: uid.into(),
            provider_id: format!("guestlet://{uid}"),
            name: format!("vm-{uid}"),
            node_name: node_name.into(),
            system_uuid: system_uuid.into(),
            ..Instance::default()
        })
    }

    fn node(name: &str, system_uuid: &str, provider_id: &str) -> Node {
        let mut node =
            Node { system_uuid: system_uuid.into(), provider_id: provider_id.into(), ..Node::default() };
        node.metadata.name = Some(name.into());
        node
    }

    fn of(node: &Node, all: &[Arc<Instance>]) -> Identity {
        of_taken(node, all, &Taken::new())
    }

    fn of_taken(node: &Node, all: &[Arc<Instance>], taken: &Taken) -> Identity {
        let all = all.iter().map(|one| (one.uid.clone(), Arc::clone(one))).collect();
        identify(node, &Instances { all, is_complete: true }, taken)
    }

    #[track_caller]
    fn is_doubtful(identity: &Identity, words: &str) {
        match identity {
            Identity::Doubtful(why) => assert!(why.contains(words), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_provider_identifier_says_it_whatever_the_names_are() {
        let all = [instance("1", "other", ""), instance("2", "a", "u")];
        assert_eq!(of(&node("a", "", "guestlet://1"), &all), Identity::Known(Arc::clone(&all[0])));
        assert_eq!(of(&node("a", "", "harvester://1"), &all), Identity::Known(Arc::clone(&all[0])));
        assert_eq!(of(&node("a", "", "guestlet://3"), &all), Identity::Absent("3".into()));
        assert_eq!(of(&node("a", "u", "k3s://a"), &all), Identity::Foreign);
        is_doubtful(&of(&node("b", "w", "guestlet://2"), &all), "copied");
    }

    #[test]
    fn names_of_vms_and_hosts_count_for_nothing() {
        let all = [instance("1", "", ""), instance("2", "", "")];
        assert_eq!(of(&node("vm-1", "", ""), &all), Identity::Nobody);
    }

    #[test]
    fn agent_and_firmware_say_it_together_or_either_alone() {
        for all in [
            [instance("1", "a", "u"), instance("2", "b", "v")],
            [instance("1", "a", ""), instance("2", "b", "v")],
            [instance("1", "", "u"), instance("2", "b", "v")],
        ] {
            assert_eq!(of(&node("a", "u", ""), &all), Identity::Found(Arc::clone(&all[0])), "{all:?}");
        }
        let silent = [instance("1", "a", "u")];
        assert_eq!(of(&node("a", "", ""), &silent), Identity::Found(Arc::clone(&silent[0])));
    }

    #[test]
    fn what_contradicts_itself_is_nobody() {
        let a = || node("a", "u", "");
        // A guest that reports a false Node name does not get that Node, and does not keep it from another guest.
        let (honest, liar) = (instance("1", "a", "u"), instance("2", "a", "v"));
        assert_eq!(of(&a(), &[Arc::clone(&honest), Arc::clone(&liar)]), Identity::Found(honest));
        is_doubtful(&of(&a(), &[liar]), "none of the VMs that report to be this Node");
        // Neither of two copies of a VM may match.
        is_doubtful(&of(&a(), &[instance("1", "a", "u"), instance("2", "a", "u")]), "more than one VM");
        is_doubtful(&of(&a(), &[instance("1", "", "u"), instance("2", "", "u")]), "more than one VM");
        is_doubtful(&of(&a(), &[instance("1", "a", ""), instance("2", "b", "u")]), "more than one VM");
        is_doubtful(
            &of(&node("a", "", ""), &[instance("1", "a", "u"), instance("2", "a", "v")]),
            "more than one VM",
        );
        is_doubtful(&of(&a(), &[instance("1", "b", "u")]), "reports to be the Node \"b\"");
    }

    #[test]
    fn a_vm_is_another_node_only_when_that_does_not_live_any_more() {
        let all = [instance("1", "new", "u")];
        let taken = |is_ready| Taken::from([("1".to_owned(), vec![("old".to_owned(), is_ready)])]);
        is_doubtful(&of_taken(&node("new", "u", ""), &all, &taken(true)), "already is the Node old");
        assert!(matches!(of_taken(&node("new", "u", ""), &all, &taken(false)), Identity::Found(_)));
    }
}
