//! Part of a cluster that a verb addresses, and the guest that its names mean. Pure.

use super::Error;
use crate::ctl::cp::Place;
use crate::ctl::ls::List;
use crate::ctl::{Verb, trust};

/// Daemons that a verb addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// API server only: Guests have the needed information.
    Guests(List),
    /// Node on which this guest runs.
    Guest(String),
    /// Each node of the cluster.
    Nodes,
    /// Leading controller.
    Leader,
}

/// Returns the target of a verb for which no node is named.
///
/// # Errors
/// Fails if a node has to be named.
pub fn target(verb: &Verb) -> Result<Target, Error> {
    let guest = |name: &String| Ok(Target::Guest(name.clone()));
    match verb {
        Verb::Ls(list) => Ok(Target::Guests(list.clone())),
        Verb::Volumes(_) | Verb::LoadBalancers(_) => Ok(Target::Leader),
        Verb::Topology | Verb::Nodes | Verb::Doctor | Verb::Audit(_) | Verb::Trust(trust::Action::List) => {
            Ok(Target::Nodes)
        }
        Verb::Watch(filter) => match &filter.name {
            Some(name) => guest(name),
            None => Ok(Target::Nodes),
        },
        Verb::Copy(job) => {
            let names = job.places().filter_map(Place::vm);
            names.last().map_or(Err(Error::NeedsNode("this")), |name| Ok(Target::Guest(name.to_owned())))
        }
        Verb::Proxy => Err(Error::NeedsNode("guestctl proxy")),
        Verb::Top(_) => Err(Error::NeedsNode("top")),
        Verb::Disk { name, .. } if name.is_empty() => {
            Err(Error::NeedsNode("guestctl disk volumes without the name of a VM"))
        }
        Verb::Trust(trust::Action::Forget { name }) if is_uuid(name) => Err(Error::NeedsNode("a UUID")),
        Verb::Trust(trust::Action::RotateHost { .. }) => Err(Error::NeedsNode("the key of a host half")),
        Verb::Trust(trust::Action::ForgetUnlisted) => Err(Error::NeedsNode("a list of VMs")),
        Verb::Info { name }
        | Verb::Disks { name }
        | Verb::Ping { name, .. }
        | Verb::Disk { name, .. }
        | Verb::Machine { name, .. }
        | Verb::Program { name, .. }
        | Verb::Forward { name, .. }
        | Verb::Console { name, .. }
        | Verb::Trust(
            trust::Action::Show { name }
            | trust::Action::Accept { name, .. }
            | trust::Action::Forget { name }
            | trust::Action::Rotate { name }
            | trust::Action::Bootstrap { name, .. },
        ) => guest(name),
    }
}

/// Adds the namespace to the name of a VM that was typed without one.
pub fn complete(verb: &mut Verb, namespace: &str) {
    use crate::ctl::volumes::Action;
    let name = match verb {
        Verb::Info { name }
        | Verb::Disks { name }
        | Verb::Ping { name, .. }
        | Verb::Disk { name, .. }
        | Verb::Machine { name, .. }
        | Verb::Program { name, .. }
        | Verb::Forward { name, .. }
        | Verb::Console { name, .. }
        | Verb::Volumes(Action::Attach { vm: name, .. })
        | Verb::Trust(
            trust::Action::Show { name }
            | trust::Action::Accept { name, .. }
            | trust::Action::Rotate { name }
            | trust::Action::Bootstrap { name, .. },
        ) => name,
        // The UUID of a VM that no longer exists does not belong to any namespace.
        Verb::Trust(trust::Action::Forget { name }) if !is_uuid(name) => name,
        Verb::Copy(job) => {
            let vms = job.places_mut().filter_map(|place| match place {
                Place::Guest { vm, .. } => Some(vm),
                _ => None,
            });
            return vms.for_each(|vm| complete_name(vm, namespace));
        }
        Verb::Watch(filter) => match &mut filter.name {
            Some(name) => name,
            None => return,
        },
        Verb::Audit(query) => match &mut query.vm {
            Some(name) => name,
            None => return,
        },
        Verb::Ls(_)
        | Verb::Topology
        | Verb::Nodes
        | Verb::Doctor
        | Verb::Proxy
        | Verb::Top(_)
        | Verb::Volumes(_)
        | Verb::LoadBalancers(_)
        | Verb::Trust(
            trust::Action::List
            | trust::Action::RotateHost { .. }
            | trust::Action::ForgetUnlisted
            | trust::Action::Forget { .. },
        ) => return,
    };
    complete_name(name, namespace);
}

