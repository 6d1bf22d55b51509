//! Work that blocks, beside the event loop.

use std::panic::resume_unwind;

use tokio::task::spawn_blocking;

/// Does `work`, which may block, on a thread for that. A panic in it is one here.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The event loop is being taken down, and whoever waits with it.
            Err(_) => std::future::pending().await,
        },
    }
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
