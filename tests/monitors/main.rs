//! The monitors beside what they watch: links and mounts in namespaces of their own, logind on a D-Bus daemon
//! of their own.

#![allow(clippy::disallowed_methods, clippy::expect_used, clippy::unwrap_used)]

#[path = "../fixtures/bus_daemon.rs"]
mod bus_daemon;
mod churn;
mod disks;
mod fullness;
mod health;
#[path = "../fixtures/lay_out.rs"]
mod lay_out;
mod links;
mod logind;
mod mounts;
#[path = "../qga/namespace.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod namespace;
mod release;
#[path = "../soak.rs"]
mod soak;

use std::future::Future;
use std::time::Duration;

use guestlet::guest::Guest;
use guestlet::guest::events::{Kind, News, Watcher};
use guestlet::guest::monitor::{self, Settings};
use tokio_util::sync::CancellationToken;

use namespace::{is_outside_of, run};

/// Runs one monitor while `test` does.
async fn beside(guest: &Guest, monitor: &str, settings: Settings, test: impl Future<Output = ()>) {
    let shutdown = CancellationToken::new();
    let (_, mut work) =
        monitor::all(guest, settings, &shutdown).into_iter().find(|(name, _)| *name == monitor).unwrap();
    tokio::select! {
        () = &mut work => panic!("the monitor of {monitor} ended"),
        () = test => {}
    }
    shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(1), work).await.expect("the monitor does not end");
}

/// The next event.
async fn event(watcher: &mut Watcher) -> Kind {
    loop {
        let next = tokio::time::timeout(Duration::from_secs(30), watcher.next());
        match next.await.expect("no event") {
            News::Event(recorded) => return recorded.event.clone(),
            News::Tick(_) => {}
            News::Restart(opening) => panic!("{opening:?}"),
        }
    }
}

/// Nothing happens for a while.
async fn silence(watcher: &mut Watcher) {
    let next = tokio::time::timeout(Duration::from_millis(800), watcher.next()).await;
    assert!(next.is_err(), "{next:?}");
}

/// Nothing happens for a while, and wakes nobody.
async fn idle(watcher: &mut Watcher) {
    silence(watcher).await;
    let before = wakeups();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let woken = wakeups() - before;
    // The test's own sleep, and the event loop's stops on the way to its end.
    assert!(woken <= 4, "{woken} wakeups while nothing happens");
}

/// How often this thread has slept and was woken so far.
fn wakeups() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}