/// Adds the missing namespace to names and patterns of a list: the selected one, or any. Returns the
/// namespace to which the list can be confined.
pub fn narrow(list: &mut List, namespace: Option<String>) -> Option<String> {
    list.names.iter_mut().for_each(|name| complete_name(name, namespace.as_deref().unwrap_or("*")));
    let mut namespaces = list.names.iter().filter_map(|name| name.split_once('/')).map(|(first, _)| first);
    match namespaces.next() {
        None => namespace,
        Some(first) if first.contains('*') || namespaces.any(|other| other != first) => None,
        Some(first) => Some(first.to_owned()),
    }
}

fn complete_name(name: &mut String, namespace: &str) {
    if !name.is_empty() && !name.contains('/') {
        *name = format!("{namespace}/{name}");
    }
}

fn is_uuid(name: &str) -> bool {
    let groups: Vec<_> = name.split('-').map(str::len).collect();
    groups == [8, 4, 4, 4, 12] && name.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ctl::{disk, volumes, watch::Filter};

    #[test]
    fn a_name_gets_the_namespace_that_it_lacks() {
        for (typed, expected) in [("web-1", "shop/web-1"), ("test/web-1", "test/web-1")] {
            let mut verb = Verb::Info { name: typed.into() };
            complete(&mut verb, "shop");
            assert_eq!(target(&verb).unwrap(), Target::Guest(expected.into()));
            let mut verb = Verb::Watch(Filter { name: Some(typed.into()), ..Filter::default() });
            complete(&mut verb, "shop");
            assert_eq!(target(&verb).unwrap(), Target::Guest(expected.into()));
        }
        let uuid = "6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
        let mut verb = Verb::Trust(trust::Action::Forget { name: uuid.into() });
        complete(&mut verb, "shop");
        assert!(target(&verb).unwrap_err().to_string().starts_with("a UUID is for one node"));
    }

    #[test]
    fn a_list_is_of_the_namespace_that_is_meant_and_those_that_are_named() {
        for (typed, namespace, expected, scope) in [
            (&[][..], Some("shop"), &[][..], Some("shop")),
            (&["web-*"], Some("shop"), &["shop/web-*"], Some("shop")),
            (&["web-*", "test/db"], Some("shop"), &["shop/web-*", "test/db"], None),
            (&["test/db", "test/web-*"], Some("shop"), &["test/db", "test/web-*"], Some("test")),
            (&["t*/db"], Some("shop"), &["t*/db"], None),
            (&["web-1"], None, &["*/web-1"], None),
        ] {
            let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
            let mut list = List { names: names(typed), ..List::default() };
            let narrowed = narrow(&mut list, namespace.map(str::to_owned));
            assert_eq!(narrowed.as_deref(), scope, "{typed:?}");
            assert_eq!(list.names, names(expected));
        }
    }

    #[test]
    fn each_verb_has_somebody_to_ask() {
        let volumes = volumes::Action::List { cluster: None, wide: false };
        assert_eq!(target(&Verb::Volumes(volumes)).unwrap(), Target::Leader);
        let list = List { wide: true, ..List::default() };
        assert_eq!(target(&Verb::Ls(list.clone())).unwrap(), Target::Guests(list));
        assert_eq!(target(&Verb::Watch(Filter::default())).unwrap(), Target::Nodes);
        let all = Verb::Disk { name: String::new(), action: disk::Action::Volumes };
        assert!(target(&all).unwrap_err().to_string().contains("--node"));
        let rotate = Verb::Trust(trust::Action::RotateHost { finish: false, force: false });
        assert!(target(&rotate).unwrap_err().to_string().contains("--node"));
    }
}
