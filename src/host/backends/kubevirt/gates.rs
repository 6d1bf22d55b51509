//! Whether KubeVirt can plug a disk into a VM that runs, and how it wants to be told. Pure.
//!
//! It is asked of the KubeVirt object each time: an administrator may change it, and what a version can do says little
//! about what is turned on in a cluster.

use super::objects::{DeveloperConfiguration, KubeVirt};

/// The feature gate of hot-plug by the subresources `addvolume` and `removevolume`. Where it is listed it wins.
const SUBRESOURCE: &str = "HotplugVolumes";
/// The feature gate of hot-plug by what a VM's spec lists.
const DECLARATIVE: &str = "DeclarativeHotplugVolumes";
/// The first version that has the latter turned on unless it is disabled: 1.9.
const DECLARATIVE_SINCE: (u64, u64) = (1, 9);

/// How KubeVirt is told to plug a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By the VM's spec.
    Declarative,
    /// By a request for each volume.
    Subresource,
}

/// How these say it, the KubeVirt objects of a cluster. There is one, in a cluster that is well.
///
/// # Errors
/// If disks cannot be plugged, with what to do about it.
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

/// Whether a feature gate is among these.
pub fn has(gates: &[String], gate: &str) -> bool {
    gates.iter().any(|one| one == gate)
}

/// Whether a feature gate is on: it is listed, or the version has it on, and nobody has disabled it.
pub fn is_on(gates: &DeveloperConfiguration, gate: &str, by_version: bool) -> bool {
    (has(&gates.feature_gates, gate) || by_version) && !has(&gates.disabled_feature_gates, gate)
}

/// Major and minor number of a version such as `v1.7.0-rc.1`.
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
