//! Volume of a pool according to its record, and the state of its image.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::super::volumes::VolumeError;
use super::folder::Folder;
use super::identity;
use super::record::Record;

/// Volume and its directory.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Record of the volume, as stored.
    pub record: Record,
    /// Directory of the record and the image.
    pub folder: Arc<Folder>,
}

impl Entry {
    /// Returns the serial number of the disk.
    pub fn serial(&self) -> &str {
        identity::parse(&self.record.id).map_or("", |parts| parts.serial)
    }

    /// Returns the path of the image.
    pub fn image(&self) -> PathBuf {
        self.folder.image(self.serial(), self.record.format())
    }

    /// Returns the reason why the image is unusable, if it is. Blocks.
    pub fn problem(&self) -> Option<String> {
        self.folder.problem(self.serial(), &self.record)
    }

    /// Returns the error for an unusable image.
    pub fn damaged(&self, problem: &str) -> VolumeError {
        VolumeError::Damaged(format!("the volume {} ({}): {problem}", self.record.id, self.image().display()))
    }

    /// Returns a conversion of system errors about the image; `what` is the failed operation.
    pub fn refused(&self, what: &'static str) -> impl Fn(io::Error) -> VolumeError {
        move |error| VolumeError::System(what, self.image(), error)
    }

    /// Checks that its image is usable. Blocks.
    ///
    /// # Errors
    /// If it is not.
    pub fn check(&self) -> Result<(), VolumeError> {
        self.problem().map_or(Ok(()), |problem| Err(self.damaged(&problem)))
    }
}
