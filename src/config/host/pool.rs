//! A `[[pool]]` table: a folder of this machine in which volumes of one storage class are kept.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::super::Error;
use super::Source;
use super::vm::{Taken, check_name};

/// Bytes of the longest name: identifiers of volumes begin with it.
const LONGEST_NAME: usize = 63;
/// Seconds for which a call may wait for the file system at most.
const LONGEST_ANSWER: u32 = 3600;

/// One pool, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// The storage class: unique, letters a–z, digits, `-` and `.`, at most 63 bytes.
    pub name: String,
    /// The folder, unique.
    pub path: PathBuf,
    /// How images are kept.
    pub format: Format,
    /// How much of them is there.
    pub allocation: Allocation,
    /// What guests see its volumes on, if that is said.
    pub bus: Option<Bus>,
    /// For volumes that name no class.
    pub default: bool,
    /// How long its file system may take to answer, if that is said.
    pub answer_seconds: Option<u32>,
}

/// How an image is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Its bytes are the disk's.
    #[default]
    Raw,
    /// QEMU's own.
    Qcow2,
}

/// How much of an image is there from the beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// What was written.
    #[default]
    Thin,
    /// All of it.
    Full,
}

/// What a guest sees a volume on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bus {
    /// A virtio-scsi controller that the VM has.
    Scsi,
    /// virtio-blk, on a free PCI Express root port.
    Virtio,
}

/// A `[[pool]]` table.
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
