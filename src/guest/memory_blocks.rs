//! Memory blocks: the units in which memory can be switched on and off.

use std::io;

use crate::guest::Guest;
use crate::sys::root::Root;
use crate::sys::{blocking, sysfs};

const FOLDER: &str = "/sys/devices/system/memory";

/// Memory block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Number of the block: its physical address divided by the size of a block.
    pub index: u64,
    /// True if the guest uses the block.
    pub online: bool,
    /// True if the kernel expects that the block can be switched off.
    pub can_offline: bool,
}

/// Result of switching a block.
#[derive(Debug)]
pub enum Outcome {
    /// The block is in the requested state.
    Done,
    /// No block has this number.
    Unknown(io::Error),
    /// This block, or any block of this machine, cannot be switched.
    Unsupported(io::Error),
    /// The kernel refused the change.
    Failed(io::Error),
}

/// Returns all blocks, in the order of their numbers; empty where the machine does not support memory blocks.
///
/// # Errors
/// If /sys cannot be read, or has the directory of blocks but no block.
pub async fn list(guest: &Guest) -> io::Result<Vec<Block>> {
    let root = guest.root.clone();
    blocking::run(move || {
        let indices = match sysfs::numbers(&root, FOLDER, "memory") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            indices => indices?,
        };
        if indices.is_empty() {
            return Err(io::Error::other("the kernel lists no memory block"));
        }
        indices.into_iter().map(|index| block(&root, index)).collect()
    })
    .await
}

fn block(root: &Root, index: u64) -> io::Result<Block> {
    let removable = match root.read(&format!("{FOLDER}/memory{index}/removable")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        removable => removable?.first().copied(),
    };
    Ok(match is_online(root, index) {
        // Old kernels cannot switch memory blocks.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Block { index, online: true, can_offline: false }
        }
        online => Block { index, online: online?, can_offline: removable.is_some_and(|byte| byte != b'0') },
    })
}

fn is_online(root: &Root, index: u64) -> io::Result<bool> {
    Ok(root.read(&state(index))?.starts_with(b"online"))
}

fn state(index: u64) -> String {
    format!("{FOLDER}/memory{index}/state")
}

/// Switches blocks on (true) and off, each independently. Returns the result for each.
pub async fn set(guest: &Guest, wanted: Vec<(u64, bool)>) -> Vec<(u64, Outcome)> {
    let root = guest.root.clone();
    let one = move |(index, online)| (index, set_one(&root, index, online));
    blocking::run(move || wanted.into_iter().map(one).collect()).await
}

fn set_one(root: &Root, index: u64, online: bool) -> Outcome {
    if let Err(error) = root.path(FOLDER).metadata() {
        return Outcome::Unsupported(error);
    }
    if let Err(error) = root.path(&format!("{FOLDER}/memory{index}")).metadata() {
        let unknown = error.kind() == io::ErrorKind::NotFound;
        return if unknown { Outcome::Unknown(error) } else { Outcome::Failed(error) };
    }
    match is_online(root, index) {
        Ok(now) if now == online => Outcome::Done,
        Ok(_) => match sysfs::write(root, &state(index), if online { "online" } else { "offline" }) {
            Ok(()) => Outcome::Done,
            Err(error) => Outcome::Failed(error),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound && online => {
            tracing::debug!("memory block {index} is always on: {error}");
            Outcome::Done
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Outcome::Unsupported(error),
        Err(error) => Outcome::Failed(error),
    }
}

/// Returns the size of a block in bytes.
///
/// # Errors
/// If /sys cannot be read, or its contents are not a size.
pub fn size(root: &Root) -> io::Result<u64> {
    let text = root.read(&format!("{FOLDER}/block_size_bytes"))?;
    let text = String::from_utf8_lossy(&text);
    u64::from_str_radix(text.trim(), 16)
        .map_err(|_| io::Error::other(format!("{:?} is not a size", text.trim())))
}
