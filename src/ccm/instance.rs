//! VMs of the cluster, as the host half reports them. Values that make no sense are dropped from its answers
//! here, so that no other code has to check them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ccm::net::{Net, is_usable};
use crate::labels::{HOST, check_key, check_value};
use crate::wire::proto::v1;
use crate::wire::proto::v1::instance::Power;

/// Prefix of the host half's provider identifiers.
const SCHEME: &str = "guestlet://";
/// Prefix of the provider identifiers of Harvester's cloud provider. They name the same VM by the same UID.
const HARVESTER: &str = "harvester://";
/// Limit of the characters of a VM's identifier.
const LONGEST_UID: usize = 64;
/// Limit of the interfaces of one VM, and of the addresses of one interface.
const INTERFACES: usize = 32;
const ADDRESSES: usize = 64;
/// Limit of the labels of one VM.
const LABELS: usize = 64;
/// Limit of the VMs of the cluster.
const MOST: usize = 4096;
/// Limit of the characters of a text for people.
const LONGEST_TEXT: usize = 256;

/// VM as the host half reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Instance {
    /// Identifier that stays the same for the lifetime of the VM, in lower case.
    pub uid: String,
    /// Provider identifier, such as `guestlet://<uid>`.
    pub provider_id: String,
    /// Name on the host, for people.
    pub name: String,
    /// System UUID that the firmware shows, in lower case; empty if unknown.
    pub system_uuid: String,
    /// Name of its Node, as its own agent reports it; empty before.
    pub node_name: String,
    /// Power state.
    pub power: Power,
    /// Network interfaces, in the order of the VM's definition.
    pub interfaces: Vec<Interface>,
    /// True if the addresses are a present report of its agent.
    pub is_current: bool,
    /// Region; empty if unknown.
    pub region: String,
    /// Zone; empty if unknown.
    pub zone: String,
    /// Host that it runs on; empty if unknown.
    pub host: String,
    /// Further labels for its Node; `None` if its location is unknown.
    pub labels: Option<BTreeMap<String, String>>,
    /// Instance type in the form of a label's value; empty if the VM has none.
    pub instance_type: String,
}

/// Network interface of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Network on the host; empty for the pod network, and if unknown.
    pub network: String,
    /// Name of the interface in the guest; empty if unknown.
    pub name: String,
    /// Addresses that others can reach.
    pub addresses: Vec<Net>,
}

/// Returns whether this can be the identifier of a VM.
fn is_uid(text: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.len() <= LONGEST_UID && text.bytes().all(is_inside)
}

/// Returns the UID of the VM that a Node's provider identifier names; `None` if it is another provider's.
pub fn uid_of(provider_id: &str) -> Option<String> {
    let uid = provider_id.strip_prefix(SCHEME).or_else(|| provider_id.strip_prefix(HARVESTER))?;
    Some(uid.to_lowercase()).filter(|uid| is_uid(uid))
}

/// Returns a text without control characters, cut to a sensible length.
pub fn clean(text: &str) -> String {
    text.chars().filter(|one| !one.is_control()).take(LONGEST_TEXT).collect()
}

impl Instance {
    /// Converts a VM that the host half reports.
    ///
    /// # Errors
    /// Fails if the report does not identify the VM; the error is a message for people.
    pub fn new(told: v1::Instance) -> Result<Self, String> {
        let uid = told.vm_uid;
        if !is_uid(&uid) {
            return Err(format!("{:?} is not the identifier of a VM", clean(&uid)));
        }
        if uid_of(&told.provider_id).as_ref() != Some(&uid) {
            let id = clean(&told.provider_id);
            return Err(format!("the provider identifier {id:?} is not that of the VM {uid}"));
        }
        let power = Power::try_from(told.power).unwrap_or(Power::Unknown);
        let is_value = |text: &String| check_value(text).is_ok();
        let value = |text: String| Some(text).filter(is_value).unwrap_or_default();
        let topology = told.topology;
        let labels = topology.as_ref().map(|topology| {
            let labels = topology.labels.iter().filter(|(key, value)| {
                // The host name label is kubelet's to set.
                key.as_str() != HOST && check_key(key).is_ok() && is_value(value)
            });
            labels.take(LABELS).map(|(key, value)| (key.clone(), value.clone())).collect()
        });
        let topology = topology.unwrap_or_default();
        Ok(Self {
            uid,
            provider_id: told.provider_id,
            name: clean(&told.name),
            system_uuid: clean(&told.system_uuid).to_lowercase(),
            node_name: clean(&told.node_name),
            power,
            interfaces: told.interfaces.iter().take(INTERFACES).map(Interface::new).collect(),
            is_current: told.addresses_current,
            region: value(topology.region),
            zone: value(topology.zone),
            host: clean(&topology.host),
            labels,
            instance_type: value(told.instance_type),
        })
    }
}

