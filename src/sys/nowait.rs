//! Reads from a file what is in memory, without waiting for its disk.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;

use nix::libc;

/// Fills the buffer from where the file is, and says how much of it was filled: less than all only at the file's end.
/// Nothing is said, and nothing has happened, where that cannot be known without waiting, or the file is of a kind
/// that waits or fails.
pub fn read(file: &mut File, buffer: &mut [u8]) -> Option<usize> {
    const HERE: libc::off_t = -1;
    // A pipe would give what it has, and could not take it back.
    if !file.metadata().is_ok_and(|about| about.is_file()) {
        return None;
    }
    let mut length = 0;
    while length < buffer.len() {
        let left = &mut buffer[length..];
        let part = libc::iovec { iov_base: left.as_mut_ptr().cast(), iov_len: left.len() };
        // SAFETY: preadv2(2) writes no more than `iov_len` bytes to `iov_base`, which are those of the slice.
        let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const part, 1, HERE, libc::RWF_NOWAIT) };
        match usize::try_from(read) {
            Ok(0) => return Some(length),
            Ok(more) => length += more,
            Err(_) => {
                // Some was at hand and the rest is not.
                if length > 0 {
                    file.seek(SeekFrom::Current(-i64::try_from(length).ok()?)).ok()?;
                }
                return None;
            }
        }
    }
    Some(length)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn what_is_in_memory_is_read_as_by_a_plain_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"0123456789").unwrap();
        let mut file = File::open(&path).unwrap();
        let mut buffer = [0; 6];
        // Some file systems cannot tell; then a plain read finds everything where it was.
        for expected in [&b"012345"[..], b"6789", b""] {
            let length = read(&mut file, &mut buffer).unwrap_or_else(|| file.read(&mut buffer).unwrap());
            assert_eq!(&buffer[..length], expected);
        }
    }

    #[test]
    fn a_pipe_is_left_alone() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut file = File::from(std::os::fd::OwnedFd::from(reader));
        std::io::Write::write_all(&mut writer, b"ab").unwrap();
        assert_eq!(read(&mut file, &mut [0; 4]), None);
        assert_eq!(file.read(&mut [0; 4]).unwrap(), 2);
    }
}
