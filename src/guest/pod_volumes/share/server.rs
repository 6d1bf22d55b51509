//! Checks whether the server of a share responds. A call to a dead server blocks for minutes, or forever, so it is
//! made on a thread that is waited for only for a limited time, and by only one thread for each share.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use tokio::time::{Instant, sleep, timeout_at};

use crate::guest::Guest;
use crate::guest::pod_volumes::{Thing, Turn};
use crate::sys::blocking;
use crate::sys::mountinfo::Mount;

/// Interval of checks whether an earlier query has returned.
const POLL: Duration = Duration::from_millis(100);

/// Takes the turn to query the server of a share. Returns none while a query is running.
pub(in crate::guest::pod_volumes) fn begin(guest: &Guest, mount: &Mount) -> Option<Turn> {
    let server = Thing::Server(mount.device, mount.source.clone());
    guest.pod_volumes.turns.take(server, "its server is being queried").ok()
}

/// Returns whether the server of a mounted share responds within `patience`. An earlier query that is still
/// running is waited for first, because the server may have come back.
pub(super) async fn answers(guest: &Guest, mount: &Mount, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    let turn = loop {
        match begin(guest, mount) {
            Some(turn) => break turn,
            None if Instant::now() >= deadline => return false,
            None => sleep(POLL).await,
        }
    };
    let (effects, path) = (Arc::clone(&guest.effects), mount.path.clone());
    let asked = blocking::run(move || {
        let told = effects.usage(&path);
        drop(turn);
        told
    });
    match timeout_at(deadline, asked).await {
        Ok(Ok(_)) => true,
        // With any other error it is the server that refuses, so it responds.
        Ok(Err(error)) => !error.raw_os_error().map(Errno::from_raw).is_some_and(is_of_a_dead_server),
        Err(_) => false,
    }
}

/// Returns whether this error means that the server is unreachable, or has been replaced.
pub(super) fn is_of_a_dead_server(error: Errno) -> bool {
    const CODES: [Errno; 9] = [
        Errno::EIO,
        Errno::ESTALE,
        Errno::ETIMEDOUT,
        Errno::ECONNREFUSED,
        Errno::ECONNRESET,
        Errno::EHOSTUNREACH,
        Errno::EHOSTDOWN,
        Errno::ENETUNREACH,
        Errno::ENOTCONN,
    ];
    CODES.contains(&error)
}
