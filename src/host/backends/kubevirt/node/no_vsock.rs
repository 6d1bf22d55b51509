//! Reasons why a VM has no vsock device, with the remedies for its administrator. Pure.

use super::super::seen::Facts;

/// Reason if the VirtualMachineInstance does not request a vsock device.
const UNWANTED: &str = "the VM has no vsock device: enable KubeVirt's feature gate VSOCK, set \
                        spec.template.spec.domain.devices.autoattachVSOCK to true in the VirtualMachine, and restart the VM";
/// Reason if a vsock device is requested but was not provided.
const MISSING: &str = "the VM requests a vsock device, but KubeVirt gave it none (no status.VSOCKCID): \
                       enable KubeVirt's feature gate VSOCK, and restart the VM";
/// Reason if none is requested by a VirtualMachineInstance that does not belong to a VirtualMachine.
const ALONE: &str = "the VM has no vsock device: its VirtualMachineInstance does not request one, and was \
                     not created by a VirtualMachine";

/// Patch of a VirtualMachine that requests a vsock device.
const PATCH: &str = r#"{"spec":{"template":{"spec":{"domain":{"devices":{"autoattachVSOCK":true}}}}}}"#;

/// Description of a VM without vsock, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoVsock {
    /// Reason why it has none.
    pub why: String,
    /// Remedy, with the commands.
    pub remedy: String,
    /// True if no vsock device was requested.
    pub is_meant: bool,
}

impl NoVsock {
    /// Builds the text for a VirtualMachineInstance that requests no vsock device. Its VirtualMachine may have been
    /// changed to request one since the start, but is not read here.
    pub fn unwanted(facts: &Facts) -> Self {
        let (namespace, name) = place(facts);
        if is_alone(facts) {
            let remedy = "recreate it with spec.domain.devices.autoattachVSOCK: true".to_owned();
            return Self { why: ALONE.to_owned(), remedy, is_meant: true };
        }
        let set = format!(
            "kubectl --namespace {namespace} patch virtualmachine {name} --type merge --patch '{PATCH}'"
        );
        let remedy =
            format!("{set} (not needed if it was set since the VM started); then {}", restart(facts));
        Self { why: UNWANTED.to_owned(), remedy, is_meant: true }
    }

    /// Builds the text for a VirtualMachineInstance that requests a vsock device but has none.
    pub fn missing(facts: &Facts) -> Self {
        let again = if is_alone(facts) { "recreate it".to_owned() } else { restart(facts) };
        let remedy = format!("once the feature gate VSOCK is on: {again}");
        Self { why: MISSING.to_owned(), remedy, is_meant: false }
    }
}

/// Builds the text for a VirtualMachineInstance that cannot be parsed, so that its vsock device is unknown.
pub fn unreadable(facts: &Facts, problem: &str) -> String {
    let (namespace, name) = place(facts);
    format!("{problem}; see kubectl --namespace {namespace} get virtualmachineinstance {name} --output yaml")
}

fn restart(facts: &Facts) -> String {
    let (namespace, name) = place(facts);
    format!("restart the VM: virtctl --namespace {namespace} restart {name}")
}

/// Reports whether the instance does not belong to a VirtualMachine.
fn is_alone(facts: &Facts) -> bool {
    facts.lasting == facts.uid
}

fn place(facts: &Facts) -> (&str, &str) {
    facts.name.split_once('/').unwrap_or(("", &facts.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_for_the_vm_and_only_if_there_is_one() {
        let of_vm =
            Facts { name: "shop/web".into(), uid: "u".into(), lasting: "vm".into(), ..Facts::default() };
        let NoVsock { remedy, .. } = NoVsock::unwanted(&of_vm);
        assert!(remedy.starts_with("kubectl --namespace shop patch virtualmachine web "), "{remedy}");
        assert!(remedy.ends_with("virtctl --namespace shop restart web"), "{remedy}");
        serde_json::from_str::<serde_json::Value>(PATCH).unwrap();
        let NoVsock { remedy, .. } = NoVsock::missing(&of_vm);
        assert!(!remedy.contains("patch") && remedy.contains("restart web"), "{remedy}");
        let alone = Facts { lasting: "u".into(), ..of_vm };
        for found in [NoVsock::unwanted(&alone), NoVsock::missing(&alone)] {
            assert!(!found.remedy.contains("restart") && found.remedy.contains("recreate it"), "{found:?}");
        }
        assert_eq!(
            unreadable(&alone, "it is odd"),
            "it is odd; see kubectl --namespace shop get virtualmachineinstance web --output yaml"
        );
    }
}
