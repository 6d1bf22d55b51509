//! What is kept of one volume, in a file beside its image. Pure.
//!
//! ```text
//!  making ──image there──▶ ready ──to be removed──▶ removing ──image gone──▶ (no record)
//!    └──found at a start: image and record are removed──────┘ (same)
//! ```
//!
//! Nothing is kept as `making` any more; a program of before that was killed may have left one.
//!
//! `version` is the form that the writer knew, and `readers` the first one whose programs may use the record; it is
//! left out where it is 1, so that the programs from before it can read what this one writes. A program that may use a
//! record keeps the fields that it does not know. To add a field that older programs must not ignore: raise `VERSION`,
//! and have the records that use it say so in `readers`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::super::disks::Format;
use super::super::super::volumes::{self, Volume};

/// Which form the records have that this program writes, and the newest that it knows.
const VERSION: u32 = 1;

/// How far a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Its image may be there or not, and nobody was told of it.
    Making,
    /// It is there.
    Ready,
    /// Its image may be there or not, and nobody needs it any more.
    Removing,
}

/// The record of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The first version whose programs may use it, if that is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    readers: Option<u32>,
    /// See [`Volume::id`].
    pub id: String,
    /// See [`Volume::name`].
    pub name: String,
    /// See [`Volume::cluster`].
    pub cluster: String,
    /// See [`Volume::class`].
    pub class: String,
    /// The size that it has, or is to have when it is plugged the next time.
    pub size: u64,
    /// How the image is kept.
    pub format: Kept,
    /// Room for all of it is reserved.
    pub full: bool,
    /// See [`Volume::claim`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// How far it is.
    pub stage: Stage,
    /// See [`Volume::published`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
    /// What a newer program keeps.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// As [`Format`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    /// The image's bytes are the disk's.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

/// As [`volumes::Published`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    uuid: String,
    vm: String,
    node: String,
    read_only: bool,
    /// It is being taken away.
    pub leaving: bool,
    /// What a newer program keeps.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A volume whose record cannot be used, with what can be read of it nevertheless: its name stays taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Damaged {
    /// Why it cannot be used.
    pub problem: String,
    /// See [`Volume::id`].
    pub id: Option<String>,
    /// See [`Volume::name`].
    pub name: Option<String>,
    /// See [`Volume::cluster`].
    pub cluster: Option<String>,
    class: Option<String>,
    size: Option<u64>,
    published: Option<Published>,
}

impl Published {
    /// The VM's UUID.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Its name at that time.
    pub fn vm(&self) -> &str {
        &self.vm
    }
}

impl Record {
    /// Of a volume to be.
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

    /// As it is kept.
    ///
    /// # Errors
    /// Never in fact: all of it can be written as JSON.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// A record that was kept.
    ///
    /// # Errors
    /// With what is wrong, if it is none, or one that only newer programs may use.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Form {
            version: u32,
            readers: Option<u32>,
        }

        let Form { version, readers } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        // One of before `readers` was for its own version only.
        let readers = readers.unwrap_or(version);
        if readers > VERSION {
            return Err(format!(
                "it has version {version}, for programs that support version {readers}, but this one supports \
                 {VERSION}; run a newer guestlet-host"
            ));
        }
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// Notes which VM has the volume. What a newer program keeps about the same VM is kept.
    pub fn publish(&mut self, published: Option<volumes::Published>) {
        let mut published = published.map(Published::from);
        if let (Some(new), Some(before)) = (&mut published, &mut self.published)
            && new.uuid == before.uuid
        {
            new.rest = std::mem::take(&mut before.rest);
        }
        self.published = published;
    }

    /// How the image is kept.
    pub fn format(&self) -> Format {
        match self.format {
            Kept::Raw => Format::Raw,
            Kept::Qcow2 => Format::Qcow2,
        }
    }

    /// As others are told of it.
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
    /// What there is in a record with this problem.
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

    /// Whether it may be the volume of this name.
    pub fn may_be(&self, cluster: &str, name: &str) -> bool {
        self.cluster.as_deref().is_none_or(|one| one == cluster)
            && self.name.as_deref().is_none_or(|one| one == name)
    }

    /// As others are told of it, under this identifier.
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
        // They refuse a record with any other field.
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
