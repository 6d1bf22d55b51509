//! Claims that Harvester's CSI driver created and that guestlet has been given: the owner of each, and the way
//! a VM has it. Pure.
//!
//! ```text
//!  claim                         label app.kubernetes.io/managed-by=guestlet   label guestcluster.harvesterhci.io/name
//!    a volume of that cluster      yes                                           yes
//!    not given to guestlet         no                                            yes: shown to that cluster only
//!    without an owner              yes, or annotations of guestlet               no:  not shown to any cluster
//!    unrelated to guestlet         no                                            no:  a caller gets the missing labels
//!
//!  volume in a VM    its name           its disk
//!    ours              guestlet-disk-…    a serial number of guestlet's
//!    as it is          the claim's name   as plugged by the other program; the guest knows it by serial number or page 83h
//!    otherwise         any other, several, or fixed: refused, and never unplugged; also ours together with another
//! ```
//!
//! Claims are given to guestlet by anyone with permission to label claims of the host cluster; guests cannot do
//! so. Volumes that guestlet plugs are always plugged in its own way. A volume that is plugged "as it is"
//! cannot get a serial number before it has been unplugged.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::claims::{CLUSTER, FILES, OURS};
use super::hotplug::seen::{Seen, Stage};
use super::names::Claim;
use super::objects::{CLUSTER_LABEL, Disk, Volume};
use crate::host::backends::disks::{Bus, By, Known, check_serial};
use crate::host::backends::volumes::VolumeError;

/// Prefix of guestlet's annotations.
const ANNOTATIONS: &str = "guestlet.io/";
/// Bus on which a disk without a serial number can be identified.
const SCSI: &str = "scsi";
/// Maximum length in bytes of a text of page 83h that every guest can read in full.
const LONGEST: usize = 240;

fn label<'o>(object: &'o PersistentVolumeClaim, key: &str) -> Option<&'o str> {
    object.metadata.labels.as_ref()?.get(key).map(String::as_str).filter(|value| !value.is_empty())
}

fn annotation<'o>(object: &'o PersistentVolumeClaim, key: &str) -> Option<&'o str> {
    object.metadata.annotations.as_ref()?.get(key).map(String::as_str).filter(|value| !value.is_empty())
}

fn is_given(object: &PersistentVolumeClaim) -> bool {
    label(object, OURS.0) == Some(OURS.1)
}

fn is_share(object: &PersistentVolumeClaim) -> bool {
    object.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()) == Some(FILES)
}

/// Reports whether guestlet did not create this claim. Claims that it did create always keep the marks that
/// identify them.
pub fn is_adopted(claim: &Claim, object: &PersistentVolumeClaim) -> bool {
    !claim.is_made() && annotation(object, CLUSTER).is_none()
}

/// Returns the cluster that owns an adopted claim, from its namespace and label. `None` if it is not given to
/// guestlet, has no owner, or is not for one VM at a time.
pub fn cluster(claim: &Claim, object: &PersistentVolumeClaim) -> Option<String> {
    let name = label(object, CLUSTER_LABEL)?;
    let is_one = is_adopted(claim, object) && is_given(object) && !is_share(object);
    is_one.then(|| format!("{}/{name}", claim.namespace))
}

/// Returns the error for a claim that is not a volume of guestlet's. Such a claim must not be reported as
/// deleted: an administrator may have forgotten to label it.
pub fn obstacle(claim: &Claim, object: &PersistentVolumeClaim) -> VolumeError {
    let Claim { namespace, name } = claim;
    let annotations = object.metadata.annotations.iter().flatten();
    let has_traces = annotations.into_iter().any(|(key, _)| key.starts_with(ANNOTATIONS));
    let owner = label(object, CLUSTER_LABEL);
    let (key, value) = OURS;
    let words = match owner {
        Some(_) if is_share(object) => format!(
            "the claim {namespace}/{name} has the volume mode {FILES}: it is a share made by Harvester's \
             driver, and these are not adopted"
        ),
        Some(_) if !is_given(object) => format!(
            "the claim {namespace}/{name} is not assigned to guestlet: in the host cluster, \
             kubectl --namespace {namespace} label persistentvolumeclaim {name} {key}={value}"
        ),
        None if is_given(object) || has_traces => format!(
            "the claim {namespace}/{name} lacks the label {CLUSTER_LABEL}, which names its cluster; in the host cluster, \
             kubectl --namespace {namespace} label persistentvolumeclaim {name} {CLUSTER_LABEL}=NAME"
        ),
        _ => format!(
            "the claim {namespace}/{name} is in the host cluster, but not assigned to guestlet; if it is a \
             volume of this cluster: kubectl --namespace {namespace} label persistentvolumeclaim {name} \
             {key}={value} {CLUSTER_LABEL}=NAME"
        ),
    };
    let cluster = owner.map(|owner| format!("{namespace}/{owner}")).unwrap_or_default();
    VolumeError::NotGiven { cluster, words }
}

