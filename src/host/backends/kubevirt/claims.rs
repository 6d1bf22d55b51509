//! Conversion between volumes and claims of the host cluster (PersistentVolumeClaims). Pure.
//!
//! The claim is the complete record of a volume. Its labels are for people and for other programs of the host
//! cluster; the data that is read back is in annotations, because their values have no length limit that names
//! from guests could exceed.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};

use super::adopted;
use super::names::Claim;
use super::objects::CLUSTER_LABEL;
use crate::host::backends::volumes::{NewVolume, Published, Sharer, Volume};

/// Label of the objects that guestlet creates, with its value.
pub const OURS: (&str, &str) = ("app.kubernetes.io/managed-by", "guestlet");
/// Annotation with the cluster, as the host half names it.
pub const CLUSTER: &str = "guestlet.io/cluster";
/// Annotation with the name of the volume in its cluster.
const NAME: &str = "guestlet.io/name";
/// Annotation with the claim of the guest cluster.
const CLAIM: &str = "guestlet.io/claim";
/// Labels with the namespace and name of the claim in the guest cluster, for people: the name of the host
/// cluster's claim is a hash.
const CLAIM_LABELS: [&str; 2] = ["guestlet.io/claim-namespace", "guestlet.io/claim-name"];
/// Annotation that records the VM that the volume is published to.
pub const PUBLISHED: &str = "guestlet.io/published";
/// Annotation that records the VMs that may mount the share.
pub const SHARERS: &str = "guestlet.io/shared-with";
/// Volume mode of shares; that of all other volumes is `Block`. It never changes.
pub const FILES: &str = "Filesystem";
/// Access mode of shares.
const MANY: &str = "ReadWriteMany";

/// Value of the annotation for the VM that a volume is published to. Fields must never be renamed: claims
/// outlive this program.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uuid: String,
    vm: String,
    node: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    read_only: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    leaving: bool,
}

/// Returns the value of the annotation for the VM that a volume is published to.
pub fn record(published: &Published) -> String {
    let Published { uuid, vm, node, read_only, leaving } = published.clone();
    let record = Record { uuid, vm, node, read_only, leaving };
    // Strings and booleans can always be serialized.
    serde_json::to_string(&record).unwrap_or_default()
}

/// Value of the annotation for a VM that may mount a share. Fields must never be renamed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SharerRecord {
    uuid: String,
    vm: String,
    node: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    read_only: bool,
}

/// Returns the value of the annotation for the VMs that may mount a share; `None` if no VM may.
pub fn record_sharers(sharers: &[Sharer]) -> Option<String> {
    let record = |sharer: &Sharer| {
        let Sharer { uuid, vm, node, read_only } = sharer.clone();
        SharerRecord { uuid, vm, node, read_only }
    };
    let records: Vec<_> = sharers.iter().map(record).collect();
    // Serialization cannot fail, for the same reason as above.
    (!records.is_empty()).then(|| serde_json::to_string(&records).unwrap_or_default())
}

/// Splits `namespace/name` of a cluster into the namespace of its VMs and claims, and its name there.
pub fn place(cluster: &str) -> Option<(&str, &str)> {
    cluster.split_once('/').filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
}

