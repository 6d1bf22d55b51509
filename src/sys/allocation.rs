//! Room for a file on its file system, fallocate(2).

use std::fs::File;
use std::io;

use nix::fcntl::{FallocateFlags, fallocate};

/// Allocates space for this many bytes of the file from `offset` on, without changing its length. May take
/// long where the file system has to write zeros.
///
/// # Errors
/// The errors of fallocate(2): [`io::ErrorKind::StorageFull`] where there is not enough space; a part may be
/// allocated then.
pub fn reserve(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let number =
        |number: u64| i64::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge));
    Ok(fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, number(offset)?, number(bytes)?)?)
}

/// Releases the space that is allocated beyond the end of the file. No other process may extend the file
/// meanwhile.
///
/// # Errors
/// The errors of ftruncate(2).
pub fn give_back(file: &File) -> io::Result<()> {
    // A hole punched there would not be one: file systems look at the length first.
    file.set_len(file.metadata()?.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn room_is_taken_and_given_back_and_the_length_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("a")).unwrap();
        file.set_len(4096).unwrap();
        let taken = || file.metadata().unwrap().blocks() * 512;
        reserve(&file, 4096, 1 << 20).unwrap();
        assert!(taken() >= 1 << 20, "{}", taken());
        give_back(&file).unwrap();
        assert!(taken() < 1 << 20, "{}", taken());
        assert_eq!(file.metadata().unwrap().len(), 4096);
        reserve(&file, 5, 0).unwrap();
        assert!(reserve(&file, u64::MAX, 1).is_err());
    }
}