/// Way in which a VM has a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plugged {
    /// The VM does not have it.
    Not,
    /// Plugged by guestlet.
    Ours,
    /// Plugged by another program, with a volume named after the claim.
    AsIs(AsIs),
    /// Plugged by guestlet and additionally in another way, which the text describes.
    Twice(String),
    /// In a way that guestlet does not touch; the text describes it.
    Otherwise(String),
}

/// Volume that another program has plugged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsIs {
    /// Property by which the guest identifies the disk; or the reason why it cannot tell the disk from others.
    pub known: Result<Known, String>,
    /// True if the guest may not write.
    pub read_only: bool,
}

/// Determines how a VM has a claim, is going to have it, or has not released it yet.
pub fn plugged(seen: &Seen, claim: &Claim) -> Plugged {
    let (ours, as_is) = (claim.volume(), &claim.name);
    let wanted = &seen.vm.spec.template.spec;
    let run = seen.instance.as_ref();
    let listed: Vec<&Volume> =
        wanted.volumes.iter().chain(run.iter().flat_map(|run| &run.spec.volumes)).collect();
    let of_claim = |volume: &Volume| volume.claim() == Some(&claim.name);
    let mut names: BTreeSet<&str> =
        listed.iter().filter(|volume| of_claim(volume)).map(|volume| volume.name.as_str()).collect();
    let coming = seen.vm.asked_for().filter(|one| of_claim(&one.volume_source));
    names.extend(coming.map(|one| one.name.as_str()));
    for entry in run.iter().flat_map(|run| &run.status.volume_status) {
        let info = entry.persistent_volume_claim_info.as_ref().and_then(|info| info.claim_name.as_deref());
        let is_its = match info {
            Some(name) => name == claim.name,
            // The status no longer says which claim the volume is made of.
            None => entry.hotplug_volume.is_some() && (entry.name == ours || entry.name == *as_is),
        };
        if is_its {
            names.insert(&entry.name);
        }
    }
    let vm = seen.vm.metadata.name.as_deref().unwrap_or_default();
    let words = |what: &str| {
        format!("the VM {vm} has the claim {as_is} {what}; guestlet did not plug it, and leaves it alone")
    };
    let otherwise = |what: &str| Plugged::Otherwise(words(what));
    let has_ours = names.contains(ours.as_str());
    match (names.pop_first(), names.pop_first()) {
        (None, _) => Plugged::Not,
        (Some(one), Some(other)) => {
            let twice = words(&format!("twice, as its volumes {one} and {other}"));
            if has_ours { Plugged::Twice(twice) } else { Plugged::Otherwise(twice) }
        }
        (Some(name), None) if name == ours => Plugged::Ours,
        (Some(name), None) if name == as_is => {
            let is_fixed = |volume: &&&Volume| {
                of_claim(volume)
                    && !volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.hotpluggable)
            };
            if listed.iter().any(|volume| is_fixed(&volume)) {
                return otherwise("as a fixed part of it");
            }
            if seen.stage(as_is) == Stage::Alone {
                return otherwise("only while it runs, as virtctl plugs it without --persist");
            }
            let is_its = |disk: &&Disk| disk.name == *as_is;
            // A plugged volume is described by the run's spec, which takes precedence over the VM's.
            let disks =
                run.iter().flat_map(|run| &run.spec.domain.devices.disks).chain(&wanted.domain.devices.disks);
            let all: Vec<&Disk> = disks.collect();
            let disk = all.iter().copied().find(is_its);
            let known = disk
                .map_or_else(|| Err("its disk is not listed".to_owned()), |disk| known(disk, claim, &all));
            let read_only = disk.and_then(|disk| disk.disk.as_ref()).is_some_and(|target| target.readonly);
            Plugged::AsIs(AsIs { known, read_only })
        }
        (Some(name), None) if seen.stage(name) == Stage::Alone => otherwise(&format!(
            "only while it runs, as its volume {name}, as virtctl plugs it without --persist"
        )),
        (Some(name), None) => otherwise(&format!("as its volume {name}")),
    }
}

