//! Stage of a volume on its way into a VM or out of it, derived from the objects of the API. Pure.
//!
//! ```text
//!  VM's spec ──KubeVirt copies──▶ instance's spec ──an attachment pod carries it──▶ instance's status: … Ready
//!     Handed                          Coming                                              Ready
//!
//!  no longer in the VM's spec, but in the instance's spec or status: Leaving.   In none of them: Absent.
//! ```
//!
//! If changes are requested through the subresource, those that KubeVirt has accepted but not made yet are in
//! the VM's status. A volume that is to be added counts as listed in the VM's spec, and one that is to be
//! removed as not listed.
//!
//! With the subresource, a volume that only the instance lists was added to the instance directly (virtctl
//! addvolume without --persist): KubeVirt does not remove it, and it blocks nothing once it is ready (Alone).
//! If the VM's spec decides, KubeVirt removes it.
//!
//! A status outlives its spec, and a new volume of the same name waits for the old status to disappear; so a
//! volume counts as absent only when the status no longer lists it either.

use tokio::time::Instant;

use super::super::gates::Way;
use super::super::objects::{Instance, VirtualMachine, Volume, VolumeStatus};

/// Phase of a volume that the domain has.
const READY: &str = "Ready";
/// Phase of a run whose domain is running.
const RUNNING: &str = "Running";
/// Placeholder for a status without details.
const UNSAID: &str = "no details are given";

/// Stage of a volume on its way into a VM or out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// The volume is in neither of the specs nor in the status.
    Absent,
    /// KubeVirt has been asked to add it, and has not begun.
    Handed,
    /// KubeVirt is adding it; the text describes the progress.
    Coming(String),
    /// The domain has it. Its guest may not have seen it yet.
    Ready,
    /// The domain has it, but the VM's spec does not: it stays until the VM stops, or its removal is requested from
    /// the instance.
    Alone,
    /// KubeVirt has been asked to remove it, and has not finished; the text describes the progress.
    Leaving(String),
}

impl Stage {
    /// Reports whether a change is in progress.
    fn is_on_its_way(&self) -> bool {
        !matches!(self, Self::Absent | Self::Ready | Self::Alone)
    }

    /// Describes the stage, for a sentence whose subject is the volume.
    pub fn words(&self) -> String {
        match self {
            Self::Absent => "is not in the VM".to_owned(),
            Self::Handed => "is to be attached, but KubeVirt has not started that".to_owned(),
            Self::Coming(how) => format!("is being attached ({how})"),
            Self::Ready => "is attached".to_owned(),
            Self::Alone => "is attached, and the VM does not list it".to_owned(),
            Self::Leaving(how) => format!("is being detached ({how})"),
        }
    }
}

/// VM and its run, if it has one, as they were read.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// VirtualMachine object.
    pub vm: VirtualMachine,
    /// VirtualMachineInstance object.
    pub instance: Option<Instance>,
    /// Interface through which KubeVirt hot-plugs; `None` if it was not determined, or KubeVirt cannot hot-plug. It
    /// decides what becomes of volumes that a run lists and its VM does not.
    pub way: Option<Way>,
}

impl Seen {
    /// Returns the volume with this name in the VM's spec, taking accepted requests into account.
    pub fn listed(&self, name: &str) -> Option<&Volume> {
        self.vm.spec.template.spec.volumes.iter().find(|volume| volume.name == name)
    }

    /// Reports whether KubeVirt can be asked to remove the volume with this name: it has to be in the VM's spec,
    /// and its removal must not have been requested yet.
    pub fn can_be_taken_out(&self, name: &str) -> bool {
        self.listed(name).is_some() && !self.is_asked_away(name)
    }

    fn is_asked_away(&self, name: &str) -> bool {
        self.vm.asked_away().any(|one| one == name)
    }

    /// Returns the phase of a run that has not started its domain yet.
    pub fn waits_to_start(&self) -> Option<&str> {
        let instance = self.instance.as_ref().filter(|instance| !has_started(instance))?;
        Some(if instance.status.phase.is_empty() { "new" } else { &instance.status.phase })
    }

    /// Returns the properties of the VM's run that matter to its guest.
    pub fn run(&self) -> Run {
        let uid = self.instance.as_ref().and_then(|instance| instance.metadata.uid.clone());
        Run { uid, has_started: self.instance.as_ref().is_some_and(has_started) }
    }

