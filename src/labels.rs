//! Validity of Kubernetes labels, which of them a kubelet may set on its own Node, and which are those of a VM.
//! Pure.
//!
//! The rules are those of the API server: keys and values follow those of all objects; the permission to set them
//! follows the admission plugin `NodeRestriction`. [`selector`] selects objects by their labels.

use std::collections::BTreeMap;

pub mod selector;

/// Labels of one object, by key.
pub type Labels = BTreeMap<String, String>;

/// Maximum number of labels that are kept of one VM.
pub const MOST_OF_A_VM: usize = 32;

/// Label with the region of a Node.
pub const REGION: &str = "topology.kubernetes.io/region";
/// Label with the zone of a Node.
pub const ZONE: &str = "topology.kubernetes.io/zone";
/// Label with the host of a Node, and the topology key that is reported to kubelet: volumes of a host are for its
/// Nodes.
pub const HOST: &str = "guestlet.io/host";

/// Annotation of a Node with the keys of the labels that guestlet has set, separated by commas.
pub const OWNED_LABELS: &str = "guestlet.io/owned-labels";
/// Annotation of a Node with the place where it runs, even if its labels say something else.
pub const RUNS_IN: &str = "guestlet.io/runs-in";
/// Annotation of a Node with the cloud provider that maintains its labels, if that is guestlet's.
pub const CLOUD_PROVIDER: &str = "guestlet.io/cloud-provider";

/// Maximum length of a key's name, and of a value, in bytes.
const MAX_NAME: usize = 63;
/// Maximum length of a key's prefix, in bytes.
const MAX_PREFIX: usize = 253;

/// Domains of labels that say how a VM is run. Those of KubeVirt change whenever a VM is migrated.
const OF_PROGRAMS: [&str; 2] = ["guestlet.io", "kubevirt.io"];

/// Labels that kubelet determines and sets by itself.
const OF_KUBELET: [&str; 8] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "node.kubernetes.io/windows-build",
];

/// Returns whether a text has only letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    !bytes.is_empty()
        && bytes.len() <= MAX_NAME
        && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// Returns whether a text is an RFC 1123 subdomain, as the names of most objects and the prefixes of labels are.
pub fn is_subdomain(text: &str) -> bool {
    let inside = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.first().is_some_and(inside)
            && bytes.last().is_some_and(inside)
            && bytes.iter().all(|byte| inside(byte) || *byte == b'-')
    };
    text.len() <= MAX_PREFIX && text.split('.').all(label)
}

/// Checks a value that must not be empty.
///
/// # Errors
/// A message for the user, if the value is empty or Kubernetes would refuse it.
pub fn check_value(value: &str) -> Result<(), String> {
    if value.is_empty() {
        return Err("it is empty; leave out the key if it has no value".to_owned());
    }
    if value.len() > MAX_NAME {
        return Err(format!("it has {} bytes; Kubernetes allows at most {MAX_NAME} in a label", value.len()));
    }
    if !is_name(value) {
        return Err(
            "a label may have letters, digits, -, _ and ., and must begin and end with a letter or digit"
                .to_owned(),
        );
    }
    Ok(())
}

/// Checks a value that may be empty, as the API server allows it.
///
/// # Errors
/// A message for the user, if Kubernetes would refuse the value.
pub fn check_any_value(value: &str) -> Result<(), String> {
    if value.is_empty() { Ok(()) } else { check_value(value) }
}

/// Checks a key, such as `example.com/rack`.
///
/// # Errors
/// A message for the user, if Kubernetes would refuse the key.
pub fn check_key(key: &str) -> Result<(), String> {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    if let Some(prefix) = prefix
        && !is_subdomain(prefix)
    {
        return Err(
            "the part of a label's key before the / must be a DNS name, such as example.com".to_owned()
        );
    }
    if !is_name(name) {
        return Err(format!(
            "the name of a label's key may have up to {MAX_NAME} letters, digits, -, _ and ., and must \
             begin and end with a letter or digit"
        ));
    }
    Ok(())
}

/// Returns whether the prefix of a key is this domain, or below it.
fn is_in(prefix: &str, domain: &str) -> bool {
    prefix == domain || prefix.strip_suffix(domain).is_some_and(|before| before.ends_with('.'))
}

/// Selects the labels of a VirtualMachineInstance that are kept: valid ones, without those of KubeVirt and
/// guestlet, and at most [`MOST_OF_A_VM`], the first in the given order.
pub fn of_vm<'l>(labels: impl IntoIterator<Item = (&'l str, &'l str)>) -> Labels {
    let is_of_programs = |key: &str| {
        let prefix = key.split_once('/').map(|(prefix, _)| prefix);
        prefix.is_some_and(|prefix| OF_PROGRAMS.iter().any(|domain| is_in(prefix, domain)))
    };
    let is_kept = |(key, value): &(&str, &str)| {
        !is_of_programs(key) && check_key(key).is_ok() && check_any_value(value).is_ok()
    };
    let kept = labels.into_iter().filter(is_kept).take(MOST_OF_A_VM);
    kept.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Checks that a kubelet's credential may set the label, and that guestlet should set it.
