//! Advice for administrators about the setup of KubeVirt, to be heeded before VMs are given vsock. Pure.
//!
//! It is derived from the present KubeVirt objects; while these cannot be read, there is no advice.

use std::collections::BTreeMap;

use serde_json::json;

use super::gates;
use super::objects::KubeVirt;
use crate::kubernetes::follow::Heard;
use crate::wire::proto::v1::Advice;

/// Feature gate of vsock.
const GATE: &str = "VSOCK";
/// First version that enables it by default: 1.10.
const ON_SINCE: (u64, u64) = (1, 10);
/// Namespace of Harvester's KubeVirt object, which Harvester's upgrades overwrite.
const HARVESTER: &str = "harvester-system";
/// Subject of the findings.
const SUBJECT: &str = "KubeVirt";

/// KubeVirt objects of a cluster by namespace and name; `None` before they have been listed. A healthy cluster
/// has exactly one.
#[derive(Debug, Default)]
pub struct Installed(Option<BTreeMap<(String, String), KubeVirt>>);

impl Installed {
    /// Processes an event of the watch on KubeVirt objects.
    pub fn hear(&mut self, heard: Heard<KubeVirt>) {
        let key = |one: &KubeVirt| {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            (text(&one.metadata.namespace), text(&one.metadata.name))
        };
        match heard {
            Heard::All(all) => self.0 = Some(all.into_iter().map(|one| (key(&one), one)).collect()),
            Heard::There(one) => drop(self.0.get_or_insert_default().insert(key(&one), one)),
            Heard::Gone(one) => drop(self.0.get_or_insert_default().remove(&key(&one))),
        }
    }

    /// Returns the present advice; empty until all objects have been listed.
    pub fn advice(&self) -> Vec<Advice> {
        let Some(all) = &self.0 else { return Vec::new() };
        let mut objects = all.iter();
        match (objects.next(), objects.len()) {
            (None, _) => vec![wrong(
                "there is no KubeVirt object in the cluster",
                "is KubeVirt installed, and is this the cluster that runs the VMs? kubectl get kubevirts --all-namespaces",
            )],
            (Some(((namespace, name), kubevirt)), 0) => of_one(namespace, name, kubevirt),
            (Some(_), _) => {
                let names: Vec<_> =
                    all.keys().map(|(namespace, name)| format!("{namespace}/{name}")).collect();
                let says = format!(
                    "there are {} KubeVirt objects instead of one, so it is not known whether VMs get vsock: {}",
                    names.len(),
                    names.join(", ")
                );
                vec![wrong(
                    says,
                    "kubectl get kubevirts --all-namespaces shows which of them virt-operator has deployed",
                )]
            }
        }
    }
}

/// Returns the advice for the only KubeVirt object.
fn of_one(namespace: &str, name: &str, kubevirt: &KubeVirt) -> Vec<Advice> {
    let version = kubevirt.status.observed_kube_virt_version.as_deref().filter(|version| !version.is_empty());
    let told = version.map_or_else(|| "(unknown version)".to_owned(), str::to_owned);
    let gates = &kubevirt.spec.configuration.developer_configuration;
    let by_version = version.and_then(release).is_some_and(|(major, minor, _)| (major, minor) >= ON_SINCE);
    let danger = danger(version, &told);
    if gates::is_on(gates, GATE, by_version) {
        let says = format!("the feature gate {GATE} is on in {namespace}/{name}, KubeVirt {told}");
        let on = Advice { subject: SUBJECT.to_owned(), says, ..Advice::default() };
        return std::iter::once(on).chain(danger).collect();
    }
    let how = if gates::has(&gates.disabled_feature_gates, GATE) { "disabled" } else { "not listed" };
    let says =
        format!("VMs get no vsock: the feature gate {GATE} is {how} in {namespace}/{name}, KubeVirt {told}");
    let mut remedy = patch(namespace, name, kubevirt);
    if namespace == HARVESTER {
        remedy += " (an upgrade of Harvester may revert it)";
    }
    if danger.is_some() {
        remedy = format!("first see below about this version; then {remedy}");
    }
    // No VM is exposed yet, so the danger is only a warning.
    let warning = danger.map(|danger| Advice { is_wrong: false, ..danger });
    std::iter::once(wrong(says, remedy)).chain(warning).collect()
}

/// Returns the warning about a version in which hot-plugging stops VMs that have vsock.
fn danger(version: Option<&str>, told: &str) -> Option<Advice> {
    let Some(release) = version.and_then(release) else {
        return Some(Advice {
            subject: SUBJECT.to_owned(),
            says: format!(
                "it is not known whether a VM with vsock survives plugging a volume in KubeVirt {told}"
            ),
            remedy: "versions 1.6.0 to 1.6.3 and 1.7.0 stop the VM (kubevirt/kubevirt#16600)".to_owned(),
            is_wrong: false,
        });
    };
    let is_harmful = matches!(release, (1, 6, 0..=3) | (1, 7, 0));
    is_harmful.then(|| {
        wrong(
            format!(
                "in KubeVirt {told} a VM with vsock stops when a volume is plugged (kubevirt/kubevirt#16600)"
            ),
            "upgrade KubeVirt to 1.6.4, 1.7.1, 1.8.0 or later before giving VMs vsock, or plug no volumes \
             into VMs that have it; a vendor's build may have the fix: try it with a VM that nobody needs",
        )
    })
}