impl Interface {
    fn new(told: &v1::InstanceInterface) -> Self {
        let addresses = told.addresses.iter().take(ADDRESSES).filter_map(|text| text.parse::<Net>().ok());
        Self {
            network: clean(&told.network),
            name: clean(&told.name),
            addresses: addresses.filter(|net| is_usable(net.address)).collect(),
        }
    }
}

/// All VMs that the host half has reported; clones are cheap.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Instances {
    /// VMs by their identifiers.
    pub all: BTreeMap<String, Arc<Instance>>,
    /// True once a complete list was received.
    pub is_complete: bool,
}

impl Instances {
    /// Applies an answer. Returns messages for people about the parts that make no sense.
    pub fn take(&mut self, answer: v1::WatchInstancesResponse) -> Vec<String> {
        if answer.complete {
            self.all.clear();
            self.is_complete = true;
        }
        for uid in answer.withdrawn {
            self.all.remove(&uid);
        }
        let mut wrong = Vec::new();
        for told in answer.instances {
            match Instance::new(told) {
                Ok(instance) if self.all.len() >= MOST && !self.all.contains_key(&instance.uid) => {
                    wrong.push(format!(
                        "the host half reports more than {MOST} VMs; {} is left out",
                        instance.uid
                    ));
                }
                Ok(instance) => drop(self.all.insert(instance.uid.clone(), Arc::new(instance))),
                Err(why) => wrong.push(why),
            }
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(uid: &str) -> v1::Instance {
        v1::Instance {
            vm_uid: uid.into(),
            provider_id: format!("guestlet://{uid}"),
            ..v1::Instance::default()
        }
    }

    #[test]
    fn a_provider_identifier_means_a_vm_or_is_of_another_provider() {
        assert_eq!(uid_of("guestlet://Ab-1"), Some("ab-1".to_owned()));
        assert_eq!(uid_of("harvester://ab-1"), Some("ab-1".to_owned()));
        for other in ["", "guestlet://", "guestlet://a/b", "k3s://ab-1", "ab-1", "guestlet://a b"] {
            assert_eq!(uid_of(other), None, "{other}");
        }
        assert_eq!(uid_of(&format!("guestlet://{}", "a".repeat(65))), None);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let mut odd = told("a");
        odd.power = 77;
        odd.instance_type = "large size".into();
        odd.topology = Some(v1::Topology {
            region: "r".into(),
            zone: "z z".into(),
            labels: [("good", "1"), ("bad key", "1"), ("bad", "v v"), (HOST, "h")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            ..v1::Topology::default()
        });
        let addresses = ["192.0.2.7/24", "fe80::1/64", "nonsense", "127.0.0.1/8"];
        odd.interfaces = vec![v1::InstanceInterface {
            addresses: addresses.map(str::to_owned).to_vec(),
            ..v1::InstanceInterface::default()
        }];
        let instance = Instance::new(odd).unwrap();
        assert_eq!((instance.power, instance.instance_type.as_str()), (Power::Unknown, ""));
        assert_eq!((instance.region.as_str(), instance.zone.as_str()), ("r", ""));
        assert_eq!(instance.labels.unwrap().into_keys().collect::<Vec<_>>(), ["good"]);
        assert_eq!(instance.interfaces[0].addresses, ["192.0.2.7/24".parse().unwrap()]);
        for (uid, provider_id) in [("A", "guestlet://A"), ("a", "guestlet://b"), ("a", "other://a"), ("", "")]
        {
            let wrong = v1::Instance { provider_id: provider_id.into(), ..told(uid) };
            assert!(Instance::new(wrong).is_err(), "{uid} {provider_id}");
        }
    }

    #[test]
    fn answers_add_up_until_one_is_complete() {
        let mut known = Instances::default();
        let answer = |complete, told: &[v1::Instance], withdrawn: &[&str]| v1::WatchInstancesResponse {
            complete,
            instances: told.to_vec(),
            withdrawn: withdrawn.iter().map(|&uid| uid.to_owned()).collect(),
            ..v1::WatchInstancesResponse::default()
        };
        let uids = |known: &Instances| known.all.keys().cloned().collect::<Vec<_>>().join(" ");
        assert!(known.take(answer(false, &[told("a")], &[])).is_empty());
        assert!(!known.is_complete);
        known.take(answer(true, &[told("b"), told("c")], &[]));
        assert_eq!((uids(&known).as_str(), known.is_complete), ("b c", true));
        known.take(answer(false, &[told("d")], &["b", "never"]));
        assert_eq!(uids(&known), "c d");
        assert_eq!(known.take(answer(false, &[told("NO")], &[])).len(), 1);
        let many: Vec<_> = (0..MOST + 3).map(|number| told(&format!("m{number}"))).collect();
        assert_eq!(known.take(answer(true, &many, &[])).len(), 3);
        assert_eq!(known.all.len(), MOST);
        assert!(known.take(answer(false, &many[..1], &[])).is_empty(), "one that is known is replaced");
        known.take(answer(true, &[], &[]));
        assert_eq!(uids(&known), "");
    }
}
