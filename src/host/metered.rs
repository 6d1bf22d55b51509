//! A stream to a guest whose bytes are counted, and which breaks when the guest sends more than allowed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::half::Half;
use super::limits::Limits;
use super::rate::Allowance;
use crate::transport::Stream;

/// The stream.
#[derive(Debug)]
pub struct Metered<S> {
    stream: S,
    half: Arc<Half>,
    allowance: Allowance,
    gate: Gate,
}

/// Whether a stream was cut because the guest sent too much.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    /// It was.
    pub fn is_shut(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S: Stream> Metered<S> {
    /// Counts what goes through `stream`.
    pub fn new(stream: S, half: Arc<Half>, limits: &Limits) -> (Self, Gate) {
        #[allow(clippy::cast_precision_loss, reason = "nobody allows that many bytes")]
        let burst = limits.byte_burst() as f64;
        let allowance = Allowance::new(Instant::now(), burst, limits.bytes_per_second.into());
        let gate = Gate::default();
        (Self { stream, half, allowance, gate: gate.clone() }, gate)
    }
}

impl<S: Stream> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = buffer.filled().len() - before;
        self.half.metrics.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
        #[allow(clippy::cast_precision_loss, reason = "no buffer is that large")]
        if bytes > 0 && !self.allowance.take(Instant::now(), bytes as f64) {
            self.gate.0.store(true, Ordering::Relaxed);
            return Poll::Ready(Err(io::Error::other("the guest sends too many bytes")));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: Stream> Metered<S> {
    fn count(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.half.metrics.bytes_sent.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
        written
    }
}

impl<S: Stream> AsyncWrite for Metered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.count(written)
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
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn bytes_are_counted_and_too_many_break_the_stream() {
        let half = Arc::new(Half::new("host".into()));
        let limits = Limits { message_bytes: 1, bytes_per_second: 1, ..Limits::default() };
        let (near, mut far) = tokio::io::duplex(64);
        let (mut near, gate) = Metered::new(near, Arc::clone(&half), &limits);
        near.write_all(b"hello").await.unwrap();
        far.write_all(b"12345678").await.unwrap();
        assert_eq!(near.read(&mut [0; 32]).await.unwrap(), 8);
        assert!(!gate.is_shut());
        far.write_all(b"123").await.unwrap();
        assert!(near.read(&mut [0; 32]).await.is_err());
        assert!(gate.is_shut());
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!((count(&half.metrics.bytes_sent), count(&half.metrics.bytes_received)), (5, 11));
    }
}
