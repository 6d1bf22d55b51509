//! Watches this machine and reports changes to the [`Hub`](crate::guest::events::Hub). Each monitor sleeps until
//! the kernel or logind reports a change; things whose changes they do not report are examined at ticks of the
//! agent.
//!
//! ```text
//! source says "changed" ──▶ wait until it is quiet ──▶ look at everything ──▶ report differences
//! ```
//!
//! A monitor subscribes before it looks for the first time, so that no change is missed. A monitor whose source
//! this machine lacks logs that once, and then does nothing.
//!
//! To add one: a file with what it watches, its decisions pure, and a line in [`all`].

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::guest::Guest;

mod clock;
pub mod disks;
pub mod fullness;
mod health;
pub mod links;
mod logind;
mod mounts;

/// Pause that ends a series of changes: changes that follow each other more closely count as one.
const QUIET: Duration = Duration::from_millis(50);
/// Maximum delay of a report, however often changes follow each other.
const LONGEST: Duration = Duration::from_millis(500);

/// Settings of the monitors.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name patterns of network interfaces that are not reported to the host; see [`links::IGNORED`].
    pub ignored_links: Vec<String>,
    /// D-Bus address of the system bus; `None` for the usual one.
    pub bus_address: Option<String>,
    /// Settings for examining file systems.
    pub fullness: fullness::Settings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            ignored_links: links::IGNORED.map(str::to_owned).to_vec(),
            bus_address: None,
            fullness: fullness::Settings::default(),
        }
    }
}

/// Work of a monitor; ends when the shutdown begins.
pub type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns all monitors, each with the name of what it watches. Their first looks are made one after the other, so
/// that clients of the agent are served in between.
pub fn all(guest: &Guest, settings: Settings, shutdown: &CancellationToken) -> Vec<(&'static str, Work)> {
    let Settings { ignored_links, bus_address, fullness } = settings;
    let monitors: [(_, Work); 7] = [
        ("links", rest_if_missing("links", links::watch(guest.clone(), ignored_links), shutdown)),
        ("mounts", rest_if_missing("mounts", mounts::watch(guest.clone()), shutdown)),
        ("disks", rest_if_missing("disks", disks::watch(guest.clone()), shutdown)),
        ("logind", rest_if_missing("logind", logind::watch(guest.clone(), bus_address.clone()), shutdown)),
        ("health", rest_if_missing("health", health::watch(guest.clone(), bus_address), shutdown)),
        (
            "fullness",
            rest_if_missing("full file systems", fullness::watch(guest.clone(), fullness), shutdown),
        ),
        ("clock", rest_if_missing("the clock", clock::watch(guest.clone()), shutdown)),
    ];
    monitors.into_iter().enumerate().map(|(place, (name, work))| (name, in_turn(place, work))).collect()
}

/// Turns of the event loop after which a client that has been waiting since before the start is accepted, read and
/// answered.
const CLIENTS: usize = 4;

/// Delays work until waiting clients were served and `place` other monitors have begun.
fn in_turn(place: usize, work: Work) -> Work {
    Box::pin(async move {
        for _ in 0..CLIENTS + place {
            yield_now().await;
        }
        work.await;
    })
}

fn rest_if_missing<E: fmt::Display + Send + 'static>(
    subject: &'static str,
    watch: impl Future<Output = Result<Infallible, E>> + Send + 'static,
    shutdown: &CancellationToken,
) -> Work {
    let shutdown = shutdown.clone();
    Box::pin(async move {
        if let Some(Err(error)) = shutdown.run_until_cancelled(watch).await {
            tracing::warn!("cannot watch {subject}: {error}");
            shutdown.cancelled().await;
        }
    })
}

/// Source that reports that something changed, but not what.
trait Source: Sync {
    /// Completes when something has changed. All changes until then count as one.
    fn changed(&self) -> impl Future<Output = io::Result<()>> + Send;

    /// Returns whether something has changed since the last reported change.
    fn has_changed(&self) -> io::Result<bool>;
}

/// Calls `look` at once, and again after every change; after a failure, at the next tick.
async fn follow(
    guest: &Guest,
    source: &impl Source,
    mut look: impl FnMut() -> io::Result<()> + Send,
) -> io::Result<Infallible> {
    loop {
        match look() {
            Ok(()) => settled(source).await?,
            Err(error) => {
                tracing::debug!("cannot examine what changed: {error}");
                guest.events.next_tick().await;
            }
        }
    }
}

/// Waits for a change, and then until no more follow or the maximum delay has passed. However many changes arrive,
/// only the pauses wake the agent.
async fn settled(source: &impl Source) -> io::Result<()> {
    source.changed().await?;
    let begun = Instant::now();
    loop {
        sleep(QUIET).await;
        if !source.has_changed()? || begun.elapsed() >= LONGEST {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt as _;
    use tokio::sync::Notify;

    use super::*;
    use crate::sys::root::Root;

    #[derive(Default)]
    struct Bell(Notify);

    impl Source for Bell {
        async fn changed(&self) -> io::Result<()> {
            self.0.notified().await;
            Ok(())
        }

        fn has_changed(&self) -> io::Result<bool> {
            Ok(self.0.notified().now_or_never().is_some())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_one_change_and_a_stream_without_end_several() {
        let (guest, bell, looks) = (Guest::default(), Bell::default(), AtomicUsize::new(0));
        let look = || {
            looks.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let ring = async {
            let looked = || looks.load(Ordering::Relaxed);
            sleep(QUIET).await;
            assert_eq!(looked(), 1, "the first look");
            for _ in 0..1000 {
                bell.0.notify_one();
            }
            sleep(QUIET * 3).await;
            assert_eq!(looked(), 2, "a burst");
            for _ in 0..400 {
                bell.0.notify_one();
                sleep(QUIET / 10).await;
            }
            sleep(QUIET * 3).await;
            assert!((6..=7).contains(&looked()), "2 s without rest, {} looks", looked());
        };
        tokio::select! {
            ended = follow(&guest, &bell, look) => panic!("{ended:?}"),
            () = ring => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_looked_at_is_looked_at_again_with_the_next_tick() {
        let (guest, bell) = (Guest::default(), Bell::default());
        let outcomes = Mutex::new(vec![Ok(()), Err(io::Error::other("no memory"))]);
        let look = || outcomes.lock().unwrap().pop().unwrap();
        let tick = async {
            sleep(LONGEST).await;
            assert_eq!(outcomes.lock().unwrap().len(), 1);
            guest.events.tick();
            sleep(LONGEST).await;
            assert_eq!(outcomes.lock().unwrap().len(), 0);
        };
        tokio::select! {
            ended = follow(&guest, &bell, look) => panic!("{ended:?}"),
            () = tick => {}
        }
    }

    #[tokio::test]
    async fn a_monitor_without_its_source_rests_until_the_shutdown() {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
        let shutdown = CancellationToken::new();
        let settings = Settings { bus_address: Some("unix:path=/nowhere".to_owned()), ..Settings::default() };
        let mut resting = all(&guest, settings, &shutdown);
        resting.retain(|(name, _)| ["mounts", "logind"].contains(name));
        for (name, work) in &mut resting {
            assert!(tokio::time::timeout(QUIET, work).await.is_err(), "{name}");
        }
        shutdown.cancel();
        for (_, work) in resting {
            work.await;
        }
        assert_eq!(guest.events.state().0.sequence, 0);
    }
}
