//! How full a file system is, statvfs(3).

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;

/// Bytes of a file system, and its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// In use.
    pub used: u64,
    /// In use, or free for everybody.
    pub total: u64,
    /// All, with those that only root may use.
    pub total_privileged: u64,
    /// Free for everybody.
    pub available: u64,
    /// How many files it may hold; 0 if it has no such limit.
    pub inodes: u64,
    /// How many more files it may hold.
    pub inodes_free: u64,
}

/// The usage of the file system that `directory` is on. May block for as long as the file system does.
///
/// # Errors
/// As statvfs(3) gives them.
pub fn usage(directory: &Path) -> io::Result<Usage> {
    let numbers = statvfs(directory)?;
    let used = numbers.blocks().saturating_sub(numbers.blocks_free());
    let bytes = |blocks: u64| blocks.saturating_mul(numbers.fragment_size());
    Ok(Usage {
        available: bytes(numbers.blocks_available()),
        inodes: numbers.files(),
        inodes_free: numbers.files_free(),
        used: bytes(used),
        total: bytes(used.saturating_add(numbers.blocks_available())),
        total_privileged: bytes(numbers.blocks()),
    })
}