/// Builds the claim for a new volume, with this access mode.
pub fn build(claim: &Claim, new: &NewVolume, access_mode: &str) -> PersistentVolumeClaim {
    let mut labels = BTreeMap::from([(OURS.0.to_owned(), OURS.1.to_owned())]);
    if let Some((_, name)) = place(&new.cluster).filter(|(_, name)| is_label_value(name)) {
        labels.insert(CLUSTER_LABEL.to_owned(), name.to_owned());
    }
    let parts = new.claim.split_once('/').map(|(namespace, name)| [namespace, name]).unwrap_or_default();
    let told = CLAIM_LABELS.into_iter().zip(parts).filter(|(_, part)| is_label_value(part));
    labels.extend(told.map(|(key, part)| (key.to_owned(), part.to_owned())));
    let texts = [(CLUSTER, &new.cluster), (NAME, &new.name), (CLAIM, &new.claim)];
    let annotations = texts.map(|(key, text)| (key.to_owned(), text.clone())).into();
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(claim.name.clone()),
            namespace: Some(claim.namespace.clone()),
            labels: Some(labels),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec![if new.is_share { MANY } else { access_mode }.to_owned()]),
            volume_mode: Some(if new.is_share { FILES } else { "Block" }.to_owned()),
            storage_class_name: Some(new.class.clone()),
            resources: Some(VolumeResourceRequirements {
                requests: Some([("storage".to_owned(), Quantity(new.size.to_string()))].into()),
                ..VolumeResourceRequirements::default()
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        ..PersistentVolumeClaim::default()
    }
}

/// Returns the volume that a claim represents, or `None` if it is not guestlet's: neither created by it nor
/// given to it ([`adopted`]).
pub fn volume(claim: &PersistentVolumeClaim) -> Option<Volume> {
    let metadata = &claim.metadata;
    let is_ours = metadata.labels.as_ref()?.get(OURS.0).is_some_and(|by| by == OURS.1);
    let place = Claim { namespace: metadata.namespace.clone()?, name: metadata.name.clone()? };
    let empty = BTreeMap::new();
    let annotations = metadata.annotations.as_ref().unwrap_or(&empty);
    let text = |key: &str| annotations.get(key).cloned().unwrap_or_default();
    let made_for = Some(text(CLUSTER)).filter(|cluster| is_ours && !cluster.is_empty());
    let is_made = made_for.is_some();
    let cluster = made_for.or_else(|| adopted::cluster(&place, claim))?;
    let (published, unreadable) = match published(claim) {
        Ok(published) => (published, None),
        Err(why) => (None, Some(why)),
    };
    let (sharers, unreadable) = match sharers(claim) {
        Ok(sharers) => (sharers, unreadable),
        Err(why) => (Some(Vec::new()), Some(why)),
    };
    let spec = claim.spec.as_ref();
    Some(Volume {
        id: place.id(),
        name: if is_made { text(NAME) } else { place.name },
        cluster,
        class: spec.and_then(|spec| spec.storage_class_name.clone()).unwrap_or_default(),
        size: size(claim),
        claim: text(CLAIM),
        published,
        sharers,
        problem: unreadable.or_else(|| problem(claim)),
    })
}

/// Describes the marks that a claim lacks to be recognized by [`volume`].
pub fn lacks(claim: &PersistentVolumeClaim) -> String {
    let (label, value) = OURS;
    let has_label =
        claim.metadata.labels.as_ref().and_then(|all| all.get(label)).is_some_and(|by| by == value);
    if has_label { format!("the annotation {CLUSTER}") } else { format!("the label {label}={value}") }
}

/// Returns the VM on record for the volume of a claim.
///
/// # Errors
/// If the annotation cannot be parsed; the text says why.
pub fn published(claim: &PersistentVolumeClaim) -> Result<Option<Published>, String> {
    let annotation = claim.metadata.annotations.as_ref().and_then(|all| all.get(PUBLISHED));
    match annotation.map(|text| serde_json::from_str(text)) {
        None => Ok(None),
        Some(Ok(Record { uuid, vm, node, read_only, leaving })) => {
            Ok(Some(Published { uuid, vm, node, read_only, leaving }))
        }
        Some(Err(error)) => Err(format!("its annotation {PUBLISHED} cannot be read: {error}")),
    }
}

