//! What one guest may cost: every bound that settings can change, with its default.
//!
//! To add one: a field here, its key in `config::host::limits`, its line in the README. A bound that nobody
//! needs to change stays a constant where it is used.

use std::time::Duration;

use crate::events::state::Bounds;
use crate::wire::weigh::List;

/// The bounds of one guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message of the guest.
    pub message_bytes: usize,
    /// Bytes per second on each of its streams in the long run; eight times as many may come at once.
    pub bytes_per_second: u32,
    /// Events per second in the long run.
    pub events_per_second: u32,
    /// Events that may come at once.
    pub event_burst: u32,
    /// Events that are remembered.
    pub events_kept: usize,
    /// Bytes that the remembered events may take.
    pub history_bytes: usize,
    /// Bytes of memory that its state may take; what would be more is left out of it.
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
    /// Calls per second that the guest may make in the long run; four times as many may come at once.
    pub calls_per_second: u32,
    /// Calls of the guest that may be open at a time; as many about volumes may be beside them.
    pub open_calls: u32,
    /// How long it may read nothing while something waits for it to read.
    pub unread: Duration,
    /// How long it is asked again for a disk that it says it is busy with.
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
    /// Bytes that may come at once on one stream.
    pub fn byte_burst(&self) -> usize {
        let seconds = usize::try_from(self.bytes_per_second).unwrap_or(usize::MAX).saturating_mul(8);
        seconds.max(self.message_bytes.saturating_mul(4))
    }
}
