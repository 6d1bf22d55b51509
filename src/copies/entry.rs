//! Conversion of the file system's facts about files to messages.

use std::os::fd::OwnedFd;

use crate::sys::beneath::{self, Facts, Kind, Moment};
use crate::sys::extended_attributes;
use crate::wire::proto::v1::{FileAttribute, FileEntry, FileKind, FileOwner, FileTime};

/// Limit of the bytes of the attributes of one file.
const MAX_ATTRIBUTES: usize = 128 << 10;

/// Converts facts about a file to an entry.
pub fn entry(facts: &Facts) -> FileEntry {
    FileEntry {
        kind: kind(facts.kind).into(),
        size: facts.size,
        mode: facts.mode,
        user: facts.user,
        group: facts.group,
        modified: Some(told(facts.modified)),
        changed: Some(told(facts.changed)),
        device: facts.device,
        inode: facts.inode,
        allocated: facts.allocated,
        ..FileEntry::default()
    }
}

fn kind(kind: Kind) -> FileKind {
    match kind {
        Kind::Regular => FileKind::Regular,
        Kind::Directory => FileKind::Directory,
        Kind::Symlink => FileKind::Symlink,
        Kind::Special => FileKind::Special,
    }
}

fn told(moment: Moment) -> FileTime {
    FileTime { seconds: moment.seconds, nanoseconds: moment.nanoseconds }
}

/// Converts the time in a message.
pub fn moment(time: &FileTime) -> Moment {
    Moment { seconds: time.seconds, nanoseconds: time.nanoseconds.min(999_999_999) }
}

/// Returns the owner and the group of an entry.
pub fn owner_of(entry: &FileEntry) -> FileOwner {
    FileOwner { user: entry.user, group: entry.group }
}

/// Returns whether two entries describe the same file, unchanged.
pub fn is_same(one: &FileEntry, other: &FileEntry) -> bool {
    let identity = |entry: &FileEntry| {
        (entry.kind, entry.device, entry.inode, entry.size, entry.modified, entry.changed)
    };
    identity(one) == identity(other)
}

/// Returns whether an extended attribute is copied: those of programs, and access control lists. Others are
/// specific to this machine.
pub fn is_copied(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
}

/// Reads the extended attributes that are copied.
///
/// # Errors
/// The errors of listxattr(2).
pub fn attributes(found: &OwnedFd) -> std::io::Result<Vec<FileAttribute>> {
    let all = extended_attributes::all(&beneath::itself(found), is_copied, MAX_ATTRIBUTES)?;
    Ok(all.into_iter().map(|(name, value)| FileAttribute { name, value }).collect())
}
