//! A stream whose first byte was read already, to find out which protocol it is going to be.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

use crate::transport::Stream;

/// The stream, with that byte before all others.
#[derive(Debug)]
pub struct Begun<S> {
    first: Option<u8>,
    stream: S,
}

/// Waits for the first byte, which stays in the stream. There is no deadline.
///
/// # Errors
/// If the stream ends before it, or breaks.
pub async fn wait<S: Stream>(mut stream: S) -> io::Result<(u8, Begun<S>)> {
    let first = stream.read_u8().await?;
    Ok((first, Begun { first: Some(first), stream }))
}

impl<S: Stream> AsyncRead for Begun<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buffer.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: Stream> AsyncWrite for Begun<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

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
