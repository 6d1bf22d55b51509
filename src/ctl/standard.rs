//! Standard streams. They may block, and other processes may have switched them to non-blocking mode.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

/// Pause before the next attempt on a stream that others have switched to non-blocking mode.
const BUSY: Duration = Duration::from_millis(10);

/// Returns an unbuffered standard stream that reports all of its errors.
///
/// # Errors
/// Fails if no further descriptor can be opened.
pub fn stream(stream: impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

/// Writes all bytes.
///
/// # Errors
/// The errors of the stream.
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

/// Waits a little after an error that is only temporary.
///
/// # Errors
/// Fails with the error if it is one of the stream.
pub fn may_try_again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::Interrupted => {}
        io::ErrorKind::WouldBlock => std::thread::sleep(BUSY),
        _ => return Err(error),
    }
    Ok(())
}
