//! Limits on the resources that one guest may use: every limit that the settings can change, with its default.
//!
//! To add one: a field here, its key in `config::host::limits`, its line in the README. A limit that nobody needs
//! to change stays a constant where it is used.

use std::time::Duration;

use crate::events::state::Bounds;
use crate::wire::weigh::List;

/// Limits on one guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message of the guest.
    pub message_bytes: usize,
    /// Bytes per second on each of its streams in the long run. A burst may be eight times as large.
    pub bytes_per_second: u32,
    /// Events per second in the long run.
    pub events_per_second: u32,
    /// Events in a burst.
    pub event_burst: u32,
    /// Events that are kept in the history.
    pub events_kept: usize,
    /// Bytes of the events in the history.
    pub history_bytes: usize,
    /// Bytes of memory of the guest's state. What exceeds them is left out of the state.
    pub state_bytes: usize,
    /// Network interfaces of its state.
    pub interfaces: usize,
    /// Addresses of one interface.
    pub addresses: usize,
    /// Mounted file systems of its state.
    pub file_systems: usize,
    /// Sessions of users in its state.
    pub users: usize,
    /// Disks of its state.
    pub disks: usize,
    /// Calls per second that the guest may make in the long run. A burst may be four times as large.
    pub calls_per_second: u32,
    /// Concurrent calls of the guest; the same number again may be about volumes, and about the cluster.
    pub open_calls: u32,
    /// Time for which the guest may read nothing while data for it is waiting.
    pub unread: Duration,
    /// Time for which a guest is asked again to release a disk that it reports as busy.
    pub busy: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes: 256 * 1024,
            bytes_per_second: 256 * 1024,
            events_per_second: 64,
            event_burst: 1024,
            events_kept: 128,
            history_bytes: 64 * 1024,
            state_bytes: 1024 * 1024,
            interfaces: 256,
            addresses: 64,
            file_systems: 1024,
            users: 256,
            disks: 1024,
            calls_per_second: 50,
            open_calls: 16,
            unread: Duration::from_secs(8),
            busy: Duration::from_secs(60),
        }
    }
}

impl Bounds for Limits {
    fn of(&self, list: List) -> usize {
        match list {
            List::Interfaces => self.interfaces,
            List::Addresses => self.addresses,
            List::FileSystems => self.file_systems,
            List::Users => self.users,
            List::Disks => self.disks,
        }
    }

    fn state_bytes(&self) -> usize {
        self.state_bytes
    }
}

impl Limits {
    /// Returns the size in bytes of a burst on one stream.
    pub fn byte_burst(&self) -> usize {
        let seconds = usize::try_from(self.bytes_per_second).unwrap_or(usize::MAX).saturating_mul(8);
        seconds.max(self.message_bytes.saturating_mul(4))
    }
}