/// Returns the property by which a guest can tell the disk of a volume named like its claim from all other
/// disks of its VM.
fn known(disk: &Disk, claim: &Claim, all: &[&Disk]) -> Result<Known, String> {
    let bus = match &disk.disk {
        None => {
            return Err("it is not a plain disk, so its guest cannot tell which claim it is".to_owned());
        }
        Some(target) if target.bus == SCSI => Bus::Scsi,
        Some(target) => {
            return Err(format!(
                "it is on the bus {:?}, where its guest cannot identify it with certainty",
                target.bus
            ));
        }
    };
    let by = if disk.serial.is_empty() { By::Alias(claim.alias()) } else { By::Serial(disk.serial.clone()) };
    let known = Known { by, is_adopted: true };
    match &known.by {
        By::Serial(serial) => check_serial(serial, bus).map_err(|error| error.to_string())?,
        By::Alias(alias) if alias.len() > LONGEST => {
            return Err("its name is too long for its guest to read all of it".to_owned());
        }
        By::Alias(_) => {}
    }
    let says_so = |other: &&&Disk| other.name != disk.name && other.serial == known.text();
    match all.iter().find(says_so) {
        Some(other) => Err(format!(
            "its guest would identify the disk {} by the same text, {:?}",
            other.name,
            known.text()
        )),
        None => Ok(known),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::gates::Way;
    use super::*;

    const NAME: &str = "pvc-1";

    fn claim() -> Claim {
        Claim { namespace: "prod".to_owned(), name: NAME.to_owned() }
    }

    fn volume(name: &str, claim: &str) -> Value {
        json!({"name": name, "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}})
    }

    /// Builds a VM with these volumes and disks, and a run with these and this status.
    fn seen(wanted: &Value, run: &Value, disks: &Value, status: &Value) -> Seen {
        let spec = |volumes: &Value| json!({"volumes": volumes, "domain": {"devices": {"disks": disks}}});
        Seen {
            way: None,
            vm: serde_json::from_value(json!({
                "metadata": {"name": "web"}, "spec": {"template": {"spec": spec(wanted)}},
            }))
            .unwrap(),
            instance: Some(
                serde_json::from_value(json!({
                    "metadata": {"name": "web"}, "spec": spec(run), "status": {"volumeStatus": status},
                }))
                .unwrap(),
            ),
        }
    }

    fn word(plugged: &Plugged) -> String {
        match plugged {
            Plugged::Not => "not".to_owned(),
            Plugged::Ours => "ours".to_owned(),
            Plugged::AsIs(AsIs { known: Ok(known), .. }) => known.text().to_owned(),
            Plugged::AsIs(AsIs { known: Err(why), .. }) | Plugged::Twice(why) | Plugged::Otherwise(why) => {
                why.clone()
            }
        }
    }

    #[test]
    fn a_vm_has_a_claim_as_all_that_lists_it_says() {
        let (none, ours) = (json!([]), claim().volume());
        let entry = |name: &str, info: &Value| json!([{"name": name, "hotplugVolume": {}, "persistentVolumeClaimInfo": info}]);
        let (its, others) = (json!({"claimName": NAME}), json!({"claimName": "pvc-2"}));
        let fixed = json!([{"name": NAME, "persistentVolumeClaim": {"claimName": NAME}}]);
        let data = json!([{"name": NAME, "dataVolume": {"name": NAME, "hotpluggable": true}}]);
        let one = |name: &str, claim: &str| json!([volume(name, claim)]);
        let both = json!([volume(NAME, NAME), volume("x", NAME)]);
        let cases = [
            (&none, &none, &none, "not"),
            (&one(NAME, "pvc-2"), &none, &none, "not"),
            (&one(NAME, "pvc-2"), &none, &entry(NAME, &others), "not"),
            (&none, &none, &json!([{"name": NAME}]), "not"),
            (&one(&ours, NAME), &none, &none, "ours"),
            (&none, &none, &entry(&ours, &Value::Null), "ours"),
            (&one(NAME, NAME), &none, &none, "drive-ua-pvc-1"),
            (&none, &one(NAME, NAME), &none, "drive-ua-pvc-1"),
            (&none, &none, &entry(NAME, &its), "drive-ua-pvc-1"),
            // The status outlives its volume, and loses details over time.
            (&none, &none, &entry(NAME, &Value::Null), "drive-ua-pvc-1"),
            (&fixed, &none, &none, "as a fixed part of it"),
            (&one(NAME, NAME), &fixed, &none, "as a fixed part of it"),
            (&data, &none, &none, "as a fixed part of it"),
            (&one("backup", NAME), &none, &none, "as its volume backup"),
            (&none, &none, &entry("backup", &its), "as its volume backup"),
            (&both, &none, &none, "twice, as its volumes pvc-1 and x"),
            (&one(NAME, NAME), &one(&ours, NAME), &none, "twice, as its volumes guestlet-disk-"),
        ];
        let disks = json!([{"name": NAME, "disk": {"bus": "scsi"}}]);
        for (wanted, run, status, expected) in cases {
            let found = word(&plugged(&seen(wanted, run, &disks, status), &claim()));
            assert!(found.contains(expected), "{wanted} {run} {status}: {found}");
        }
        let target = json!([{"name": NAME, "phase": "Ready", "target": "sda", "hotplugVolume": {}}]);
        let mut alone = seen(&none, &one(NAME, NAME), &disks, &target);
        alone.instance.as_mut().unwrap().status.phase = "Running".to_owned();
        assert_eq!(word(&plugged(&alone, &claim())), "drive-ua-pvc-1");
        alone.way = Some(Way::Subresource);
        assert!(word(&plugged(&alone, &claim())).contains("only while it runs, as virtctl"));

        let source = json!({"persistentVolumeClaim": {"claimName": NAME}});
        let request = json!({"addVolumeOptions": {"name": NAME, "disk": {}, "volumeSource": source}});
        let mut coming = seen(&none, &none, &none, &none);
        coming.vm.status = serde_json::from_value(json!({"volumeRequests": [request]})).unwrap();
        assert_eq!(word(&plugged(&coming, &claim())), "its disk is not listed");
    }

    #[test]
    fn a_disk_is_known_by_what_no_other_one_says() {
        let volumes = json!([volume(NAME, NAME)]);
        let long = "a".repeat(65);
        let cases = [
            (json!([{"name": NAME, "disk": {"bus": "scsi"}}]), "drive-ua-pvc-1"),
            (json!([{"name": NAME, "disk": {"bus": "scsi"}, "serial": null}]), "drive-ua-pvc-1"),
            (json!([{"name": NAME, "disk": {"bus": "scsi"}, "serial": NAME}]), NAME),
            (json!([{"name": NAME, "disk": {"bus": "virtio"}, "serial": NAME}]), "the bus \"virtio\""),
            (json!([{"name": NAME, "disk": {}}]), "the bus \"\""),
            (json!([{"name": NAME, "lun": {"bus": "scsi"}, "serial": NAME}]), "not a plain disk"),
            (json!([{"name": NAME, "cdrom": {"bus": "sata"}}]), "not a plain disk"),
            (json!([{"name": NAME}]), "not a plain disk"),
            (json!([]), "not listed"),
            (json!([{"name": NAME, "disk": {"bus": "scsi"}, "serial": long}]), "has 65 bytes"),
            (
                json!([{"name": NAME, "disk": {"bus": "scsi"}, "serial": "s"}, {"name": "x", "serial": "s"}]),
                "identify the disk x by the same text",
            ),
            (
                json!([{"name": "x", "serial": "drive-ua-pvc-1"}, {"name": NAME, "disk": {"bus": "scsi"}}]),
                "identify the disk x by the same text",
            ),
        ];
        for (disks, expected) in cases {
            let found = word(&plugged(&seen(&volumes, &volumes, &disks, &json!([])), &claim()));
            assert!(found.contains(expected), "{disks}: {found}");
        }
        let long = Claim { name: "a".repeat(253), ..claim() };
        let disks = json!([{"name": long.name, "disk": {"bus": "scsi"}}]);
        let found =
            plugged(&seen(&json!([volume(&long.name, &long.name)]), &json!([]), &disks, &json!([])), &long);
        assert!(word(&found).contains("too long"), "{found:?}");
    }
}