    fn status(&self, name: &str) -> Option<&VolumeStatus> {
        self.instance.as_ref()?.status.volume_status.iter().find(|status| status.name == name)
    }

    fn is_in_instance(&self, name: &str) -> bool {
        self.instance
            .as_ref()
            .is_some_and(|instance| instance.spec.volumes.iter().any(|volume| volume.name == name))
    }

    /// Reports whether the instance lists a volume that the VM does not: its stage then depends on the interface of
    /// KubeVirt.
    pub fn has_what_its_vm_lacks(&self) -> bool {
        self.instance
            .iter()
            .flat_map(|instance| &instance.spec.volumes)
            .any(|volume| self.listed(&volume.name).is_none())
    }

    /// Reports whether the instance keeps volumes that the VM does not list.
    fn keeps_its_own(&self) -> bool {
        let runs = |run: &Instance| run.status.phase == RUNNING && run.metadata.deletion_timestamp.is_none();
        self.way == Some(Way::Subresource) && self.instance.as_ref().is_some_and(runs)
    }

    /// Returns the stage of the volume with this name.
    pub fn stage(&self, name: &str) -> Stage {
        let is_listed = self.listed(name).is_some();
        let is_wanted =
            is_listed && !self.is_asked_away(name) || self.vm.asked_for().any(|one| one.name == name);
        let is_in_instance = self.is_in_instance(name);
        match (is_wanted, self.status(name)) {
            (true, Some(status)) if is_in_instance => {
                if is_ready(status) {
                    Stage::Ready
                } else {
                    Stage::Coming(how(status))
                }
            }
            (true, None) if is_in_instance => Stage::Coming(UNSAID.to_owned()),
            // The status still describes an earlier volume with this name.
            (true, _) => Stage::Handed,
            (false, _) if is_listed => {
                Stage::Leaving("KubeVirt was asked to, but has not removed it from the VM's spec".to_owned())
            }
            (false, Some(status)) if is_in_instance && self.keeps_its_own() => {
                if is_ready(status) {
                    Stage::Alone
                } else {
                    Stage::Coming(how(status))
                }
            }
            (false, None) if is_in_instance && self.keeps_its_own() => Stage::Coming(UNSAID.to_owned()),
            (false, Some(status)) => Stage::Leaving(how(status)),
            (false, None) if is_in_instance => Stage::Leaving("it is in the instance's spec".to_owned()),
            (false, None) => Stage::Absent,
        }
    }

    /// Returns all volumes that were or will be hot-plugged, with their stages, whichever program requested them.
    fn hotplugged(&self) -> Vec<(String, Stage)> {
        let is_one = |volume: &&Volume| {
            volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.hotpluggable)
                || volume.data_volume.as_ref().is_some_and(|source| source.hotpluggable)
        };
        let its_name = |volume: &Volume| volume.name.clone();
        let mut names: Vec<_> =
            self.vm.spec.template.spec.volumes.iter().filter(is_one).map(its_name).collect();
        names.extend(self.vm.asked_for().map(|one| one.name.clone()));
        if let Some(instance) = &self.instance {
            names.extend(instance.spec.volumes.iter().filter(is_one).map(its_name));
            let entries = instance.status.volume_status.iter();
            let came = entries.filter(|entry| entry.hotplug_volume.is_some());
            names.extend(came.map(|entry| entry.name.clone()));
        }
        names.sort();
        names.dedup();
        names.into_iter().map(|name| (name.clone(), self.stage(&name))).collect()
    }

    /// Returns those of them that KubeVirt is changing or is going to change. In a VM that is off, no volume
    /// changes.
    pub fn on_their_way(&self) -> Vec<(String, Stage)> {
        let mut volumes = self.hotplugged();
        volumes.retain(|(_, stage)| stage.is_on_its_way() && self.instance.is_some());
        volumes
    }

    /// Returns the name of the pod that carries the volume with this name, if there is one.
    pub fn attachment_pod(&self, name: &str) -> Option<&str> {
        self.status(name)?.hotplug_volume.as_ref()?.attach_pod_name.as_deref().filter(|pod| !pod.is_empty())
    }
}

/// Properties of a VM's run that matter to its guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Run {
    /// UID of the instance; `None` if there is no instance.
    pub uid: Option<String>,
    /// True if it has come far enough to have a guest, even if that has ended since.
    pub has_started: bool,
}

