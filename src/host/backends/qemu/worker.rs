//! Does work that blocks in few places, such as that of a pool one piece after the other, so that a file system that hangs takes
//! as many threads and nobody else's time.
//!
//! ```text
//!           ┌─────────── no longer than `patience` in all ───────────┐
//!  run ───▶ waits for its turn ───▶ on a thread ───▶ done
//!   │            (QUEUE at most)         └── not in time: the caller is told so, and the work goes on; until it ends
//!   └── refused, while work goes on in all places that was not done in time ◀──┘
//! ```
//!
//! Work that has not begun when its caller is told so is never begun.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sys::blocking;

/// Pieces of work that wait.
const QUEUE: usize = 256;

/// Does the work of one pool, or of another kind.
#[derive(Debug)]
pub struct Worker {
    turn: Arc<Semaphore>,
    places: usize,
    /// When what is under way began.
    began: Mutex<BTreeMap<u64, Instant>>,
    /// How much has begun.
    count: AtomicU64,
    waiting: AtomicUsize,
    patience: Mutex<Duration>,
}

/// Why work was not done, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Late {
    /// Its file system takes too long.
    #[error("its file system has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// Too much is to be done before.
    #[error("too many calls wait for it")]
    Busy,
}

struct Waiting<'w>(&'w AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Work that is under way.
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
    /// One whose callers wait for so long, and that does one piece of work at a time.
    pub fn new(patience: Duration) -> Self {
        Self::with_places(patience, 1)
    }

    /// One whose callers wait for so long, and that does so many pieces of work at a time.
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

    /// From now on its callers wait for so long.
    pub fn wait_for(&self, patience: Duration) {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner) = patience;
    }

    fn patience(&self) -> Duration {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long work has been under way in all places, if that is too long.
    pub fn silent(&self) -> Option<Late> {
        let began = self.began();
        let last = began.values().max().filter(|_| began.len() >= self.places)?;
        Some(last.elapsed()).filter(|since| *since >= self.patience()).map(Late::Silent)
    }

    /// Does `work`, which may block.
    ///
    /// # Errors
    /// If it is not done in time. It may have begun, and goes on then.
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
