//! Empty image in QEMU's format qcow2, version 3, according to its specification. Pure.
//!
//! ```text
//! cluster 0   header
//! cluster 1   reference count table: one entry, the block in cluster 2
//! cluster 2   reference counts of 16 bits: 1 for each cluster of the file
//! cluster 3…  first-level table: all zero, that is, nothing is allocated
//! ```

/// Size of a cluster in bytes, as a power of two.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Size in bytes of the part of the disk that one entry of the first-level table covers: a cluster full of
/// 8-byte entries, each of which covers one cluster.
const BYTES_PER_ENTRY: u64 = CLUSTER / 8 * CLUSTER;
const MAGIC: u32 = 0x5146_49fb;
/// Offset of the disk's size in the header.
const SIZE_AT: usize = 24;

/// Contents of an empty image file.
#[derive(Debug)]
pub struct Empty {
    /// First bytes of the file; the rest is zeros.
    pub start: Vec<u8>,
    /// Total length in bytes.
    pub length: u64,
}

/// Builds the image of an empty disk of `size` bytes, a multiple of 512.
pub fn empty(size: u64) -> Empty {
    let entries = size.div_ceil(BYTES_PER_ENTRY);
    let table_clusters = (entries * 8).div_ceil(CLUSTER).max(1);
    let clusters = 3 + table_clusters;
    let mut start = Vec::new();
    let mut number = |number: u64, width: usize| start.extend_from_slice(&number.to_be_bytes()[8 - width..]);
    number(MAGIC.into(), 4);
    number(3, 4);
    // Backing file, offset and length of its name: none.
    number(0, 8);
    number(0, 4);
    number(CLUSTER_BITS.into(), 4);
    number(size, 8);
    // Encryption method: none.
    number(0, 4);
    number(entries, 4);
    number(3 * CLUSTER, 8);
    number(CLUSTER, 8);
    number(1, 4);
    // Snapshots, number and offset: none.
    number(0, 4);
    number(0, 8);
    // Feature bits, incompatible, compatible and autoclear: none.
    number(0, 8);
    number(0, 8);
    number(0, 8);
    // Reference counts of 2 to the power of 4 bits; a header of 104 bytes, without extensions.
    number(4, 4);
    number(104, 4);
    let at = |cluster: u64| usize::try_from(cluster * CLUSTER).unwrap_or(usize::MAX);
    start.resize(at(1), 0);
    start.extend_from_slice(&(2 * CLUSTER).to_be_bytes());
    start.resize(at(2), 0);
    for _ in 0..clusters {
        start.extend_from_slice(&1_u16.to_be_bytes());
    }
    Empty { start, length: clusters * CLUSTER }
}

/// Returns the size of the disk in an image that begins with this header.
pub fn size(header: &[u8]) -> Option<u64> {
    let magic = header.get(..4)?;
    let size = header.get(SIZE_AT..SIZE_AT + 8)?;
    (magic == MAGIC.to_be_bytes()).then(|| size.iter().fold(0, |size, byte| size << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_follows_the_size() {
        for (bytes, entries, clusters) in
            [(512, 1, 4), (BYTES_PER_ENTRY, 1, 4), (BYTES_PER_ENTRY + 512, 2, 4), (64 << 40, 131_072, 19)]
        {
            let Empty { start, length } = empty(bytes);
            assert_eq!(size(&start), Some(bytes));
            assert_eq!(start[36..40], u32::to_be_bytes(entries), "{bytes}");
            assert_eq!(length, clusters * CLUSTER, "{bytes}");
            let counts = &start[2 * 65536..];
            assert_eq!(counts.len() as u64, 2 * clusters, "{bytes}");
        }
    }

    #[test]
    fn other_files_are_none() {
        assert_eq!(size(b""), None);
        assert_eq!(size(&[0; 64]), None);
        assert_eq!(size(&empty(512).start[..31]), None);
    }
}
