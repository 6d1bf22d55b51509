//! SHA-256 of copied content.

use std::fs::File;
use std::io::{self, Read as _};

use ring::digest::{Context, SHA256};

/// Bytes that are read at a time.
const BLOCK: usize = 256 << 10;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// SHA-256 of the content so far.
#[derive(Clone)]
pub struct Digest(Context);

impl Default for Digest {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Digest {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Adds a number of zeros, without a buffer of that size.
    pub fn zeros(&mut self, mut count: u64) {
        while count > 0 {
            let length = count.min(ZEROS.len() as u64);
            self.0.update(&ZEROS[..usize::try_from(length).unwrap_or(ZEROS.len())]);
            count -= length;
        }
    }

    /// Returns the digest of the content so far; more may follow.
    pub fn value(&self) -> Vec<u8> {
        self.0.clone().finish().as_ref().to_vec()
    }

    /// Adds up to `most` bytes of a file; returns how many were read. `goes_on` is called regularly, and can
    /// interrupt this.
    ///
    /// # Errors
    /// The errors of read(2); `Interrupted` if `goes_on` returns false.
    pub fn read(&mut self, file: &mut File, most: u64, goes_on: impl Fn() -> bool) -> io::Result<u64> {
        let mut buffer = vec![0; BLOCK];
        let mut total = 0;
        while total < most {
            if !goes_on() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let wanted = usize::try_from(most - total).unwrap_or(BLOCK).min(BLOCK);
            match file.read(&mut buffer[..wanted]) {
                Ok(0) => break,
                Ok(count) => {
                    self.update(&buffer[..count]);
                    total += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use super::*;

    #[test]
    fn zeros_count_as_if_they_were_read() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abc").unwrap();
        file.write_all(&vec![0; 100_000]).unwrap();
        file.rewind().unwrap();
        let (mut read, mut told) = (Digest::default(), Digest::default());
        assert_eq!(read.read(&mut file, u64::MAX, || true).unwrap(), 100_003);
        told.update(b"abc");
        told.zeros(100_000);
        assert_eq!(read.value(), told.value());
        assert!(read.read(&mut file, 1, || false).is_err());
    }
}
