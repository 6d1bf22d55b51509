//! Grows the partition at the end of a disk.
//!
//! ```text
//! lock ─▶ read the table, plan ─▶ what is on the partition? ─▶ read and plan again: the same?
//!           ─▶ the kernel is notified, and may refuse ─▶ the table is written ─▶ unlock
//! ```
//! The lock is the one that udev, `sfdisk --lock` and others honour. A program that changes the table meanwhile
//! either has the lock, or is detected by the second look. The table is written last, because a table that the
//! kernel does not accept is useless. It is written here and not by sfdisk, which is not in every guest, rewrites
//! the whole table, and does not keep the order in which a disk that loses power in between still has a valid
//! table (`sys::partition_table`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Climb, Next};
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding};
use crate::sys::partition_table::{self, Disk, Growth, Partition, Refusal};
use crate::sys::root::Root;
use crate::sys::{block, block_device, error_chain};

/// Contents for which the partition grows, because they can use the space.
const GROWING: &[&str] = &["btrfs", "crypto_LUKS", "ext2", "ext3", "ext4", "LVM2_member", "xfs"];
/// Unit of the kernel's numbers, whatever the sectors of the disk are.
const KERNEL_SECTOR: u64 = 512;

impl Climb<'_> {
    pub(super) async fn partition(&mut self, disk: &Held) -> Result<Next, Error> {
        let (name, wanted) = (disk.file().display().to_string(), self.partition);
        let lock = disk.lock(PATIENCE).await?;
        let (held, locked) = (disk.clone(), Arc::clone(&lock));
        let read = move || {
            let _locked = locked;
            plan(&held, wanted)
        };
        let growth = match holding(disk, PATIENCE, read).await? {
            Ok(growth) => growth,
            Err(refusal) => return Ok(self.refuse(name, error_chain::words(&refusal))),
        };
        let number = growth.partition.number;
        let what = format!("partition {number} of {name}");
        let Some(known) = find(&self.guest.root, disk, growth.partition) else {
            return Ok(self.refuse(what, "the kernel's partition table differs from the disk's"));
        };
        let partition = self.hold(&known.file).await?;
        let found = contents(self.guest, partition.file()).await?;
        if !found.kind().is_some_and(|kind| GROWING.contains(&kind)) {
            return Ok(self.refuse(what, format!("it holds {}, which cannot be grown", found.words())));
        }
        let to = growth.partition.sectors * u64::from(disk.sector());
        if to < known.bytes {
            return Ok(self.refuse(what, "it would become smaller"));
        }
        if !growth.writes.is_empty() || to > known.bytes {
            let (held, before) = (disk.clone(), known.bytes);
            let act = move || {
                let _locked = lock;
                held.check()?;
                Ok::<_, Error>(act(&held, wanted, &growth, before))
            };
            if let Err(why) = holding(disk, PATIENCE * 3, act).await?? {
                return Ok(self.refuse(what, why));
            }
        }
        self.note(what, known.bytes, to);
        Ok(Next::On(partition))
    }
}

/// Plans the growth of the present table.
fn plan(held: &Held, wanted: Option<u32>) -> Result<Growth, Refusal<io::Error>> {
    let bytes = block_device::bytes(held.device()).map_err(Refusal::Disk)?;
    let file = block_device::reopen(held.device(), false).map_err(Refusal::Disk)?;
    partition_table::grow(&Opened { file, bytes, sector: held.sector() }, wanted)
}

/// Grows a partition of `before` bytes as planned. The error is the reason why not.
fn act(held: &Held, wanted: Option<u32>, growth: &Growth, before: u64) -> Result<(), String> {
    let sector = held.sector();
    match plan(held, wanted) {
        Ok(again) if again == *growth => {}
        Ok(_) => return Err("its partition table has been changed meanwhile".to_owned()),
        Err(refusal) => return Err(error_chain::words(&refusal)),
    }
    let disk = block_device::reopen(held.device(), true).map_err(|error| error.to_string())?;
    let Partition { number, start, sectors, .. } = growth.partition;
    let resize = |bytes| block_device::resize_partition(&disk, number, start * u64::from(sector), bytes);
    resize(sectors * u64::from(sector)).map_err(|error| format!("the kernel refuses to grow it: {error}"))?;
    write(&disk, growth, sector).map_err(|error| {
        // Safe: nothing uses the new space yet.
        let after = resize(before)
            .err()
            .map_or(String::new(), |error| format!("; and the kernel's copy cannot be restored: {error}"));
        format!("its partition table cannot be written: {error}{after}")
    })
}

/// Partition as known to the kernel.
struct Known {
    file: PathBuf,
    bytes: u64,
}

/// Returns the kernel's partition with the same number and start.
fn find(root: &Root, disk: &Held, partition: Partition) -> Option<Known> {
    let place = disk.disk();
    let sector = u64::from(disk.sector());
    for entry in std::fs::read_dir(root.path(place)).ok()?.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let number = |what: &str| root.line(&format!("{place}/{name}/{what}")).parse::<u64>().ok();
        if number("partition") == Some(partition.number.into()) {
            let start = number("start")?.checked_mul(KERNEL_SECTOR)?;
            let bytes = number("size")?.checked_mul(KERNEL_SECTOR)?;
            let same = start == partition.start.checked_mul(sector)?;
            return same.then(|| Known { file: root.path(&block::file(&name)), bytes });
        }
    }
    None
}

fn write(disk: &File, growth: &Growth, sector: u32) -> io::Result<()> {
    for group in &growth.writes {
        for write in group {
            disk.write_all_at(&write.bytes, write.sector * u64::from(sector))?;
        }
        disk.sync_all()?;
    }
    Ok(())
}

struct Opened {
    file: File,
    bytes: u64,
    sector: u32,
}

impl Disk for Opened {
    type Error = io::Error;

    fn sector(&self) -> u32 {
        self.sector
    }

    fn sectors(&self) -> u64 {
        self.bytes / u64::from(self.sector.max(1))
    }

    fn read(&self, first: u64, count: u64) -> io::Result<Vec<u8>> {
        let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
        let at = first.checked_mul(self.sector.into()).ok_or_else(too_large)?;
        let length = count.checked_mul(self.sector.into()).and_then(|length| usize::try_from(length).ok());
        let mut bytes = vec![0; length.ok_or_else(too_large)?];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }
}
