//! Record of one volume, stored in a file beside its image. Pure.
//!
//! ```text
//!  making ──image written──▶ ready ──to be removed──▶ removing ──image removed──▶ (no record)
//!    └──found at start: image and record are removed──────┘ (same)
//! ```
//!
//! Records are no longer stored as `making`, but an older program that was killed may have left one.
//!
//! `version` is the newest format that the writer knew, and `readers` is the oldest format whose programs may
//! use the record. It is left out if it is 1, so that programs from before its introduction can read what this
//! one writes. A program that may use a record preserves the fields that it does not know. To add a field that
//! older programs must not ignore: raise `VERSION`, and set `readers` accordingly in the records that use it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::super::disks::Format;
use super::super::super::volumes::{self, Volume};

/// Version of the format that this program writes, and the newest one that it can read.
const VERSION: u32 = 1;

/// Stage in the life of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The image may or may not exist, and the volume has not been reported to any client.
    Making,
    /// The volume exists.
    Ready,
    /// The image may or may not exist, and is no longer needed.
    Removing,
}

/// Record of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// Oldest format version whose programs may use it, if the record contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    readers: Option<u32>,
    /// Identifier; see [`Volume::id`].
    pub id: String,
    /// Name in the cluster; see [`Volume::name`].
    pub name: String,
    /// Owner; see [`Volume::cluster`].
    pub cluster: String,
    /// Storage class; see [`Volume::class`].
    pub class: String,
    /// Size in bytes that it has, or will have when it is plugged the next time.
    pub size: u64,
    /// Format of the image.
    pub format: Kept,
    /// True if all space is reserved.
    pub full: bool,
    /// Name for people; see [`Volume::claim`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// Stage of the volume.
    pub stage: Stage,
    /// VM that it is published to; see [`Volume::published`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
    /// Fields that a newer program stored, to be preserved.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Stored form of [`Format`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    /// The bytes of the image are the bytes of the disk.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

/// Stored form of [`volumes::Published`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    uuid: String,
    vm: String,
    node: String,
    read_only: bool,
    /// True while the volume is being detached.
    pub leaving: bool,
    /// Fields that a newer program stored, to be preserved.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Volume with an unusable record, and the fields that could be read nevertheless: its name stays taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Damaged {
    /// Reason why the record is unusable.
    pub problem: String,
    /// Identifier, if readable; see [`Volume::id`].
    pub id: Option<String>,
    /// Name, if readable; see [`Volume::name`].
    pub name: Option<String>,
    /// Owner, if readable; see [`Volume::cluster`].
    pub cluster: Option<String>,
    class: Option<String>,
    size: Option<u64>,
    published: Option<Published>,
}

impl Published {
    /// Returns the UUID of the VM.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Returns the name of the VM at the time of publishing.
    pub fn vm(&self) -> &str {
        &self.vm
    }
}

impl Record {
    /// Creates the record of a new volume.
    pub fn new(id: String, new: volumes::NewVolume, format: Format, full: bool) -> Self {
        let format = match format {
            Format::Raw => Kept::Raw,
            Format::Qcow2 => Kept::Qcow2,
        };
        Self {
            version: VERSION,
            readers: None,
            id,
            name: new.name,
            cluster: new.cluster,
            class: new.class,
            size: new.size,
            format,
            full,
            claim: new.claim,
            stage: Stage::Ready,
            published: None,
            rest: Map::new(),
        }
    }

