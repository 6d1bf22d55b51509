//! The partition at the end of a disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::{Climb, Next};
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding};
use crate::sys::partition_table::{self, Disk, Growth, Partition, Refusal};
use crate::sys::root::Root;
use crate::sys::{block, block_device, error_chain};

/// Kinds whose room is worth nothing unless they can take it.
const GROWING: &[&str] = &["btrfs", "crypto_LUKS", "ext2", "ext3", "ext4", "LVM2_member", "xfs"];
/// The kernel counts in these, whatever the disk's own sectors are.
const KERNEL_SECTOR: u64 = 512;

impl Climb<'_> {
    pub(super) async fn partition(&mut self, disk: &Held) -> Result<Next, Error> {
        let (name, wanted) = (disk.file().display().to_string(), self.partition);
        let (held, bytes, sector) = (disk.clone(), disk.bytes()?, disk.sector());
        let plan = move || {
            let file = block_device::reopen(held.device(), false).map_err(Refusal::Disk)?;
            let opened = Opened { file, bytes, sector };
            partition_table::grow(&opened, wanted)
        };
        let growth = match holding(disk, PATIENCE, plan).await? {
            Ok(growth) => growth,
            Err(refusal) => return Ok(self.refuse(name, error_chain::words(&refusal))),
        };
        let number = growth.partition.number;
        let what = format!("partition {number} of {name}");
        let Some(partition) = find(&self.guest.root, disk, growth.partition) else {
            return Ok(self.refuse(what, "the kernel has another idea of the partitions"));
        };
        let above = self.hold(&partition.file).await?;
        let found = contents(self.guest, above.file()).await?;
        if !found.kind().is_some_and(|kind| GROWING.contains(&kind)) {
            return Ok(self.refuse(what, format!("it holds {}, which does not grow", found.words())));
        }
        let to = growth.partition.sectors * u64::from(sector);
        if to < partition.bytes {
            return Ok(self.refuse(what, "it would become smaller"));
        }
        if !growth.writes.is_empty() || to > partition.bytes {
            let held = disk.clone();
            let locked = disk.lock(PATIENCE).await?;
            let act = move || {
                held.check()?;
                Ok::<_, Error>(write(&held, &growth, sector))
            };
            let done = holding(disk, PATIENCE * 3, act).await??;
            drop(locked);
            if let Err(error) = done {
                return Ok(self.refuse(what, error.to_string()));
            }
        }
        self.note(what, partition.bytes, to);
        Ok(Next::On(above))
    }
}

/// A partition, as the kernel knows it.
struct Known {
    file: PathBuf,
    bytes: u64,
}

/// The kernel's partition that begins where this one does, and has its number.
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

fn write(held: &Held, growth: &Growth, sector: u32) -> io::Result<()> {
    let disk = block_device::reopen(held.device(), true)?;
    for group in &growth.writes {
        for write in group {
            disk.write_all_at(&write.bytes, write.sector * u64::from(sector))?;
        }
        disk.sync_all()?;
    }
    let Partition { number, start, sectors, .. } = growth.partition;
    block_device::resize_partition(&disk, number, start * u64::from(sector), sectors * u64::from(sector))
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
