//! Answers that a guest has requested but does not read.
//!
//! An HTTP/2 peer can withhold flow-control window for data sent to it. Nothing then waits in the stream below,
//! where [`metered`](super::metered) would notice it, and the calls stay open forever. Therefore the body that
//! carries the answers (that of the callback) records when it is polled for its next part, which happens once the
//! guest has opened the window.
//!
//! ```text
//!  answer ──▶ waits ──all of it taken──▶ (done)
//!              ▲ │
//!         a part │ taken, and there is no next one yet
//!              │ ▼
//!             rests
//! ```

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;

/// Answers to one guest that wait for it.
#[derive(Debug)]
pub struct Unread {
    /// Time for which an answer may wait.
    longest: Duration,
    waiting: Mutex<Waiting>,
    /// Notified when an answer begins to wait and no other does.
    begun: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Time since which each answer has waited, by its number.
    since: BTreeMap<u64, Instant>,
    answers: u64,
}

impl Unread {
    /// Creates an empty set; each answer may wait for this time.
    pub fn new(longest: Duration) -> Self {
        Self { longest, waiting: Mutex::default(), begun: Notify::new() }
    }

    /// Wraps a body, which waits for the guest from now on.
    pub fn watch(self: &Arc<Self>, body: Body) -> Body {
        let number = {
            let mut waiting = self.waiting();
            waiting.answers += 1;
            waiting.answers
        };
        self.waits(number);
        Body::new(Answer { body, number, unread: Arc::clone(self) })
    }

    /// Completes when an answer has waited for longer than allowed.
    pub async fn too_long(&self) {
        loop {
            let oldest = self.waiting().since.values().min().copied();
            match oldest {
                None => self.begun.notified().await,
                Some(since) if since.elapsed() >= self.longest => return,
                Some(since) => tokio::time::sleep_until(since + self.longest).await,
            }
        }
    }

    fn waits(&self, number: u64) {
        let mut waiting = self.waiting();
        if waiting.since.is_empty() {
            self.begun.notify_one();
        }
        waiting.since.insert(number, Instant::now());
    }

    fn rests(&self, number: u64) {
        let mut waiting = self.waiting();
        waiting.since.remove(&number);
        if waiting.since.is_empty() {
            // An empty map keeps its memory, and there is one for each guest, so it is replaced.
            waiting.since = BTreeMap::new();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A panic under the lock cannot leave the map half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Body of one answer.
struct Answer {
    body: Body,
    number: u64,
    unread: Arc<Unread>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let part = Pin::new(&mut self.body).poll_frame(context);
        if part.is_ready() {
            self.unread.waits(self.number);
        } else {
            self.unread.rests(self.number);
        }
        part
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.unread.rests(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNREAD: Duration = Duration::from_secs(8);

    async fn part(body: &mut Body) -> bool {
        std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await.is_some()
    }

    async fn is_too_long(unread: &Unread, time: Duration) -> bool {
        tokio::time::timeout(time, unread.too_long()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_takes_is_told_and_one_that_has_no_next_part_is_not() {
        let unread = Arc::new(Unread::new(UNREAD));
        assert!(!is_too_long(&unread, UNREAD * 10).await, "there is none");

        let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
        let mut answer = unread.watch(Body::new(Slow(receiver)));
        assert!(!is_too_long(&unread, UNREAD / 2).await);
        assert!(is_too_long(&unread, UNREAD).await, "its first part is not asked for");

        assert!(tokio::time::timeout(UNREAD, part(&mut answer)).await.is_err(), "it has no part yet");
        assert!(!is_too_long(&unread, UNREAD * 10).await, "the guest waits, not the answer");
        sender.send(Bytes::from_static(b"part")).await.unwrap();
        assert!(part(&mut answer).await);
        assert!(is_too_long(&unread, UNREAD * 2).await, "its second part is not asked for");
        drop(answer);
        assert!(!is_too_long(&unread, UNREAD * 10).await, "it is gone");
    }

    struct Slow(tokio::sync::mpsc::Receiver<Bytes>);

    impl HttpBody for Slow {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part))))
        }
    }
}