/// State of the guest at the time it released a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// Run whose guest has released the disk, or that had no guest. A different run may be using the disk.
    pub run: Run,
    /// Time of the release; `None` if the guest was not asked.
    pub at: Option<Instant>,
    /// True if the caller takes responsibility for removing the disk regardless of the guest.
    pub by_force: bool,
}

/// Reports whether the domain of an instance has been started. Before that, KubeVirt does not change the
/// volumes in its spec, and waits for all of them.
fn has_started(instance: &Instance) -> bool {
    !matches!(instance.status.phase.as_str(), "" | "Pending" | "Scheduling" | "Scheduled")
}

/// Reports whether the domain has a volume. Volumes that were present at its start have no phase.
fn is_ready(status: &VolumeStatus) -> bool {
    status.phase.as_deref().is_none_or(|phase| phase == READY) && !status.target.is_empty()
}

/// Describes a status.
fn how(status: &VolumeStatus) -> String {
    let mut words = status.phase.clone().unwrap_or_else(|| "no phase".to_owned());
    if let Some(why) = status.message.as_ref().or(status.reason.as_ref()).filter(|why| !why.is_empty()) {
        words.push_str(": ");
        words.push_str(why);
    }
    words
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volumes(names: &[&str]) -> Value {
        let volume = |name: &&str| json!({"name": name, "persistentVolumeClaim": {"claimName": name, "hotpluggable": true}});
        names.iter().map(volume).collect()
    }

    /// Builds a VM with these volumes in its spec, in its instance's spec, and in its instance's status with their
    /// phases.
    pub fn seen(wanted: &[&str], copied: &[&str], status: &[(&str, &str)]) -> Seen {
        let one = |(name, phase): &(&str, &str)| {
            let target = if *phase == READY { "sda" } else { "" };
            json!({"name": name, "phase": phase, "target": target, "hotplugVolume": {"attachPodName": "hp-volume-1"}})
        };
        let statuses: Value = status.iter().map(one).collect();
        Seen {
            way: None,
            vm: serde_json::from_value(json!({
                "metadata": {"name": "a", "resourceVersion": "1"},
                "spec": {"template": {"spec": {"volumes": volumes(wanted)}}},
            }))
            .unwrap(),
            instance: Some(
                serde_json::from_value(json!({
                    "metadata": {"name": "a", "uid": "run-1"},
                    "spec": {"volumes": volumes(copied)},
                    "status": {"phase": "Running", "volumeStatus": statuses},
                }))
                .unwrap(),
            ),
        }
    }

    /// Adds these accepted requests to the VM's status.
    pub fn asked(seen: Seen, come: &[&str], go: &[&str]) -> Seen {
        let coming = come.iter().map(|name| {
            let source = json!({"persistentVolumeClaim": {"claimName": name}});
            json!({"addVolumeOptions": {"name": name, "disk": {}, "volumeSource": source}})
        });
        let going = go.iter().map(|name| json!({"removeVolumeOptions": {"name": name}}));
        let requests: Value = coming.chain(going).collect();
        let status = serde_json::from_value(json!({"volumeRequests": requests})).unwrap();
        Seen { vm: VirtualMachine { status, ..seen.vm }, ..seen }
    }

    /// Lists of the VM's spec, the instance's spec and the instance's status, and the resulting stage.
    type Case<'c> = (&'c [&'c str], &'c [&'c str], &'c [(&'c str, &'c str)], &'c str);

    #[test]
    fn a_volume_is_where_all_three_say() {
        let ready = [("v", "Ready")];
        let going = [("v", "Detaching")];
        let (coming, leaving) = ("Coming", "Leaving");
        let cases: [Case; 9] = [
            (&[], &[], &[], "Absent"),
            (&["v"], &[], &[], "Handed"),
            (&["v"], &["v"], &[], coming),
            (&["v"], &["v"], &[("v", "AttachedToNode")], coming),
            (&["v"], &["v"], &ready, "Ready"),
            (&[], &["v"], &ready, leaving),
            (&[], &[], &going, leaving),
            (&[], &["v"], &[], leaving),
            // A volume of the same name is added while the previous one is still being removed.
            (&["v"], &[], &going, "Handed"),
        ];
        for (wanted, copied, status, expected) in cases {
            let stage = seen(wanted, copied, status).stage("v");
            assert!(
                format!("{stage:?}").starts_with(expected),
                "{wanted:?} {copied:?} {status:?}: {stage:?}"
            );
        }
        let without_target = Seen {
            instance: Some(
                serde_json::from_value(json!({
                    "metadata": {},
                    "spec": {"volumes": volumes(&["v"])},
                    "status": {"volumeStatus": [{"name": "v", "phase": "Ready", "target": ""}]},
                }))
                .unwrap(),
            ),
            ..seen(&["v"], &[], &[])
        };
        assert!(matches!(without_target.stage("v"), Stage::Coming(_)));
    }

    /// Interface of KubeVirt, volumes in the instance's status, further changes, and the resulting stage.
    type Change<'c> = (Option<Way>, &'c [(&'c str, &'c str)], &'c dyn Fn(&mut Seen), &'c str);

    #[test]
    fn what_an_instance_alone_lists_stays_where_no_spec_decides() {
        let stage = |way, status: &[(&str, &str)], change: &dyn Fn(&mut Seen)| {
            let mut seen = Seen { way, ..seen(&["x"], &["v", "x"], status) };
            change(&mut seen);
            (format!("{:?}", seen.stage("v")), seen.on_their_way().iter().any(|(name, _)| name == "v"))
        };
        let (as_it_is, ready) = (&|_: &mut Seen| {}, [("v", "Ready")]);
        let subresource = Some(Way::Subresource);
        assert_eq!(stage(subresource, &ready, as_it_is), ("Alone".to_owned(), false));
        let ends = |seen: &mut Seen| seen.instance.as_mut().unwrap().status.phase = "Succeeded".to_owned();
        let is_deleted = |seen: &mut Seen| {
            let run = json!({"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"});
            seen.instance.as_mut().unwrap().metadata = serde_json::from_value(run).unwrap();
        };
        let goes =
            |seen: &mut Seen| seen.instance.as_mut().unwrap().spec.volumes.retain(|one| one.name != "v");
        let cases: [Change; 8] = [
            (subresource, &[("v", "AttachedToNode")], as_it_is, "Coming"),
            (subresource, &[], as_it_is, "Coming"),
            (subresource, &ready, &ends, "Leaving"),
            (subresource, &ready, &is_deleted, "Leaving"),
            (subresource, &ready, &goes, "Leaving"),
            (subresource, &[("v", "Detaching")], &goes, "Leaving"),
            (Some(Way::Declarative), &ready, as_it_is, "Leaving"),
            (None, &ready, as_it_is, "Leaving"),
        ];
        for (way, status, change, expected) in cases {
            let (found, is_on_its_way) = stage(way, status, change);
            assert!(found.starts_with(expected) && is_on_its_way, "{way:?} {status:?} {expected}: {found}");
        }
    }

    #[test]
    fn what_kubevirt_has_accepted_counts() {
        let stage = |seen: &Seen| format!("{:?}", seen.stage("v"));
        let coming = asked(seen(&[], &[], &[]), &["v"], &[]);
        assert_eq!((stage(&coming).as_str(), coming.can_be_taken_out("v")), ("Handed", false));
        assert_eq!(coming.on_their_way().len(), 1);
        // The instance gets the volume before the VM's spec does.
        let there = asked(seen(&[], &["v"], &[("v", "Ready")]), &["v"], &[]);
        assert_eq!(stage(&there), "Ready");
        let off = Seen { instance: None, ..asked(seen(&["v"], &[], &[]), &[], &["v"]) };
        for going in [asked(seen(&["v"], &["v"], &[("v", "Ready")]), &[], &["v"]), off] {
            assert!(stage(&going).starts_with("Leaving") && !going.can_be_taken_out("v"), "{going:?}");
        }
        assert!(seen(&["v"], &[], &[]).can_be_taken_out("v"));
    }

    #[test]
    fn all_that_comes_and_goes_is_seen_whoever_wants_it() {
        let seen = seen(&["a", "b"], &["b", "c"], &[("d", "Detaching"), ("b", "Ready")]);
        let names: Vec<_> = seen.hotplugged().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
        assert_eq!(seen.attachment_pod("b"), Some("hp-volume-1"));
        assert_eq!(seen.attachment_pod("a"), None);
    }
}
