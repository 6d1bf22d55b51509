//! Stream to a guest that counts its bytes and fails when the guest sends too much: too many bytes, or too many
//! pieces, each of which costs a wakeup however small it is. This also bounds HTTP/2 frames that limits on calls
//! and events do not see (PING, SETTINGS, empty DATA). The stream fails as well when the guest does not read for
//! too long.

use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::half::Half;
use super::limits::Limits;
use super::rate::Allowance;
use crate::transport::Stream;

/// Limits on reads: per second in the long run, and in a burst. Events and calls at their limits need a tenth of
/// them.
const PIECES_PER_SECOND: f64 = 2000.0;
const PIECES_AT_ONCE: f64 = 8000.0;

/// Metered stream.
#[derive(Debug)]
pub struct Metered<S> {
    stream: S,
    half: Arc<Half>,
    bytes: Allowance,
    pieces: Allowance,
    gate: Gate,
    /// Timer that runs while data waits for the guest to read it.
    unread: Option<Pin<Box<Sleep>>>,
    /// Time after which a guest that does not read is cut off.
    longest_unread: Duration,
}

/// Reason why a guest was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Excess {
    /// The guest sent more bytes than allowed.
    #[error("the guest sends too many bytes")]
    Bytes,
    /// The guest sent more pieces than allowed, regardless of their size.
    #[error("the guest sends too many small pieces")]
    Pieces,
    /// The guest did not read although data for it was waiting.
    #[error("the guest does not read what is sent to it")]
    Unread,
}

/// Shared record of why a stream was cut; it outlives the stream.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<OnceLock<Excess>>);

impl Gate {
    /// Returns the reason why the stream was cut, if it was.
    pub fn shut(&self) -> Option<Excess> {
        self.0.get().copied()
    }
}

impl<S: Stream> Metered<S> {
    /// Meters `stream`, and returns its gate as well.
    pub fn new(stream: S, half: Arc<Half>, limits: &Limits) -> (Self, Gate) {
        #[allow(clippy::cast_precision_loss, reason = "nobody allows that many bytes")]
        let burst = limits.byte_burst() as f64;
        let now = Instant::now();
        let bytes = Allowance::new(now, burst, limits.bytes_per_second.into());
        let pieces = Allowance::new(now, PIECES_AT_ONCE, PIECES_PER_SECOND);
        let gate = Gate::default();
        let longest_unread = limits.unread;
        (Self { stream, half, bytes, pieces, gate: gate.clone(), unread: None, longest_unread }, gate)
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
        if bytes > 0 {
            let now = Instant::now();
            let excess = if !self.bytes.take(now, bytes as f64) {
                Some(Excess::Bytes)
            } else if !self.pieces.take(now, 1.0) {
                Some(Excess::Pieces)
            } else {
                None
            };
            if let Some(excess) = excess {
                return Poll::Ready(Err(self.shut(excess)));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: Stream> Metered<S> {
    fn shut(&self, excess: Excess) -> io::Error {
        // Only the first reason is kept.
        self.gate.0.get_or_init(|| excess);
        io::Error::other(excess)
    }

    /// Counts the bytes written, or the time in which none could be written.
    fn count(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(bytes)) => {
                self.half.metrics.bytes_sent.fetch_add(*bytes as u64, Ordering::Relaxed);
                self.unread = None;
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => {
                let longest = self.longest_unread;
                let unread = self.unread.get_or_insert_with(|| Box::pin(tokio::time::sleep(longest)));
                ready!(unread.as_mut().poll(context));
                return Poll::Ready(Err(self.shut(Excess::Unread)));
            }
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
        self.count(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.count(context, written)
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
        assert_eq!(gate.shut(), None);
        far.write_all(b"123").await.unwrap();
        assert!(near.read(&mut [0; 32]).await.is_err());
        assert_eq!(gate.shut(), Some(Excess::Bytes));
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!((count(&half.metrics.bytes_sent), count(&half.metrics.bytes_received)), (5, 11));
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_that_are_small_and_many_break_the_stream() {
        let (near, mut far) = tokio::io::duplex(64);
        let (mut near, gate) = Metered::new(near, Arc::new(Half::new("host".into())), &Limits::default());
        let mut read = 0;
        while gate.shut().is_none() {
            far.write_all(b"x").await.unwrap();
            read += usize::from(near.read(&mut [0; 32]).await.is_ok());
        }
        assert_eq!((read, gate.shut()), (8000, Some(Excess::Pieces)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_read_breaks_the_stream_and_a_slow_one_does_not() {
        let limits = Limits { unread: Duration::from_secs(3), ..Limits::default() };
        let (near, mut far) = tokio::io::duplex(1);
        let (mut near, gate) = Metered::new(near, Arc::new(Half::new("host".into())), &limits);
        let reading = async {
            for _ in 0..5 {
                tokio::time::sleep(limits.unread / 2).await;
                far.read_u8().await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(near.write_all(b"slowly"), reading);
        assert_eq!((written.is_ok(), gate.shut()), (true, None));
        let began = Instant::now();
        assert!(near.write_all(b"x").await.is_err());
        assert_eq!((began.elapsed(), gate.shut()), (limits.unread, Some(Excess::Unread)));
    }
}
