//! Partition tables, GPT (UEFI specification, 5.3) and MBR: which partitions there are, and what has to be written so
//! that the last one takes all the room behind it.
//!
//! Pure: tables are bytes of a disk, by number of its sectors, and so are [`Write`]s. They are made in an order in
//! which a disk that loses power in between still holds a table that says the same as before, or the new one.

mod gpt;
mod mbr;

#[cfg(test)]
mod tests;

/// Alignment of the end of a grown partition, in bytes, so that no block of a file system is cut.
const ALIGNMENT: u64 = 1 << 20;

/// A disk, as much of it as tables are on.
pub trait Disk {
    /// Error of a disk that cannot be read.
    type Error;

    /// The size of a sector in bytes.
    fn sector(&self) -> u32;

    /// Returns the number of sectors.
    fn sectors(&self) -> u64;

    /// The bytes of `count` sectors from number `first` on.
    ///
    /// # Errors
    /// If they cannot be read.
    fn read(&self, first: u64, count: u64) -> Result<Vec<u8>, Self::Error>;
}

/// Partition of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Number in the table, from 1.
    pub number: u32,
    /// First sector.
    pub start: u64,
    /// Number of sectors.
    pub sectors: u64,
    /// True for an extended partition of an MBR, which contains other partitions.
    pub is_container: bool,
}

/// Bytes to be written to a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The number of the first sector.
    pub sector: u64,
    /// The bytes, as many as whole sectors have.
    pub bytes: Vec<u8>,
}

/// Plan for growing the last partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Growth {
    /// The last partition, as it will be.
    pub partition: Partition,
    /// Sectors to write, in groups: each group must be on the disk before the next is written. Empty if nothing
    /// has to change.
    pub writes: Vec<Vec<Write>>,
}

/// Reason why a partition table is left unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal<E> {
    /// Read error of the disk.
    #[error("cannot read the disk")]
    Disk(#[source] E),
    /// Disk without an MBR or GPT.
    #[error("there is no known partition table")]
    NoTable,
    /// Damaged table.
    #[error("the partition table is damaged: {0}")]
    Damaged(&'static str),
    /// Table without partitions.
    #[error("the partition table is empty")]
    Empty,
    /// Not the partition that was named is last.
    #[error("partition {wanted} is not the last one on the disk; the last one is {last}")]
    NotLast {
        /// The one that is to grow.
        wanted: u32,
        /// The one that could.
        last: u32,
    },
    /// The last one is an extended partition, or in one.
    #[error("the last partition is an extended one")]
    Extended,
    /// The disk is smaller than its table says.
    #[error("the disk has become smaller than its partitions")]
    Smaller,
}

/// The partitions of the disk, in the order of its table.
///
/// # Errors
/// If there is no table that can be trusted.
pub fn partitions<D: Disk>(disk: &D) -> Result<Vec<Partition>, Refusal<D::Error>> {
    Ok(match Table::read(disk)? {
        Table::Gpt(table) => table.partitions(),
        Table::Mbr(table) => table.partitions(),
    })
}

/// Plans how partition `wanted` of the disk, or the last one by default, grows to the end of the disk. A rest
/// of less than 1 MiB behind it stays unused.
///
/// # Errors
/// If there is no valid table, or it must not be changed.
pub fn grow<D: Disk>(disk: &D, wanted: Option<u32>) -> Result<Growth, Refusal<D::Error>> {
    let table = Table::read(disk)?;
    let partitions = match &table {
        Table::Gpt(table) => table.partitions(),
        Table::Mbr(table) => table.partitions(),
    };
    let last = *partitions.iter().max_by_key(|partition| partition.start).ok_or(Refusal::Empty)?;
    if let Some(wanted) = wanted.filter(|wanted| *wanted != last.number) {
        // Logical partitions have numbers from 5 on, and are in an extended one.
        let refusal = if last.is_container {
            Refusal::Extended
        } else {
            Refusal::NotLast { wanted, last: last.number }
        };
        return Err(refusal);
    }
    match table {
        Table::Gpt(table) => table.grow(disk, last),
        Table::Mbr(table) => table.grow(disk, last),
    }
}

enum Table {
    Gpt(gpt::Gpt),
    Mbr(mbr::Mbr),
}

impl Table {
    fn read<D: Disk>(disk: &D) -> Result<Self, Refusal<D::Error>> {
        let first = disk.read(0, 1).map_err(Refusal::Disk)?;
        let mbr = mbr::Mbr::parse(first).ok_or(Refusal::NoTable)?;
        if mbr.is_protective() {
            return gpt::Gpt::read(disk, mbr).map(Self::Gpt);
        }
        Ok(Self::Mbr(mbr))
    }
}

/// The sector after the last one that a partition which begins at `start` may have, if it may have all up to `end`.
fn aligned_end(end: u64, start: u64, sector: u32) -> u64 {
    let step = ALIGNMENT / u64::from(sector.max(1));
    let aligned = end - end % step.max(1);
    if aligned > start { aligned } else { end }
}
