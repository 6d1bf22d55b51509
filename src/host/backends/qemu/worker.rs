//! Runs blocking work in a limited number of places, such as that of one pool in a single one. A file system
//! that hangs then blocks at most that many threads, and delays no other work.
//!
//! ```text
//!           ┌─────────── no longer than `patience` in all ───────────┐
//!  run ───▶ waits for its turn ───▶ on a thread ───▶ done
//!   │            (QUEUE at most)         └── not in time: the caller gets an error, and the work continues until it ends
//!   └── refused, while all places are taken by work that is late ◀────────────────┘
//! ```
//!
//! Work that has not begun by the time its caller gets the error is never begun.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sys::blocking;

/// Maximum number of pieces of work that wait.
const QUEUE: usize = 256;

/// Runs the work of one pool, or of another kind.
#[derive(Debug)]
pub struct Worker {
    turn: Arc<Semaphore>,
    places: usize,
    /// Start times of the work in progress.
    began: Mutex<BTreeMap<u64, Instant>>,
    /// Number of pieces of work that have begun.
    count: AtomicU64,
    waiting: AtomicUsize,
    patience: Mutex<Duration>,
}

/// Reason why work was not completed, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Late {
    /// The file system takes too long.
    #[error("its file system has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// Too much other work is waiting.
    #[error("too many calls wait for it")]
    Busy,
}

struct Waiting<'w>(&'w AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Work in progress.
struct UnderWay {
    worker: Arc<Worker>,
    number: u64,
    _turn: OwnedSemaphorePermit,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.worker.began().remove(&self.number);
    }
}

impl Worker {
    /// Creates a worker whose callers wait for at most this time, and that runs one piece of work at a time.
    pub fn new(patience: Duration) -> Self {
        Self::with_places(patience, 1)
    }

    /// Creates a worker whose callers wait for at most this time, and that runs this many pieces of work at a time.
    pub fn with_places(patience: Duration, places: usize) -> Self {
        Self {
            turn: Arc::new(Semaphore::new(places)),
            places,
            began: Mutex::default(),
            count: AtomicU64::default(),
            waiting: AtomicUsize::default(),
            patience: Mutex::new(patience),
        }
    }

    fn began(&self) -> MutexGuard<'_, BTreeMap<u64, Instant>> {
        self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the time that callers wait from now on.
    pub fn wait_for(&self, patience: Duration) {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner) = patience;
    }

    fn patience(&self) -> Duration {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how long work has been in progress in all places, if that is too long.
    pub fn silent(&self) -> Option<Late> {
        let began = self.began();
        let last = began.values().max().filter(|_| began.len() >= self.places)?;
        Some(last.elapsed()).filter(|since| *since >= self.patience()).map(Late::Silent)
    }

    /// Runs `work`, which may block.
    ///
    /// # Errors
    /// If it is not completed in time. It may have begun, and then continues.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Late> {
        if let Some(late) = self.silent() {
            return Err(late);
        }
        let waiting = Waiting(&self.waiting);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            return Err(Late::Busy);
        }
        let asked = Instant::now();
        let done = async {
            let turn = Arc::clone(&self.turn).acquire_owned().await.map_err(|_| Late::Busy)?;
            drop(waiting);
            let number = self.count.fetch_add(1, Ordering::Relaxed);
            self.began().insert(number, Instant::now());
            let under_way = UnderWay { worker: Arc::clone(self), number, _turn: turn };
            Ok(blocking::run(move || {
                let _under_way = under_way;
                work()
            })
            .await)
        };
        match tokio::time::timeout(self.patience(), done).await {
            Ok(done) => done,
            Err(_) => Err(self.silent().unwrap_or(Late::Silent(asked.elapsed()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(200);

    #[tokio::test(flavor = "multi_thread")]
    async fn work_that_hangs_takes_one_thread_and_is_not_waited_for() {
        let worker = Arc::new(Worker::new(PATIENCE));
        assert_eq!(worker.run(|| 7).await, Ok(7));
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let begun = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&begun);
        let hanging = move || {
            count.fetch_add(1, Ordering::SeqCst);
            end.recv().unwrap_err();
        };
        let counts = || {
            let begun = Arc::clone(&begun);
            worker.run(move || begun.fetch_add(1, Ordering::SeqCst))
        };
        let (hung, behind) = tokio::join!(worker.run(hanging), counts());
        for late in [hung.map(drop), behind.map(drop)] {
            assert!(matches!(late, Err(Late::Silent(since)) if since >= PATIENCE), "{late:?}");
        }
        let asked = Instant::now();
        assert!(matches!(counts().await, Err(Late::Silent(_))));
        assert!(asked.elapsed() < PATIENCE, "it is refused at once");
        assert_eq!(begun.load(Ordering::SeqCst), 1, "what was given up is not done later");
        drop(ends);
        while worker.silent().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(counts().await, Ok(1));
        assert_eq!(worker.waiting.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn those_that_wait_are_bounded() {
        let worker = Arc::new(Worker::new(PATIENCE));
        let _turn = Arc::clone(&worker.turn).acquire_owned().await.unwrap();
        let mut calls: Vec<_> = (0..QUEUE).map(|_| Box::pin(worker.run(|| ()))).collect();
        for call in &mut calls {
            assert!(futures_poll(call.as_mut()).is_none());
        }
        assert_eq!(worker.run(|| ()).await, Err(Late::Busy));
        drop(calls);
        assert_eq!(worker.waiting.load(Ordering::Relaxed), 0);
    }

    fn futures_poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.poll(&mut context) {
            std::task::Poll::Ready(done) => Some(done),
            std::task::Poll::Pending => None,
        }
    }
}