    /// Serializes the record.
    ///
    /// # Errors
    /// Cannot occur in practice: all fields can be written as JSON.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Parses a stored record.
    ///
    /// # Errors
    /// If it cannot be parsed, or only newer programs may use it; the text says why.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Form {
            version: u32,
            readers: Option<u32>,
        }

        let Form { version, readers } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        // A record from before `readers` was meant for its own version only.
        let readers = readers.unwrap_or(version);
        if readers > VERSION {
            return Err(format!(
                "it has version {version}, for programs that support version {readers}, but this one supports \
                 {VERSION}; run a newer guestlet-host"
            ));
        }
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// Sets the VM that the volume is published to. Fields of a newer program are preserved if the VM is the same.
    pub fn publish(&mut self, published: Option<volumes::Published>) {
        let mut published = published.map(Published::from);
        if let (Some(new), Some(before)) = (&mut published, &mut self.published)
            && new.uuid == before.uuid
        {
            new.rest = std::mem::take(&mut before.rest);
        }
        self.published = published;
    }

    /// Returns the format of the image.
    pub fn format(&self) -> Format {
        match self.format {
            Kept::Raw => Format::Raw,
            Kept::Qcow2 => Format::Qcow2,
        }
    }

    /// Converts the record for the answer to a client.
    pub fn volume(&self, problem: Option<String>) -> Volume {
        Volume {
            id: self.id.clone(),
            name: self.name.clone(),
            cluster: self.cluster.clone(),
            class: self.class.clone(),
            size: self.size,
            claim: self.claim.clone(),
            published: self.published.clone().map(Into::into),
            sharers: None,
            problem,
        }
    }
}

impl Damaged {
    /// Recovers the readable fields of a record that has this problem.
    pub fn read(bytes: &[u8], problem: String) -> Self {
        let mut found: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let mut text = |field: &str| match found.get_mut(field).map(Value::take) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        };
        let (id, name, cluster, class) = (text("id"), text("name"), text("cluster"), text("class"));
        let size = found.get("size").and_then(Value::as_u64);
        let published =
            found.get_mut("published").and_then(|found| serde_json::from_value(found.take()).ok());
        Self { problem, id, name, cluster, class, size, published }
    }

    /// Reports whether it may be the volume with this name: a field that is unreadable matches everything.
    pub fn may_be(&self, cluster: &str, name: &str) -> bool {
        self.cluster.as_deref().is_none_or(|one| one == cluster)
            && self.name.as_deref().is_none_or(|one| one == name)
    }

    /// Converts the readable fields for the answer to a client, under this identifier.
    pub fn volume(&self, id: String) -> Volume {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        Volume {
            id,
            name: text(&self.name),
            cluster: text(&self.cluster),
            class: text(&self.class),
            size: self.size.unwrap_or(0),
            claim: String::new(),
            published: self.published.clone().map(Into::into),
            sharers: None,
            problem: Some(format!("its record cannot be used: {}", self.problem)),
        }
    }
}

impl From<volumes::Published> for Published {
    fn from(published: volumes::Published) -> Self {
        let volumes::Published { uuid, vm, node, read_only, leaving } = published;
        Self { uuid, vm, node, read_only, leaving, rest: Map::new() }
    }
}

