//! Stream to a guest for data that users have requested, of any size. It is not cut for the amount of data, as
//! that of a session is ([`metered`](super::metered)). Only the number of reads per second is limited, because
//! each small piece costs a wakeup.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::host::half::Half;
use crate::host::rate::Allowance;
use crate::transport::Stream;

/// Limits on reads: per second in the long run, and in a burst.
const PIECES_PER_SECOND: f64 = 20_000.0;
const PIECES_AT_ONCE: f64 = 20_000.0;
/// Pause after which reading continues.
const LOOK: Duration = Duration::from_millis(2);

/// Paced stream.
#[derive(Debug)]
pub struct Paced<S> {
    stream: S,
    half: Arc<Half>,
    pieces: Allowance,
    rest: Option<Pin<Box<Sleep>>>,
}

impl<S: Stream> Paced<S> {
    /// Paces `stream`, and counts its bytes for the metrics of this host half.
    pub fn new(stream: S, half: Arc<Half>) -> Self {
        let pieces = Allowance::new(Instant::now(), PIECES_AT_ONCE, PIECES_PER_SECOND);
        Self { stream, half, pieces, rest: None }
    }
}

impl<S: Stream> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(rest) = &mut self.rest {
            ready!(rest.as_mut().poll(context));
            self.rest = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = buffer.filled().len() - before;
        self.half.metrics.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
        if !self.pieces.take(Instant::now(), 1.0) {
            self.rest = Some(Box::pin(tokio::time::sleep(LOOK)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: Stream> Paced<S> {
    fn count(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.half.metrics.bytes_sent.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
    }
}

impl<S: Stream> AsyncWrite for Paced<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.count(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.count(&written);
        written
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn much_is_read_and_many_small_pieces_are_read_slowly() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let half = Arc::new(Half::new("host".into()));
        let mut near = Paced::new(near, Arc::clone(&half));
        let begun = Instant::now();
        let mut pieces = 0u32;
        while begun.elapsed() < Duration::from_secs(2) && pieces < 200_000 {
            far.write_all(b"x").await.unwrap();
            near.read_u8().await.unwrap();
            pieces += 1;
        }
        // At once, and for two seconds; each pause lets some more through.
        assert!((40_000..=61_000).contains(&pieces), "{pieces}");
        let received = half.metrics.bytes_received.load(Ordering::Relaxed);
        assert_eq!(received, u64::from(pieces));
    }
}
