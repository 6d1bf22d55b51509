//! Signals that this program handles itself, instead of being ended by them.

use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Handled signals, each with its meaning.
pub struct Signals<T>(Vec<(T, Signal)>);

impl<T: Copy> Signals<T> {
    /// Starts to handle these signals.
    ///
    /// # Errors
    /// Fails if handlers cannot be installed.
    pub fn hear(kinds: impl IntoIterator<Item = (T, SignalKind)>) -> io::Result<Self> {
        let signals = kinds.into_iter().map(|(meaning, kind)| Ok((meaning, signal(kind)?)));
        signals.collect::<io::Result<_>>().map(Self)
    }

    /// Waits for the next signal, and returns its meaning.
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
