//! Network interfaces of a VM, from its spec, and from its status as to how they appear in the guest. Pure.
//!
//! Fields of an unexpected type count as missing: the state of the VM and its volumes must be known
//! nevertheless.

use serde_json::Value;

/// Maximum number of interfaces, and of addresses of each, that are read: the guest can influence the latter.
const MOST_INTERFACES: usize = 32;
const MOST_ADDRESSES: usize = 64;
/// Maximum length, in characters, of a name or address that comes from a guest.
const LONGEST: usize = 64;

/// Network interface of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// MAC address, in lower case; empty if unknown.
    pub hardware_address: String,
    /// Network that it is attached to, as `namespace/name`; empty for the pod network.
    pub network: String,
    /// Name of the interface in the guest; empty if unknown.
    pub guest_name: String,
    /// IP addresses as reported, without prefix lengths.
    pub addresses: Vec<String>,
}

/// Returns the interfaces of a VM in this namespace, from the spec and status of its VirtualMachineInstance, in
/// the order of the spec.
pub fn interfaces(namespace: &str, spec: &Value, status: &Value) -> Vec<Interface> {
    let named = |list: &'_ Value, name: &str| {
        list.as_array().into_iter().flatten().find(|one| one["name"] == name).cloned().unwrap_or_default()
    };
    let text = |value: &Value| value.as_str().filter(|text| text.len() <= LONGEST).map(str::to_owned);
    let wanted = spec["domain"]["devices"]["interfaces"].as_array().map(Vec::as_slice).unwrap_or_default();
    let interface = |wanted: &Value| {
        let name = wanted["name"].as_str()?;
        let network = named(&spec["networks"], name);
        let is = named(&status["interfaces"], name);
        let hardware_address = text(&is["mac"]).or_else(|| text(&wanted["macAddress"])).unwrap_or_default();
        let listed = is["ipAddresses"].as_array().into_iter().flatten().filter_map(text);
        let mut addresses: Vec<String> = listed.take(MOST_ADDRESSES).collect();
        if addresses.is_empty() {
            addresses.extend(text(&is["ipAddress"]));
        }
        addresses.retain(|address| !address.is_empty());
        Some(Interface {
            hardware_address: hardware_address.to_ascii_lowercase(),
            network: within(namespace, network["multus"]["networkName"].as_str().unwrap_or_default()),
            guest_name: text(&is["interfaceName"]).unwrap_or_default(),
            addresses,
        })
    };
    wanted.iter().filter_map(interface).take(MOST_INTERFACES).collect()
}

/// Qualifies the name of a network, as used in a VM of this namespace, with its namespace.
fn within(namespace: &str, name: &str) -> String {
    match name {
        "" => String::new(),
        name if name.contains('/') => name.to_owned(),
        name => format!("{namespace}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec() -> Value {
        json!({
            "networks": [
                {"name": "default", "pod": {}},
                {"name": "lan", "multus": {"networkName": "lan"}},
                {"name": "wan", "multus": {"networkName": "infra/wan"}},
            ],
            "domain": {"devices": {"interfaces": [
                {"name": "default", "masquerade": {}, "macAddress": "52:54:00:00:00:01"},
                {"name": "lan", "bridge": {}},
                {"name": "wan", "bridge": {}, "macAddress": "52:54:00:00:00:03"},
            ]}},
        })
    }

    #[test]
    fn they_are_those_of_the_spec_with_what_the_status_says() {
        let status = json!({"interfaces": [
            {"name": "lan", "mac": "52:54:00:00:00:0A", "interfaceName": "enp2s0", "ipAddress": "192.0.2.7",
             "ipAddresses": ["192.0.2.7", "2001:db8::7"]},
            {"name": "wan", "mac": "52:54:00:00:00:03", "ipAddress": "198.51.100.7"},
            // An interface that the guest created itself.
            {"interfaceName": "cni0", "mac": "52:54:00:00:00:0B", "ipAddresses": ["10.42.0.1"]},
        ]});
        let found = interfaces("dev", &spec(), &status);
        let words: Vec<_> = found
            .iter()
            .map(|one| {
                format!(
                    "{} {} {} {}",
                    one.hardware_address,
                    one.network,
                    one.guest_name,
                    one.addresses.join(",")
                )
            })
            .collect();
        let expected = [
            "52:54:00:00:00:01   ",
            "52:54:00:00:00:0a dev/lan enp2s0 192.0.2.7,2001:db8::7",
            "52:54:00:00:00:03 infra/wan  198.51.100.7",
        ];
        assert_eq!(words, expected);
        let off = interfaces("dev", &spec(), &Value::Null);
        assert_eq!(off[2].hardware_address, "52:54:00:00:00:03");
        assert!(off.iter().all(|one| one.addresses.is_empty()));
    }

    #[test]
    fn what_is_not_as_it_should_be_is_missing() {
        for (place, value) in [
            ("/networks", json!("many")),
            ("/networks/1/multus", json!(7)),
            ("/networks/1/multus/networkName", json!(["lan"])),
        ] {
            let mut spec = spec();
            *spec.pointer_mut(place).unwrap() = value;
            let found = interfaces("dev", &spec, &json!({"interfaces": {"name": "lan"}}));
            assert_eq!((found.len(), found[1].network.as_str()), (3, ""), "{place}");
        }
        assert_eq!(interfaces("dev", &json!({"domain": []}), &json!([])), []);
        let long = json!({"interfaces": [{"name": "lan", "ipAddresses": ["1".repeat(65), 7, ""]}]});
        assert_eq!(interfaces("dev", &spec(), &long)[1].addresses, [] as [String; 0]);
    }
}
