//! File that is being written beside its final name.

use std::io;
use std::os::unix::fs::FileExt as _;

use super::aside::Aside;
use super::digest::Digest;
use super::entry::{self, is_copied};
use super::{Failure, PIECE, Unmet};
use crate::sys::beneath::{self, Facts, Kind};
use crate::sys::extended_attributes;
use crate::wire::proto::v1::{FileAttribute, FileData, FileHole, FinishFile};

/// State of the file that was begun.
pub enum Open {
    None,
    /// Writing failed, which was reported; further content is ignored.
    Failed,
    Writing(Box<Writing>),
}

/// File that is being written.
pub struct Writing {
    /// Temporary file that receives the content until it is complete.
    pub aside: Aside,
    /// Path for messages.
    pub path: Vec<u8>,
    pub name: Vec<u8>,
    /// File that will be replaced.
    pub before: Option<Facts>,
    pub keep: bool,
    /// Bytes written so far, and bytes reported so far.
    pub at: u64,
    pub told: u64,
    pub digest: Digest,
}

/// Sets those of the attributes that are copied.
pub fn set_attributes(file: &std::fs::File, attributes: &[FileAttribute]) -> io::Result<()> {
    for FileAttribute { name, value } in attributes.iter().filter(|one| is_copied(&one.name)) {
        extended_attributes::set(file, name, value)?;
    }
    Ok(())
}

impl Open {
    /// Runs `work` with the file that is being written.
    pub fn with(&mut self, work: impl FnOnce(&mut Writing) -> Result<(), Unmet>) -> Result<(), Unmet> {
        match self {
            Self::Writing(writing) => work(writing),
            // The failure was reported already.
            Self::Failed => Ok(()),
            Self::None => Err(Failure::last("no file was begun").into()),
        }
    }

    /// Removes the file; further content for it is ignored.
    pub fn drop_failed(&mut self) {
        if let Self::Writing(writing) = std::mem::replace(self, Self::Failed) {
            writing.aside.remove();
        }
    }
}

impl Writing {
    pub fn restart(&mut self) -> Result<(), Unmet> {
        self.aside.file().set_len(0).map_err(Failure::io("write", &self.path))?;
        (self.at, self.told, self.digest) = (0, 0, Digest::default());
        Ok(())
    }

    pub fn data(&mut self, data: &FileData) -> Result<(), Unmet> {
        if data.offset != self.at || data.data.len() > PIECE {
            return Err(Failure::last("the content has a gap, or a piece is too large").into());
        }
        let written = self.aside.file().write_all_at(&data.data, self.at);
        written.map_err(Failure::io("write", &self.path))?;
        self.digest.update(&data.data);
        self.at += data.data.len() as u64;
        Ok(())
    }

    pub fn hole(&mut self, hole: &FileHole) -> Result<(), Unmet> {
        let end = hole.offset.checked_add(hole.length).filter(|end| i64::try_from(*end).is_ok());
        let Some(end) = end.filter(|_| hole.offset == self.at) else {
            return Err(Failure::last("the content has a gap").into());
        };
        // The file gets its size now, so that a later continuation of the copy sees it.
        self.aside.file().set_len(end).map_err(Failure::io("write", &self.path))?;
        self.digest.zeros(hole.length);
        self.at = end;
        Ok(())
    }

    /// Sets all properties of the file except its name, and writes it to the disk.
    pub fn complete(&self, finish: &FinishFile) -> Result<(), Failure> {
        let file = self.aside.file();
        let set = |error| Failure::io("preserve the attributes of", &self.path)(error);
        let own = self.aside.facts();
        let before = self.before.filter(|before| before.kind == Kind::Regular);
        let owner = finish.owner.as_ref().map(|owner| (owner.user, owner.group));
        let owner = owner.or(before.map(|before| (before.user, before.group)));
        if let Some((user, group)) = owner.filter(|owner| *owner != (own.user, own.group)) {
            beneath::set_owner(file, user, group).map_err(set)?;
        }
        // Mode bits that give away the owner's rights (set-user-ID and the like) are set only on request.
        let new = if finish.new_mode == 0 { 0o644 } else { finish.new_mode & 0o777 };
        let mode = finish.mode.unwrap_or_else(|| before.map_or(new, |before| before.mode & 0o777));
        beneath::set_mode(file, mode & 0o7777).map_err(set)?;
        if before.is_some()
            && let Ok(replaced) = beneath::find_in(self.aside.directory(), beneath::name(&self.name))
                .and_then(|found| beneath::read(&found))
        {
            extended_attributes::copy_security_label(&replaced, file);
        }
        set_attributes(file, &finish.attributes).map_err(set)?;
        if let Some(time) = &finish.modified {
            beneath::set_modified(file, entry::moment(time)).map_err(set)?;
        }
        file.sync_all().map_err(Failure::io("write to the disk", &self.path))
    }
}