/// Returns the command that enables the gate and keeps all others. A merge patch replaces lists as a whole, and
/// creates missing ones.
fn patch(namespace: &str, name: &str, kubevirt: &KubeVirt) -> String {
    let gates = &kubevirt.spec.configuration.developer_configuration;
    let without =
        |gates: &[String]| -> Vec<String> { gates.iter().filter(|gate| *gate != GATE).cloned().collect() };
    let mut on = without(&gates.feature_gates);
    on.push(GATE.to_owned());
    let mut change = json!({ "featureGates": on });
    if gates::has(&gates.disabled_feature_gates, GATE) {
        change["disabledFeatureGates"] = json!(without(&gates.disabled_feature_gates));
    }
    let change = json!({ "spec": { "configuration": { "developerConfiguration": change } } });
    // The patch goes into single quotes for the shell, so escape those that a gate's name may contain.
    let change = change.to_string().replace('\'', "\\u0027");
    format!("kubectl --namespace {namespace} patch kubevirt {name} --type merge --patch '{change}'")
}

/// Parses a version such as `v1.7.0-rc.1` into its numbers.
fn release(version: &str) -> Option<(u64, u64, u64)> {
    let mut numbers = version.trim_start_matches('v').splitn(3, '.');
    let (major, minor) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    let last = numbers.next()?;
    let digits = last.find(|letter: char| !letter.is_ascii_digit()).map_or(last, |end| &last[..end]);
    Some((major, minor, digits.parse().ok()?))
}

fn wrong(says: impl Into<String>, remedy: impl Into<String>) -> Advice {
    Advice { subject: SUBJECT.to_owned(), says: says.into(), remedy: remedy.into(), is_wrong: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubevirt(name: &str, version: &str, on: &[&str], off: &[&str]) -> KubeVirt {
        let gates = json!({"featureGates": on, "disabledFeatureGates": off});
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "harvester-system"},
            "spec": {"configuration": {"developerConfiguration": gates}},
            "status": {"observedKubeVirtVersion": version},
        }))
        .unwrap()
    }

    fn advice(all: Vec<KubeVirt>) -> Vec<Advice> {
        let mut installed = Installed::default();
        installed.hear(Heard::All(all));
        installed.advice()
    }

    #[test]
    fn gates_and_versions_are_told_with_what_to_do() {
        // The last column says which of the findings are wrong settings, as opposed to warnings.
        let cases = [
            ("v1.8.4", &["VSOCK"][..], &[][..], &[false][..]),
            ("v1.8.4", &["Snapshot"], &[], &[true]),
            ("v1.8.4", &["VSOCK"], &["VSOCK"], &[true]),
            ("v1.10.0", &[], &[], &[false]),
            ("v1.10.0", &[], &["VSOCK"], &[true]),
            ("v1.6.3", &["VSOCK"], &[], &[false, true]),
            ("v1.6.3-150700.3.1", &[], &[], &[true, false]),
            ("v1.7.0", &[], &[], &[true, false]),
            ("v1.6.4", &["VSOCK"], &[], &[false]),
            ("v1.7.1-rc.0", &["VSOCK"], &[], &[false]),
            ("v1.5.2", &[], &[], &[true]),
            ("", &["VSOCK"], &[], &[false, false]),
            ("devel", &[], &[], &[true, false]),
        ];
        for (version, on, off, expected) in cases {
            let found = advice(vec![kubevirt("kubevirt", version, on, off)]);
            let wrong: Vec<_> = found.iter().map(|one| one.is_wrong).collect();
            assert_eq!(wrong, expected, "{version} {on:?} {off:?}: {found:?}");
            let warned = found.iter().any(|one| one.says.contains("16600") || one.remedy.contains("16600"));
            assert_eq!(warned, expected.len() == 2, "{version}: {found:?}");
        }
    }

    #[test]
    fn the_command_keeps_all_other_gates() {
        let found = advice(vec![kubevirt("kubevirt", "v1.8.4", &["Snapshot", "it's"], &["VSOCK", "X"])]);
        let command = "kubectl --namespace harvester-system patch kubevirt kubevirt --type merge --patch \
            '{\"spec\":{\"configuration\":{\"developerConfiguration\":{\"disabledFeatureGates\":[\"X\"],\
            \"featureGates\":[\"Snapshot\",\"it\\u0027s\",\"VSOCK\"]}}}}' (an upgrade of Harvester may revert it)";
        assert_eq!(found[0].remedy, command);
        let bare: KubeVirt =
            serde_json::from_value(json!({"metadata": {"name": "kv", "namespace": "ns"}})).unwrap();
        let remedy = &advice(vec![bare])[0].remedy;
        assert!(remedy.contains("--namespace ns patch kubevirt kv"), "{remedy}");
        assert!(remedy.ends_with("{\"featureGates\":[\"VSOCK\"]}}}}'"), "{remedy}");
    }

    #[test]
    fn nothing_is_guessed_where_there_are_none_several_or_not_known_ones() {
        let mut installed = Installed::default();
        assert_eq!(installed.advice(), []);
        let one = |name: &str| kubevirt(name, "v1.8.4", &["VSOCK"], &[]);
        installed.hear(Heard::All(Vec::new()));
        assert!(installed.advice()[0].says.contains("there is no KubeVirt object"));
        installed.hear(Heard::There(one("a")));
        assert!(!installed.advice()[0].is_wrong);
        installed.hear(Heard::There(one("b")));
        let found = installed.advice();
        assert!(found[0].says.contains("harvester-system/a, harvester-system/b"), "{found:?}");
        assert!(!found[0].remedy.contains("patch"), "{found:?}");
        installed.hear(Heard::Gone(one("a")));
        assert!(installed.advice()[0].says.contains("harvester-system/b"));
    }
}
