//! What is kept of one volume, in a file beside its image. Pure.
//!
//! ```text
//!  making ──image there──▶ ready ──to be removed──▶ removing ──image gone──▶ (no record)
//!    └──found at a start: image and record are removed──────┘ (same)
//! ```

use serde::{Deserialize, Serialize};

use super::super::super::disks::Format;
use super::super::super::volumes::{self, Volume};

/// Which form the records have.
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
#[serde(deny_unknown_fields)]
pub struct Record {
    version: u32,
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
#[serde(deny_unknown_fields)]
pub struct Published {
    uuid: String,
    vm: String,
    node: String,
    read_only: bool,
    /// It is being taken away.
    pub leaving: bool,
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
            id,
            name: new.name,
            cluster: new.cluster,
            class: new.class,
            size: new.size,
            format,
            full,
            claim: new.claim,
            stage: Stage::Making,
            published: None,
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
    /// With what is wrong, if it is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let record: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if record.version != VERSION {
            return Err(format!("it has version {}, and this program knows {VERSION}", record.version));
        }
        Ok(record)
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
            problem,
        }
    }
}

impl From<volumes::Published> for Published {
    fn from(published: volumes::Published) -> Self {
        let volumes::Published { uuid, vm, node, read_only, leaving } = published;
        Self { uuid, vm, node, read_only, leaving }
    }
}

impl From<Published> for volumes::Published {
    fn from(published: Published) -> Self {
        let Published { uuid, vm, node, read_only, leaving } = published;
        Self { uuid, vm, node, read_only, leaving }
    }
}

#[cfg(test)]
mod tests {
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
        };
        Record::new(text("fast.aaaaaaaaaaaaaaaaaaaa"), new, Format::Qcow2, true)
    }

    #[test]
    fn records_stay_readable() {
        let kept = br#"{"version": 1, "id": "fast.aaaaaaaaaaaaaaaaaaaa", "name": "pvc-1", "cluster": "dev",
            "class": "fast", "size": 512, "format": "qcow2", "full": true, "claim": "shop/data", "stage": "making"}"#;
        assert_eq!(Record::decode(kept), Ok(record("pvc-1")));
        for (wrong, words) in [
            (String::from_utf8_lossy(kept).replace(": 1,", ": 2,"), "it has version 2"),
            (String::from_utf8_lossy(kept).replace("claim", "claims"), "unknown field `claims`"),
            (String::from_utf8_lossy(&kept[..40]).into_owned(), "EOF"),
        ] {
            let problem = Record::decode(wrong.as_bytes()).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }

    proptest! {
        #[test]
        fn any_name_is_kept(name: String, read_only: bool, leaving: bool) {
            let published = Published { uuid: name.clone(), vm: "a".into(), node: name.clone(), read_only, leaving };
            let record = Record { published: Some(published), stage: Stage::Ready, ..record(&name) };
            prop_assert_eq!(Record::decode(&record.encode().unwrap()), Ok(record));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = Record::decode(&bytes);
        }
    }
}
