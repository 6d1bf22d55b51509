//! Asks the server of a share whether it answers. It may be dead, and whoever asks it then waits for minutes, or for ever: so only
//! a thread does, which is waited for only so long, and there is one for each share at a time.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use tokio::time::{Instant, sleep, timeout_at};

use crate::guest::Guest;
use crate::guest::pod_volumes::{Thing, Turn};
use crate::sys::blocking;
use crate::sys::mountinfo::Mount;

/// How often is looked whether a thread that asks has come back.
const POLL: Duration = Duration::from_millis(100);

/// The turn of whoever asks the server of a share; none while somebody does.
pub(in crate::guest::pod_volumes) fn begin(guest: &Guest, mount: &Mount) -> Option<Turn> {
    let server = Thing::Server(mount.device, mount.source.clone());
    guest.pod_volumes.turns.take(server, "its server is asked").ok()
}

/// Whether the server of a share that is mounted answers so soon. A thread that waits for it since before is waited for first: what
/// it waits for may be over.
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
        // Of other refusals it is the server that refuses.
        Ok(Err(error)) => !error.raw_os_error().map(Errno::from_raw).is_some_and(is_of_a_dead_server),
        Err(_) => false,
    }
}

/// Whether this comes of a server that is not there, or not the one that it was.
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