/// Returns the VMs that may mount the share that a claim represents, ordered by UUID; `None` for a disk.
///
/// # Errors
/// If the annotation cannot be parsed; the text says why.
pub fn sharers(claim: &PersistentVolumeClaim) -> Result<Option<Vec<Sharer>>, String> {
    let mode = claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref());
    if mode != Some(FILES) {
        return Ok(None);
    }
    let annotation = claim.metadata.annotations.as_ref().and_then(|all| all.get(SHARERS));
    let Some(text) = annotation else { return Ok(Some(Vec::new())) };
    let records: Vec<SharerRecord> = serde_json::from_str(text)
        .map_err(|error| format!("its annotation {SHARERS} cannot be read: {error}"))?;
    let sharer = |record: SharerRecord| {
        let SharerRecord { uuid, vm, node, read_only } = record;
        Sharer { uuid, vm, node, read_only }
    };
    let mut sharers: Vec<_> = records.into_iter().map(sharer).collect();
    sharers.sort();
    Ok(Some(sharers))
}

/// Returns the requested size in bytes, or the provisioned size if that is larger, because storage may round
/// up.
fn size(claim: &PersistentVolumeClaim) -> u64 {
    let storage = |map: Option<&BTreeMap<String, Quantity>>| map.and_then(|map| bytes(map.get("storage")?));
    let spec = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let wanted = storage(spec.and_then(|resources| resources.requests.as_ref()));
    let there = capacity(claim);
    wanted.max(there).unwrap_or_default()
}

/// Returns the provisioned size in bytes; `None` before the claim is bound.
pub fn capacity(claim: &PersistentVolumeClaim) -> Option<u64> {
    bytes(claim.status.as_ref()?.capacity.as_ref()?.get("storage")?)
}

fn problem(claim: &PersistentVolumeClaim) -> Option<String> {
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if claim.metadata.deletion_timestamp.is_some() {
        Some("its claim is being deleted in the host cluster".to_owned())
    } else if phase == Some("Lost") {
        Some("its claim has lost its PersistentVolume in the host cluster".to_owned())
    } else {
        None
    }
}

/// Reports whether a text is valid as the value of a label.
fn is_label_value(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let outside = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && outside(bytes.first().copied())
        && outside(bytes.last().copied())
        && bytes.iter().all(|byte| inside(*byte))
}