impl From<Published> for volumes::Published {
    fn from(published: Published) -> Self {
        let Published { uuid, vm, node, read_only, leaving, rest: _ } = published;
        Self { uuid, vm, node, read_only, leaving }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    fn record(name: &str) -> Record {
        let text = |text: &str| text.to_owned();
        let new = volumes::NewVolume {
            name: text(name),
            cluster: text("dev"),
            class: text("fast"),
            size: 512,
            claim: text("shop/data"),
            is_share: false,
        };
        Record::new(text("fast.aaaaaaaaaaaaaaaaaaaa"), new, Format::Qcow2, true)
    }

    #[test]
    fn records_stay_readable() {
        let kept = br#"{"version": 1, "id": "fast.aaaaaaaaaaaaaaaaaaaa", "name": "pvc-1", "cluster": "dev",
            "class": "fast", "size": 512, "format": "qcow2", "full": true, "claim": "shop/data", "stage": "making"}"#;
        assert_eq!(Record::decode(kept), Ok(Record { stage: Stage::Making, ..record("pvc-1") }));
        for (wrong, words) in [
            (String::from_utf8_lossy(kept).replace(": 1,", ": 2,"), "it has version 2"),
            (
                String::from_utf8_lossy(kept).replace(": 1,", ": 3, \"readers\": 2,"),
                "it has version 3, for programs that support version 2",
            ),
            (String::from_utf8_lossy(kept).replace("cluster", "clusters"), "missing field `cluster`"),
            (String::from_utf8_lossy(&kept[..40]).into_owned(), "EOF"),
        ] {
            let problem = Record::decode(wrong.as_bytes()).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }

    #[test]
    fn programs_of_before_can_read_what_this_one_writes() {
        let published = volumes::Published {
            uuid: "u".into(),
            vm: "a".into(),
            node: "n".into(),
            read_only: false,
            leaving: false,
        };
        let mut record = record("pvc-1");
        record.publish(Some(published));
        let kept: Value = serde_json::from_slice(&record.encode().unwrap()).unwrap();
        let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        // Older programs refuse a record with any other field.
        let known = "version id name cluster class size format full claim stage published";
        assert_eq!(names(&kept), known.split(' ').map(str::to_owned).collect());
        let known = "uuid vm node read_only leaving";
        assert_eq!(names(&kept["published"]), known.split(' ').map(str::to_owned).collect());
        assert_eq!(kept["version"], 1);
    }

    #[test]
    fn what_a_newer_program_keeps_survives() {
        let mut kept: Value = serde_json::from_slice(&record("pvc-1").encode().unwrap()).unwrap();
        kept["version"] = 7.into();
        kept["readers"] = 1.into();
        kept["snapshots"] = serde_json::json!([{ "of": "yesterday" }]);
        kept["published"] = serde_json::json!(
            { "uuid": "u", "vm": "a", "node": "n", "read_only": false, "leaving": false, "since": 5 });
        let mut record = Record::decode(&serde_json::to_vec(&kept).unwrap()).unwrap();
        let mut published = volumes::Published::from(record.published.clone().unwrap());
        published.leaving = true;
        record.publish(Some(published));
        record.size = 1024;
        kept["published"]["leaving"] = true.into();
        kept["size"] = 1024.into();
        assert_eq!(serde_json::from_slice::<Value>(&record.encode().unwrap()).unwrap(), kept);
        record.publish(None);
        assert_eq!(record.published, None);
    }

    #[test]
    fn of_a_record_that_cannot_be_used_the_name_is_known() {
        let mut kept: Value = serde_json::from_slice(&record("pvc-1").encode().unwrap()).unwrap();
        kept["readers"] = 2.into();
        kept["format"] = "cloud".into();
        let found = Damaged::read(&serde_json::to_vec(&kept).unwrap(), "it is new".into());
        assert!(found.may_be("dev", "pvc-1") && !found.may_be("dev", "pvc-2") && !found.may_be("x", "pvc-1"));
        let volume = found.volume("fast.aaaaaaaaaaaaaaaaaaaa".into());
        assert_eq!((volume.size, volume.name.as_str(), volume.class.as_str()), (512, "pvc-1", "fast"));
        assert_eq!(volume.problem.as_deref(), Some("its record cannot be used: it is new"));
        for unreadable in ["", "{", "[]", "7", "{\"name\": 7}"] {
            let found = Damaged::read(unreadable.as_bytes(), String::new());
            assert_eq!(found, Damaged::default(), "{unreadable}");
            assert!(found.may_be("dev", "any"));
        }
    }

    proptest! {
        #[test]
        fn any_name_is_kept(name: String, read_only: bool, leaving: bool) {
            let (uuid, vm, node) = (name.clone(), "a".into(), name.clone());
            let published = Published { uuid, vm, node, read_only, leaving, rest: Map::new() };
            let record = Record { published: Some(published), stage: Stage::Ready, ..record(&name) };
            prop_assert_eq!(Record::decode(&record.encode().unwrap()), Ok(record));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = Record::decode(&bytes);
            let _ = Damaged::read(&bytes, String::new());
        }
    }
}
