//! Work that blocks, beside the event loop.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::{JoinError, spawn_blocking};

/// Work that has begun, or waits for a thread, and has not ended.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Returns how many pieces of blocking work are running or queued. Blocking work cannot be cancelled, not even
/// when no caller waits for it, and there are at most 512 threads for it. A caller that can limit the work
/// that it starts checks this count first.
pub fn under_way() -> usize {
    UNDER_WAY.load(Ordering::Relaxed)
}

struct Counted;

impl Counted {
    fn begin() -> Self {
        UNDER_WAY.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work`, which may block, on a thread of the blocking pool. If it panics, so does the caller.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match attempt(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The event loop is shutting down, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}

/// Runs `work` on a thread of the blocking pool without waiting for it; where there is no event loop, runs it
/// at once.
pub fn let_go(work: impl FnOnce() + Send + 'static) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return work() };
    let counted = Counted::begin();
    drop(runtime.spawn_blocking(move || {
        work();
        drop(counted);
    }));
}

/// As [`run`], and a panic is an error.
///
/// # Errors
/// If the work panicked, or the event loop is being taken down.
pub async fn attempt<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    // Boxed, and without a result of its own: so the program has the event loop's code for a task once for all work, and
    // not once for each kind.
    let result = Arc::new(Mutex::new(None));
    let place = Arc::clone(&result);
    let counted = Counted::begin();
    let work: Box<dyn FnOnce() + Send> = Box::new(move || {
        let done = work();
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        drop(counted);
    });
    spawn_blocking(work).await?;
    let done = result.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(done.unwrap_or_else(|| unreachable!("work that ended has a result")))
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn the_result_comes_back() {
        assert_eq!(super::run(|| 7).await, 7);
    }

    #[tokio::test]
    #[should_panic(expected = "as it is here")]
    async fn a_panic_stays_one() {
        super::run(|| panic!("as it is here")).await;
    }
}