///
/// # Errors
/// A message for the user with the reason, if not.
pub fn check_settable(key: &str) -> Result<(), String> {
    check_key(key)?;
    if key == REGION || key == ZONE {
        return Err("set topology.region and topology.zone for that".to_owned());
    }
    if OF_KUBELET.contains(&key) || key.starts_with("failure-domain.beta.kubernetes.io/") {
        return Err("kubelet or the API server sets that label itself".to_owned());
    }
    let Some((prefix, _)) = key.split_once('/') else { return Ok(()) };
    let is_in = |domain| is_in(prefix, domain);
    if is_in("node.kubernetes.io") || is_in("kubelet.kubernetes.io") {
        return Ok(());
    }
    if is_in("kubernetes.io") || is_in("k8s.io") {
        return Err(
            "the API server (NodeRestriction) does not let kubelets set that label; use a domain of your own, or \
                    node.kubernetes.io"
                .to_owned(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        let long = "a".repeat(63);
        for good in ["a", "A-1_b.c", "0", long.as_str()] {
            assert_eq!(check_value(good), Ok(()), "{good}");
        }
        let longer = "a".repeat(64);
        for bad in ["", "-a", "a-", "a b", "zoné", "a/b", "a\n", ".", longer.as_str()] {
            assert!(check_value(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn keys() {
        for good in ["rack", "example.com/rack", "a.b-c.d/R_1.x"] {
            assert_eq!(check_key(good), Ok(()), "{good}");
        }
        let long = format!("{}.com/a", "a".repeat(250));
        for bad in ["", "/", "a/", "/a", "A.com/a", "a..b/c", "a/b/c", "-a.com/b", "ä", long.as_str()] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_node_restriction_permits() {
        for good in [
            "rack",
            "example.com/rack",
            "node.kubernetes.io/pool",
            "x.node.kubernetes.io/a",
            "kubelet.kubernetes.io/a",
            "y.kubelet.kubernetes.io/a",
            "notkubernetes.io/a",
            "my-k8s.io/a",
        ] {
            assert_eq!(check_settable(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("topology.kubernetes.io/zone", "topology.zone"),
            ("topology.kubernetes.io/rack", "NodeRestriction"),
            ("kubernetes.io/x", "NodeRestriction"),
            ("node-role.kubernetes.io/worker", "NodeRestriction"),
            ("node-restriction.kubernetes.io/x", "NodeRestriction"),
            ("x.node-restriction.kubernetes.io/x", "NodeRestriction"),
            ("topology.csi.k8s.io/zone", "NodeRestriction"),
            ("k8s.io/x", "NodeRestriction"),
            ("kubernetes.io/hostname", "label itself"),
            ("node.kubernetes.io/instance-type", "label itself"),
            ("failure-domain.beta.kubernetes.io/zone", "label itself"),
            ("a b", "letters"),
        ] {
            let told = check_settable(bad).unwrap_err();
            assert!(told.contains(why), "{bad}: {told}");
        }
    }

    #[test]
    fn labels_of_a_vm_are_valid_few_and_its_own() {
        let long = "v".repeat(64);
        let given = [
            ("", "no-key"),
            ("a b", "invalid"),
            ("app.kubernetes.io/name", "web"),
            ("domain", long.as_str()),
            ("gpu", ""),
            ("guestcluster.harvesterhci.io/name", "dev"),
            ("guestlet.io/host", "n1"),
            ("kubevirt.io", "not-a-prefix"),
            ("kubevirt.io/nodeName", "n1"),
            ("notkubevirt.io/tier", "db"),
            ("vm.kubevirt.io/name", "web-1"),
        ];
        let kept = of_vm(given);
        let kept: Vec<_> = kept.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let expected = [
            ("app.kubernetes.io/name", "web"),
            ("gpu", ""),
            ("guestcluster.harvesterhci.io/name", "dev"),
            ("kubevirt.io", "not-a-prefix"),
            ("notkubevirt.io/tier", "db"),
        ];
        assert_eq!(kept, expected);
        let many: Vec<_> = (10..90).map(|number| format!("k{number}")).collect();
        let kept = of_vm(many.iter().map(|key| (key.as_str(), "v")));
        assert_eq!((kept.len(), kept.last_key_value().unwrap().0.as_str()), (MOST_OF_A_VM, "k41"));
    }
}
