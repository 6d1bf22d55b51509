//! A volume of a pool as its record has it, and what is wrong with its image.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::super::volumes::VolumeError;
use super::folder::Folder;
use super::identity;
use super::record::Record;

/// A volume, and where it is.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its record, as it is kept.
    pub record: Record,
    /// Where that and its image are.
    pub folder: Arc<Folder>,
}

impl Entry {
    /// The disk's serial number.
    pub fn serial(&self) -> &str {
        identity::parse(&self.record.id).map_or("", |parts| parts.serial)
    }

    /// Its image.
    pub fn image(&self) -> PathBuf {
        self.folder.image(self.serial(), self.record.format())
    }

    /// Why its image cannot be used, if it cannot. Blocks.
    pub fn problem(&self) -> Option<String> {
        self.folder.problem(self.serial(), &self.record)
    }

    /// That its image cannot be used.
    pub fn damaged(&self, problem: &str) -> VolumeError {
        VolumeError::Damaged(format!("the volume {} ({}): {problem}", self.record.id, self.image().display()))
    }

    /// That the system refused something about its image.
    pub fn refused(&self, what: &'static str) -> impl Fn(io::Error) -> VolumeError {
        move |error| VolumeError::System(what, self.image(), error)
    }

    /// Sees to it that its image can be used. Blocks.
    ///
    /// # Errors
    /// If it cannot.
    pub fn check(&self) -> Result<(), VolumeError> {
        self.problem().map_or(Ok(()), |problem| Err(self.damaged(&problem)))
    }
}
