//! The first byte of a stream, by which one finds out which protocol it is going to be.

use std::io;

use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::transport::Stream;

/// Waits for the first byte, which stays in the stream. There is no deadline.
///
/// # Errors
/// If the stream ends before it, or breaks.
pub async fn wait<S: Stream>(stream: S) -> io::Result<(u8, BufReader<S>)> {
    // Room for that byte alone: all that follows goes past this buffer.
    let mut stream = BufReader::with_capacity(1, stream);
    let first = *stream.fill_buf().await?.first().ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((first, stream))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn the_first_byte_is_told_and_stays() {
        let (near, mut far) = tokio::io::duplex(64);
        far.write_all(b"hello").await.unwrap();
        let (first, mut stream) = wait(near).await.unwrap();
        assert_eq!(first, b'h');
        let mut all = [0; 5];
        stream.read_exact(&mut all).await.unwrap();
        assert_eq!(&all, b"hello");
        stream.write_all(b"back").await.unwrap();
        let mut back = [0; 4];
        far.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"back");
    }

    #[tokio::test]
    async fn a_stream_that_ends_before_it_is_an_error() {
        let (near, far) = tokio::io::duplex(64);
        drop(far);
        assert_eq!(wait(near).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
