//! Standard streams, which may block, and which others may have made ones that do not wait.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

/// The pause before a stream that others have made one that does not wait is tried again.
const BUSY: Duration = Duration::from_millis(10);

/// A standard stream without a buffer, all of whose errors are told.
///
/// # Errors
/// If there is no room for another descriptor.
pub fn stream(stream: impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

/// Writes everything.
///
/// # Errors
/// As the stream.
pub fn write(mut stream: impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
            Err(error) => may_try_again(error)?,
        }
    }
    Ok(())
}

/// Waits a little if an error is none of the stream's.
///
/// # Errors
/// If it is one.
pub fn may_try_again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::Interrupted => {}
        io::ErrorKind::WouldBlock => std::thread::sleep(BUSY),
        _ => return Err(error),
    }
    Ok(())
}
