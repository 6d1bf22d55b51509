//! Space usage of a file system, statvfs(3).

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;

/// Bytes of a file system, and its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub used: u64,
    /// Bytes in use or available to unprivileged users.
    pub total: u64,
    /// Size in bytes, including the space that is reserved for root.
    pub total_privileged: u64,
    /// Bytes available to unprivileged users.
    pub available: u64,
    /// Maximum number of inodes; 0 if there is no such limit.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

/// Returns the usage of the file system that `directory` is on. May block for as long as the file system does.
///
/// # Errors
/// The errors of statvfs(3).
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
