//! Signals that this program hears, and that do not end it by themselves.

use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Those that are heard, each with what it means.
pub struct Signals<T>(Vec<(T, Signal)>);

impl<T: Copy> Signals<T> {
    /// These are heard from now on.
    ///
    /// # Errors
    /// If they cannot be.
    pub fn hear(kinds: impl IntoIterator<Item = (T, SignalKind)>) -> io::Result<Self> {
        let signals = kinds.into_iter().map(|(meaning, kind)| Ok((meaning, signal(kind)?)));
        signals.collect::<io::Result<_>>().map(Self)
    }

    /// The meaning of the next one.
    pub async fn next(&mut self) -> T {
        std::future::poll_fn(|context| {
            for (meaning, signal) in &mut self.0 {
                if signal.poll_recv(context) == Poll::Ready(Some(())) {
                    return Poll::Ready(*meaning);
                }
            }
            Poll::Pending
        })
        .await
    }
}
