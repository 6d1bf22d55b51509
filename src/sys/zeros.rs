//! Check that a device contains only zeros, read from the device itself and not from the kernel's page cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Direct reads begin at a multiple of this, on the device and in memory, as every device takes them.
pub const BLOCK: usize = 4096;
/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;
const ZEROS: [u8; BLOCK] = [0; BLOCK];

/// Returns the offset of the first byte that is not zero in `ranges` of `device`, which begin at multiples of
/// [`BLOCK`]; `None` if there are only zeros. Where direct reads are not possible, buffered data is read. No
/// other reader may use this descriptor meanwhile, because its flags change. May block for as long as the
/// device does.
///
/// # Errors
/// `TimedOut` if not everything is read before `until`; `UnexpectedEof` if the device ends earlier; the errors
/// of read(2).
pub fn first_other(
    device: &File,
    ranges: impl IntoIterator<Item = Range<u64>>,
    until: Instant,
) -> io::Result<Option<u64>> {
    let mut direct = Direct::begin(device);
    let mut memory = vec![0_u8; PIECE + BLOCK];
    let begin = memory.as_ptr().align_offset(BLOCK).min(BLOCK);
    let buffer = &mut memory[begin..begin + PIECE];
    for Range { start: mut at, end } in ranges {
        while at < end {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            let piece = &mut buffer[..length];
            match device.read_exact_at(piece, at) {
                // The device refuses a direct read of this range, such as one that ends within a block.
                Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) && direct.is_some() => {
                    direct = None;
                    device.read_exact_at(piece, at)?;
                }
                read => read?,
            }
            if let Some(other) = first_in(piece) {
                return Ok(Some(at + other as u64));
            }
            at += length as u64;
        }
    }
    Ok(None)
}

fn first_in(bytes: &[u8]) -> Option<usize> {
    // Blocks are compared as a whole first, which is quick.
    let block = bytes.chunks(BLOCK).position(|block| *block != ZEROS[..block.len()])? * BLOCK;
    bytes[block..].iter().position(|byte| *byte != 0).map(|at| block + at)
}

/// Sets a descriptor to direct reads (`O_DIRECT`) until it is dropped.
struct Direct<'a> {
    device: &'a File,
    before: OFlag,
}

impl<'a> Direct<'a> {
    /// Returns `None` if direct reads are not possible.
    fn begin(device: &'a File) -> Option<Self> {
        let before = OFlag::from_bits_retain(fcntl(device, FcntlArg::F_GETFL).ok()?);
        fcntl(device, FcntlArg::F_SETFL(before | OFlag::O_DIRECT)).ok()?;
        Some(Self { device, before })
    }
}

impl Drop for Direct<'_> {
    fn drop(&mut self) {
        if let Err(error) = fcntl(self.device, FcntlArg::F_SETFL(self.before)) {
            tracing::warn!("a device stays without buffers: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn the_first_byte_of_a_range_is_found() {
        // In a directory of the build, whose file system may support direct reads, and in one that may not.
        for folder in [env!("CARGO_MANIFEST_DIR"), "/dev/shm"] {
            let Ok(file) = tempfile::tempfile_in(folder) else { continue };
            let length = 5 * PIECE as u64 + 700;
            file.set_len(length).unwrap();
            let flags = || fcntl(&file, FcntlArg::F_GETFL).unwrap();
            let before = flags();
            let first = |ranges: &[Range<u64>]| first_other(&file, ranges.iter().cloned(), soon()).unwrap();
            assert_eq!(first(std::slice::from_ref(&(0..length))), None);
            for at in [length - 1, 3 * PIECE as u64, 2 * PIECE as u64 - 1, 4097, 0] {
                file.write_all_at(b"x", at).unwrap();
                assert_eq!(first(std::slice::from_ref(&(0..length))), Some(at));
            }
            assert_eq!(first(&[8192..12288, 2 << 20..length]), Some(3 << 20));
            assert_eq!(first(std::slice::from_ref(&(8192..12288))), None);
            assert_eq!(flags(), before);
        }
    }

    #[test]
    fn what_cannot_be_read_in_time_or_at_all_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let whole = 0..8192;
        let error = first_other(&file, [whole.clone()], Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        file.set_len(5000).unwrap();
        let error = first_other(&file, [whole.clone()], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(first_other(&file, [], Instant::now()).unwrap(), None);
    }
}
