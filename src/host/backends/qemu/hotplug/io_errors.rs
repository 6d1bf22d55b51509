//! Disk requests that QEMU could not complete for a VM: reported when they are new, and cleared when the VM
//! continues or the disk is removed.
//!
//! ```text
//!            BLOCK_IO_ERROR; or, for a VM that is stopped by an error,
//!            query-block when the connection begins
//!  nothing ────────────────────────────────────────────────────────▶ noted ──▶ reported, the same error every 10 s at most
//!     ▲                                                                 │
//!     └── RESUME, RESET, SHUTDOWN, DEVICE_DELETED, another connection ──┘
//! ```
//!
//! [`Noted`] is pure; [`Vm::watch_io`] acts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::super::Change;
use super::super::failed::Failed;
use super::super::link::Notice;
use super::Vm;
use super::seen::{self, Seen};
use crate::wire::proto::v1::{IoError, IoOperation};

/// Minimum time between two reports of the same error of a disk.
const AGAIN: Duration = Duration::from_secs(10);
/// Maximum number of disks whose errors are kept.
const MOST: usize = 16;

/// Errors of one VM, by block node.
#[derive(Debug, Default)]
struct Noted(BTreeMap<String, Note>);

#[derive(Debug)]
struct Note {
    failed: Failed,
    count: u64,
    last: SystemTime,
    /// Time of the last report.
    told: Instant,
}

impl Noted {
    /// Records an error; returns whether it is to be reported now.
    fn note(&mut self, failed: Failed, last: SystemTime, now: Instant) -> bool {
        if let Some(note) = self.0.get_mut(&failed.node) {
            note.count += 1;
            note.last = last;
            let is_news = note.failed != failed || now.saturating_duration_since(note.told) >= AGAIN;
            if is_news {
                (note.failed, note.told) = (failed, now);
            }
            return is_news;
        }
        let has_room = self.0.len() < MOST;
        if has_room {
            self.0.insert(failed.node.clone(), Note { failed, count: 1, last, told: now });
        }
        has_room
    }

    /// Drops the errors of the nodes that `keep` rejects; returns whether there were any.
    fn forget(&mut self, keep: impl Fn(&str) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|node, _| keep(node));
        self.0.len() < before
    }

    /// Replaces all errors by those of the nodes that have stopped a VM; returns whether there is a change to
    /// report.
    fn begin(&mut self, failed: Vec<(String, bool)>, last: SystemTime, now: Instant) -> bool {
        let had_any = self.forget(|_| false);
        for (node, no_space) in failed {
            let operation = if no_space { IoOperation::Write } else { IoOperation::Unspecified };
            self.note(Failed { node, operation, no_space, stopped: true, reason: String::new() }, last, now);
        }
        had_any || !self.0.is_empty()
    }

    /// Converts the errors for the report.
    fn errors(&self, seen: &Seen) -> Vec<IoError> {
        let error = |note: &Note| {
            let found = seen.disks.iter().find(|disk| disk.node.name == note.failed.node);
            let serial = found.map(|disk| seen.describe(disk).serial).filter(|serial| !serial.is_empty());
            IoError {
                disk: serial.unwrap_or_else(|| note.failed.node.clone()),
                file: found.map(|disk| disk.node.file.clone()).unwrap_or_default(),
                operation: note.failed.operation.into(),
                no_space: note.failed.no_space,
                stopped: note.failed.stopped,
                reason: note.failed.reason.clone(),
                count: note.count,
                time: Some(note.last.into()),
            }
        };
        self.0.values().map(error).collect()
    }
}

impl Vm {
    /// Reports failed disk requests, until the monitor ends or the receiver is dropped.
    pub async fn watch_io(self: Arc<Self>, changes: mpsc::Sender<Change>) {
        let (mut notices, mut noted) = (self.link.notices(), Noted::default());
        loop {
            let notice = match notices.recv().await {
                Ok(notice) => Some(notice),
                Err(RecvError::Lagged(_)) => None,
                Err(RecvError::Closed) => return,
            };
            let is_news = match notice {
                Some(Notice::Failed(failed)) => noted.note(failed, SystemTime::now(), Instant::now()),
                Some(Notice::BeginsAnew) => noted.forget(|_| false),
                Some(Notice::DeviceDeleted(device)) => noted.forget(|node| node != device),
                Some(Notice::Disconnected | Notice::UnplugRefused(_)) => continue,
                Some(Notice::Connected) | None => {
                    let failed = seen::failed(&self.link).await.unwrap_or_default();
                    noted.begin(failed, SystemTime::now(), Instant::now())
                }
            };
            if !is_news {
                continue;
            }
            // If QEMU cannot be queried, the disk is reported under the name of its block node.
            let seen = if noted.0.is_empty() { Ok(Seen::default()) } else { Seen::read(&self.link).await };
            let seen = seen.unwrap_or_default();
            let change = Change::IoErrors { name: self.name.clone(), errors: noted.errors(&seen) };
            if changes.send(change).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(node: &str, action: &str) -> Failed {
        let (operation, reason) = (IoOperation::Write, "No space left on device".to_owned());
        Failed { node: node.to_owned(), operation, no_space: true, stopped: action == "stop", reason }
    }

    #[test]
    fn errors_that_are_alike_are_told_now_and_then() {
        let (mut noted, now) = (Noted::default(), Instant::now());
        let time = SystemTime::UNIX_EPOCH;
        assert!(noted.note(failed("a", "report"), time, now));
        assert!(!noted.note(failed("a", "report"), time, now + AGAIN / 2));
        assert!(noted.note(failed("a", "stop"), time, now + AGAIN / 2), "it is another one");
        assert!(noted.note(failed("b", "stop"), time, now + AGAIN / 2), "of another disk");
        assert!(noted.note(failed("a", "stop"), time, now + AGAIN * 2));
        let counts: Vec<_> = noted.errors(&Seen::default()).iter().map(|error| error.count).collect();
        assert_eq!(counts, [4, 1]);
        assert!(noted.forget(|node| node != "a") && !noted.forget(|node| node != "a"));
        assert!((0..MOST - 1).all(|at| noted.note(failed(&at.to_string(), "stop"), time, now)));
        assert!(!noted.note(failed("c", "stop"), time, now), "they are bounded");
        assert!(noted.begin(vec![], time, now) && noted.0.is_empty());
        assert!(!noted.begin(vec![], time, now), "they were none before");
        assert!(noted.begin(vec![("a".to_owned(), true)], time, now));
        assert!(noted.note(failed("a", "stop"), time, now), "then it is told why");
    }
}