/// Parses a Kubernetes quantity, such as `10Gi`, `1e9` or `1500M`, into bytes; fractions are rounded up.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let end = text.find(|one: char| !one.is_ascii_digit() && one != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let factor: u128 = match unit {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        "Ei" => 1 << 60,
        "k" => 1000,
        "M" => 1000_u128.pow(2),
        "G" => 1000_u128.pow(3),
        "T" => 1000_u128.pow(4),
        "P" => 1000_u128.pow(5),
        "E" => 1000_u128.pow(6),
        // The suffix `m` stands for thousandths.
        "m" => return u64::try_from(digits.checked_mul(1)?.div_ceil(1000)).ok(),
        exponent => {
            let power = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            10_u128.checked_pow(power)?
        }
    };
    let parts = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    u64::try_from(digits.checked_mul(factor)?.div_ceil(parts)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(name: &str) -> NewVolume {
        NewVolume {
            name: name.to_owned(),
            cluster: "dev/shop".to_owned(),
            class: "longhorn".to_owned(),
            size: 10 << 30,
            claim: "default/data".to_owned(),
            is_share: false,
        }
    }

    #[test]
    fn what_a_claim_was_made_of_is_read_from_it_again() {
        let name = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
        let mut claim = build(&Claim::of_name("dev/shop", name), &new(name), "ReadWriteMany");
        let made = volume(&claim).unwrap();
        let NewVolume { name, cluster, class, size, claim: told, .. } = new(name);
        assert_eq!((made.name, made.cluster, made.class, made.size), (name, cluster, class, size));
        assert_eq!((made.claim, made.published, made.problem), (told, None, None));
        let published = Published {
            uuid: "u".to_owned(),
            vm: "dev/a".to_owned(),
            node: "a".to_owned(),
            read_only: true,
            leaving: false,
        };
        let annotations = claim.metadata.annotations.as_mut().unwrap();
        annotations.insert(PUBLISHED.to_owned(), record(&published));
        assert_eq!(volume(&claim).unwrap().published, Some(published));
        let labels = claim.metadata.labels.as_ref().unwrap();
        let told = [CLUSTER_LABEL, CLAIM_LABELS[0], CLAIM_LABELS[1]].map(|key| labels[key].as_str());
        assert_eq!(told, ["shop", "default", "data"]);
    }

    #[test]
    fn what_is_no_value_of_a_label_is_in_the_annotations_alone() {
        let long = "a".repeat(64);
        for (told, expected) in [("", 0), ("x", 0), ("default/", 1), (&format!("default/{long}"), 1)] {
            let new = NewVolume { claim: told.to_owned(), ..new("a") };
            let claim = build(&Claim::of_name("dev/shop", "a"), &new, "ReadWriteMany");
            let labels = claim.metadata.labels.as_ref().unwrap();
            let there = CLAIM_LABELS.iter().filter(|key| labels.contains_key(**key)).count();
            assert_eq!((there, volume(&claim).unwrap().claim.as_str()), (expected, told));
        }
    }

    #[test]
    fn a_share_is_told_from_a_disk_and_keeps_whom_it_is_shared_with() {
        let place = Claim::of_name("dev", "a");
        assert_eq!(volume(&build(&place, &new("a"), "ReadWriteOnce")).unwrap().sharers, None);
        let mut claim = build(&place, &NewVolume { is_share: true, ..new("a") }, "ReadWriteOnce");
        let spec = claim.spec.clone().unwrap();
        assert_eq!(spec.access_modes.unwrap(), ["ReadWriteMany"]);
        assert_eq!(volume(&claim).unwrap().sharers, Some(Vec::new()));
        let sharer = |uuid: &str, read_only| Sharer {
            uuid: uuid.to_owned(),
            vm: format!("dev/{uuid}"),
            node: uuid.to_owned(),
            read_only,
        };
        let both = vec![sharer("a", true), sharer("b", false)];
        let text = record_sharers(&both).unwrap();
        claim.metadata.annotations.as_mut().unwrap().insert(SHARERS.to_owned(), text);
        assert_eq!(volume(&claim).unwrap().sharers, Some(both));
        assert_eq!(record_sharers(&[]), None);
        claim.metadata.annotations.as_mut().unwrap().insert(SHARERS.to_owned(), "{".to_owned());
        assert!(volume(&claim).unwrap().problem.unwrap().contains("guestlet.io/shared-with cannot be read"));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_a_problem_and_a_foreign_claim_is_no_volume() {
        let mut claim = build(&Claim::of_name("dev", "a"), &new("a"), "ReadWriteMany");
        claim.metadata.annotations.as_mut().unwrap().insert(PUBLISHED.to_owned(), "{".to_owned());
        assert!(volume(&claim).unwrap().problem.unwrap().contains("guestlet.io/published cannot be read"));
        let annotations = claim.metadata.annotations.take();
        assert_eq!((volume(&claim), lacks(&claim)), (None, format!("the annotation {CLUSTER}")));
        (claim.metadata.annotations, claim.metadata.labels) = (annotations, None);
        assert_eq!((volume(&claim), lacks(&claim)), (None, format!("the label {}={}", OURS.0, OURS.1)));
    }

    #[test]
    fn quantities() {
        let cases = [
            ("10Gi", Some(10 << 30)),
            ("1", Some(1)),
            ("1500M", Some(1_500_000_000)),
            ("1.5Gi", Some(3 << 29)),
            ("0.1", Some(1)),
            ("1e3", Some(1000)),
            ("2E3", Some(2000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1500m", Some(2)),
            ("16Ei", None),
            ("", None),
            ("Gi", None),
            ("1Xi", None),
            ("-1", None),
            ("1e99", None),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(&Quantity(text.to_owned())), expected, "{text:?}");
        }
    }
}
