//! A `[[pool]]` table: a directory of this machine that holds the volumes of one storage class.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use super::vm::{Taken, check_name};

/// Maximum length of a name in bytes: identifiers of volumes begin with it.
const LONGEST_NAME: usize = 63;
/// Maximum of `answer-seconds`, the timeout of the pool's file system.
const LONGEST_ANSWER: u32 = 3600;

/// Settings of one pool, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// Name of the storage class: unique, letters a–z, digits, `-` and `.`, at most 63 bytes.
    pub name: String,
    /// Directory of the volumes; no two pools share one.
    pub path: PathBuf,
    /// Format of the images.
    pub format: Format,
    /// Space that is allocated when an image is created.
    pub allocation: Allocation,
    /// Bus on which guests see the volumes, if set.
    pub bus: Option<Bus>,
    /// True for the pool of volumes that name no class.
    pub default: bool,
    /// Timeout in seconds for the pool's file system to answer, if set.
    pub answer_seconds: Option<u32>,
}

/// Format of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The bytes of the image are those of the disk.
    #[default]
    Raw,
    /// The qcow2 format of QEMU.
    Qcow2,
}

/// Space that is allocated when an image is created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// None: space is allocated as the guest writes.
    #[default]
    Thin,
    /// All of it.
    Full,
}

/// Bus on which a guest sees a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bus {
    /// An existing virtio-scsi controller of the VM.
    Scsi,
    /// virtio-blk, on a free PCI Express root port.
    Virtio,
}

/// Table `[[pool]]`, unchecked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct PoolFragment {
    name: Option<Spanned<String>>,
    path: Option<Spanned<PathBuf>>,
    #[serde(default)]
    format: Format,
    #[serde(default)]
    allocation: Allocation,
    bus: Option<Bus>,
    #[serde(default)]
    default: Option<Spanned<bool>>,
    answer_seconds: Option<Spanned<u32>>,
}

pub(super) fn check<'a>(
    source: &'a Source,
    pool: &Spanned<PoolFragment>,
    taken: &mut Taken<'a>,
) -> Result<PoolSettings, Error> {
    let fragment = pool.get_ref();
    let missing = |key: &str, why: &str| source.wrong(pool, format!("[[pool]] has no {key}; {why}"));
    let name = fragment.name.as_ref().ok_or_else(|| missing("name", "it is the name of a storage class"))?;
    check_name(name.get_ref()).map_err(|problem| source.wrong(name, problem))?;
    if name.get_ref().len() > LONGEST_NAME {
        let problem =
            format!("name has more than {LONGEST_NAME} bytes; identifiers of volumes begin with it");
        return Err(source.wrong(name, problem));
    }
    source.unique(taken, "pool", name, name.get_ref())?;
    let at = fragment.path.as_ref().ok_or_else(|| missing("path", "volumes are kept there"))?;
    let path = source.absolute("path", at)?;
    source.unique(taken, "path", at, &path.to_string_lossy())?;
    let default = match &fragment.default {
        Some(default) if *default.get_ref() => {
            source.unique(taken, "default", default, "true")?;
            true
        }
        _ => false,
    };
    let answer_seconds = fragment.answer_seconds.as_ref().map(|found| seconds(source, found)).transpose()?;
    let PoolFragment { format, allocation, bus, .. } = *fragment;
    Ok(PoolSettings { name: name.get_ref().clone(), path, format, allocation, bus, default, answer_seconds })
}

fn seconds(source: &Source, found: &Spanned<u32>) -> Result<u32, Error> {
    let seconds = *found.get_ref();
    if (1..=LONGEST_ANSWER).contains(&seconds) {
        return Ok(seconds);
    }
    let problem = format!("pool.answer-seconds = {seconds}: use 1 to {LONGEST_ANSWER}");
    Err(source.wrong(found, problem))
}
