//! Determines whether KubeVirt can hot-plug disks, and through which interface. Pure.
//!
//! The KubeVirt object is read for each decision: an administrator may change it at any time, and the version
//! alone does not say which features are enabled.

use super::objects::{DeveloperConfiguration, KubeVirt};

/// Feature gate of hot-plug through the subresources `addvolume` and `removevolume`. If listed, it takes
/// precedence.
const SUBRESOURCE: &str = "HotplugVolumes";
/// Feature gate of hot-plug through the VM's spec.
const DECLARATIVE: &str = "DeclarativeHotplugVolumes";
/// First version that enables the latter by default: 1.9.
const DECLARATIVE_SINCE: (u64, u64) = (1, 9);

/// Interface through which KubeVirt hot-plugs disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Changes to the spec of the VirtualMachine.
    Declarative,
    /// A subresource request (addvolume, removevolume) for each volume.
    Subresource,
}

/// Determines the interface from the KubeVirt objects of a cluster, of which there should be exactly one.
///
/// # Errors
/// If disks cannot be hot-plugged; the text says what to do.
pub fn way(installed: &[KubeVirt]) -> Result<Way, String> {
    let [kubevirt] = installed else {
        return Err(match installed {
            [] => "there is no KubeVirt object in the host cluster: is KubeVirt installed?".to_owned(),
            several => {
                format!("there are {} KubeVirt objects in the host cluster instead of one", several.len())
            }
        });
    };
    let gates = &kubevirt.spec.configuration.developer_configuration;
    if has(&gates.feature_gates, SUBRESOURCE) {
        return Ok(Way::Subresource);
    }
    let version = kubevirt.status.observed_kube_virt_version.as_deref();
    let by_version = version.and_then(release).is_some_and(|release| release >= DECLARATIVE_SINCE);
    if is_on(gates, DECLARATIVE, by_version) {
        return Ok(Way::Declarative);
    }
    Err(format!(
        "hot-plug is turned off in KubeVirt {}: add the feature gate {DECLARATIVE}, or {SUBRESOURCE} for an older version, to \
         spec.configuration.developerConfiguration.featureGates of the KubeVirt object",
        version.unwrap_or("(unknown version)")
    ))
}

/// Reports whether a feature gate is in this list.
pub fn has(gates: &[String], gate: &str) -> bool {
    gates.iter().any(|one| one == gate)
}

/// Reports whether a feature gate is on: it is listed, or on by default in this version, and not disabled.
pub fn is_on(gates: &DeveloperConfiguration, gate: &str, by_version: bool) -> bool {
    (has(&gates.feature_gates, gate) || by_version) && !has(&gates.disabled_feature_gates, gate)
}

/// Parses a version such as `v1.7.0-rc.1` into major and minor number.
fn release(version: &str) -> Option<(u64, u64)> {
    let mut numbers = version.trim_start_matches('v').split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kubevirt(version: &str, on: &[&str], off: &[&str]) -> KubeVirt {
        let gates = json!({"featureGates": on, "disabledFeatureGates": off});
        serde_json::from_value(json!({
            "metadata": {"name": "kubevirt"},
            "spec": {"configuration": {"developerConfiguration": gates}},
            "status": {"observedKubeVirtVersion": version},
        }))
        .unwrap()
    }

    #[test]
    fn as_the_gates_and_the_version_say() {
        use Way::{Declarative, Subresource};
        let cases = [
            ("v1.6.3", &["HotplugVolumes"][..], &[][..], Some(Subresource)),
            ("v1.7.0", &["DeclarativeHotplugVolumes"], &[], Some(Declarative)),
            ("v1.8.4", &["DeclarativeHotplugVolumes", "HotplugVolumes"], &[], Some(Subresource)),
            ("v1.8.4", &[], &[], None),
            ("v1.9.0", &[], &[], Some(Declarative)),
            ("v1.10.0-rc.1", &["Snapshot"], &[], Some(Declarative)),
            ("v1.9.0", &[], &["DeclarativeHotplugVolumes"], None),
            ("v2.0.0", &[], &[], Some(Declarative)),
            ("devel", &[], &[], None),
            ("", &["DeclarativeHotplugVolumes"], &[], Some(Declarative)),
        ];
        for (version, on, off, expected) in cases {
            let found = way(&[kubevirt(version, on, off)]);
            assert_eq!(found.clone().ok(), expected, "{version} {on:?} {off:?}: {found:?}");
        }
    }

    #[test]
    fn one_is_installed() {
        assert!(way(&[]).unwrap_err().contains("is KubeVirt installed?"));
        let one = kubevirt("v1.9.0", &[], &[]);
        assert!(way(&[one.clone(), one]).unwrap_err().starts_with("there are 2"));
    }
}
