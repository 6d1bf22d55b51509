//! Where a volume is on its way into a VM or out of it, as the objects of the API say. Pure.
//!
//! ```text
//!  VM's spec ──KubeVirt copies──▶ instance's spec ──an attachment pod carries it──▶ instance's status: … Ready
//!     Handed                          Coming                                              Ready
//!
//!  gone from the VM's spec, and still in the instance's spec or status: Leaving.   In none of them: Absent.
//! ```
//!
//! Where changes are asked for by subresource, what KubeVirt has accepted and not carried out is in the VM's status: a volume
//! that it has been asked for counts as one in the VM's spec, and one that it has been asked to take away as gone from there.
//!
//! Where they are, one that only the instance lists came by a request to the instance (virtctl addvolume without --persist): nobody
//! takes it away, and it holds nothing up once it is ready (Alone). Where the VM's spec decides, KubeVirt takes it away.
//!
//! A status outlives its spec, and a name that comes again waits for that; so nothing is called absent before the
//! status has let go of it, too.

use tokio::time::Instant;

use super::super::gates::Way;
use super::super::objects::{Instance, VirtualMachine, Volume, VolumeStatus};

/// The phase of a volume that a machine has.
const READY: &str = "Ready";
/// The phase of a run whose domain runs.
const RUNNING: &str = "Running";
/// What the status of a volume says that is not in it.
const UNSAID: &str = "no details are given";

/// Where a volume is on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// Nowhere.
    Absent,
    /// KubeVirt has been told, and has not taken it up.
    Handed,
    /// KubeVirt is at it; in words how far.
    Coming(String),
    /// The machine has it. Its guest may not have seen it.
    Ready,
    /// The machine has it, and the VM does not: until that is stopped, or KubeVirt is asked at the instance.
    Alone,
    /// KubeVirt has been told to take it away, and has not done so; in words how far.
    Leaving(String),
}

impl Stage {
    /// Whether something is going on.
    fn is_on_its_way(&self) -> bool {
        !matches!(self, Self::Absent | Self::Ready | Self::Alone)
    }

    /// In words, for a sentence that begins with the volume.
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

/// A VM and its run, if it runs, as they were read.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// The VM.
    pub vm: VirtualMachine,
    /// The run of it.
    pub instance: Option<Instance>,
    /// How KubeVirt is told to plug and unplug; none if that was not asked, or it does not do it. What a run lists and its VM does not
    /// stays or goes by it.
    pub way: Option<Way>,
}

impl Seen {
    /// The volume of this name in the VM's spec.
    pub fn listed(&self, name: &str) -> Option<&Volume> {
        self.vm.spec.template.spec.volumes.iter().find(|volume| volume.name == name)
    }

    /// Whether KubeVirt can be told to take away the volume of this name: only one in the VM's spec, and only once.
    pub fn can_be_taken_out(&self, name: &str) -> bool {
        self.listed(name).is_some() && !self.is_asked_away(name)
    }

    fn is_asked_away(&self, name: &str) -> bool {
        self.vm.asked_away().any(|one| one == name)
    }

    /// The phase of a run that has not started its domain yet.
    pub fn waits_to_start(&self) -> Option<&str> {
        let instance = self.instance.as_ref().filter(|instance| !has_started(instance))?;
        Some(if instance.status.phase.is_empty() { "new" } else { &instance.status.phase })
    }

    /// The run of the VM, as far as it matters to its guest.
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

    /// Whether the instance lists a volume that the VM does not: where that is going is up to how KubeVirt is told.
    pub fn has_what_its_vm_lacks(&self) -> bool {
        self.instance
            .iter()
            .flat_map(|instance| &instance.spec.volumes)
            .any(|volume| self.listed(&volume.name).is_none())
    }

    /// Whether the instance keeps what the VM does not list.
    fn keeps_its_own(&self) -> bool {
        let runs = |run: &Instance| run.status.phase == RUNNING && run.metadata.deletion_timestamp.is_none();
        self.way == Some(Way::Subresource) && self.instance.as_ref().is_some_and(runs)
    }

    /// Where the volume of this name is.
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
            // The status is of one that had this name before.
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

    /// Every volume that came while the VM ran, or is to, whoever wants it, with where it is.
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

    /// Those of them that KubeVirt is at, or is to be. In a VM that is off, nothing goes anywhere.
    pub fn on_their_way(&self) -> Vec<(String, Stage)> {
        let mut volumes = self.hotplugged();
        volumes.retain(|(_, stage)| stage.is_on_its_way() && self.instance.is_some());
        volumes
    }

    /// The pod that carries the volume of this name, if there is one.
    pub fn attachment_pod(&self, name: &str) -> Option<&str> {
        self.status(name)?.hotplug_volume.as_ref()?.attach_pod_name.as_deref().filter(|pod| !pod.is_empty())
    }
}

/// A run of a VM, as far as it matters to its guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Run {
    /// The UID of the instance; none if there is none.
    pub uid: Option<String>,
    /// It has come as far as to have a guest, which may have ended since.
    pub has_started: bool,
}

/// What is known of the guest of a disk that is to be unplugged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// The run of the VM whose guest has released the disk, or which had no guest. Another one may have it in use.
    pub run: Run,
    /// When it has; none if it was not asked.
    pub at: Option<Instant>,
    /// Somebody answers for it that the guest can do without the disk.
    pub by_force: bool,
}

/// Whether the domain of an instance has been started. Before that KubeVirt changes nothing of the volumes in its spec, and waits
/// for all of them.
fn has_started(instance: &Instance) -> bool {
    !matches!(instance.status.phase.as_str(), "" | "Pending" | "Scheduling" | "Scheduled")
}

/// Whether the machine has a volume. Those of its start have no phase.
fn is_ready(status: &VolumeStatus) -> bool {
    status.phase.as_deref().is_none_or(|phase| phase == READY) && !status.target.is_empty()
}

/// What a status says, in words.
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

    /// A VM whose spec, whose instance's spec and whose instance's status list these, the last with their phases.
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

    /// The same with these changes that KubeVirt has accepted.
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

    /// What the VM's spec, the instance's spec and the instance's status list, and the stage that this is.
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
            // It came again while the one before was still going.
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

    /// How KubeVirt is told, what the instance's status lists, what is otherwise, and the stage that this is.
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
        // The instance has it before the VM's spec does.
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
