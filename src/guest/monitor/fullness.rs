//! File systems that are filling up, and those that turn read-only.
//!
//! The kernel does not report that a file system is filling up, or that an error has made it read-only. So all are
//! examined at every few ticks of the agent, which needs no wakeup of its own, and at the next tick after
//! something was mounted, unmounted or remounted. One that hangs costs a deadline, as for metrics
//! ([`crate::guest::metrics`]). Network file systems are left alone: an idle guest should cause no traffic, and an
//! automounted file system should be able to expire.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::events::{Kind, TICK};
use crate::guest::metrics::file_systems::{Probed, Prober, free, mounts};
use crate::sys::blocking;
use crate::sys::mountinfo::MountList;
use crate::sys::usage::Usage;
use crate::wire::proto::v1::{FileSystemFilling, FileSystemReadOnly, MountedFileSystem};

/// Percentage points by which the usage must fall below the limit before the file system counts as having space
/// again.
const HYSTERESIS: u32 = 5;

/// Settings for when file systems are examined, and when they count as filling up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Time between two examinations of all file systems; zero disables them.
    pub interval: Duration,
    /// Usage, in percent of the bytes or of the inodes, from which a file system counts as filling up.
    pub full_percent: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { interval: Duration::from_secs(300), full_percent: 90 }
    }
}

pub(super) async fn watch(guest: Guest, settings: Settings) -> io::Result<Infallible> {
    if settings.interval.is_zero() {
        return std::future::pending().await;
    }
    let ticks = settings.interval.as_secs().div_ceil(TICK.as_secs());
    let list = MountList::open(&guest.root)?;
    let prober = Prober::default();
    let mut known = Known::default();
    loop {
        // Wait for a tick: this does not delay the start of the agent, and limits the rate where mounts change every
        // second.
        guest.events.next_tick().await;
        let root = guest.root.clone();
        let mut found = match blocking::run(move || mounts(&root)).await {
            Ok(found) => found,
            Err(error) => {
                // Keep what was reported: nothing is known to have changed.
                tracing::debug!("cannot examine file systems: {error}");
                continue;
            }
        };
        found.retain(Probed::is_on_disks);
        let events = known.turned(&found);
        let writable = found.into_iter().filter(|one| !one.is_read_only).collect();
        let answers = prober.usages(&guest.root, writable).await;
        for event in events.into_iter().chain(known.filled(&answers, settings.full_percent)) {
            guest.events.tell(event);
        }
        let later = async {
            for _ in 1..ticks {
                guest.events.next_tick().await;
            }
        };
        tokio::select! {
            changed = list.changed() => changed?,
            () = later => {}
        }
    }
}

/// Key that identifies a file system wherever it is mounted: device number and source.
type Key = ((u32, u32), String);

fn key(probed: &Probed) -> Key {
    (probed.device, probed.source.clone())
}

/// Last reported state of each mounted file system.
#[derive(Debug, Default)]
struct Known(BTreeMap<Key, Told>);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Told {
    /// ID of the mount that was examined. Another mount of the same file system may be read-only by itself, such as
    /// that of a pod.
    mount: u64,
    is_read_only: bool,
    is_filling: bool,
}

impl Known {
    /// Returns events for the file systems that have turned read-only or writable since the last call. Replaces the
    /// set of known file systems with `found`.
    fn turned(&mut self, found: &[Probed]) -> Vec<Kind> {
        let before = std::mem::take(&mut self.0);
        let mut events = Vec::new();
        for probed in found {
            let (mount, is_read_only) = (probed.id, probed.is_read_only);
            let key = key(probed);
            let told = before.get(&key).copied();
            if told.is_some_and(|told| told.mount == mount && told.is_read_only != is_read_only) {
                let read_only =
                    FileSystemReadOnly { file_system: Some(message(probed)), read_only: is_read_only };
                events.push(read_only.into());
            }
            let is_filling = told.is_some_and(|told| told.is_filling);
            self.0.insert(key, Told { mount, is_read_only, is_filling });
        }
        events
    }

    /// Returns events for the file systems that have begun to fill up since the last call, or have space again.
    fn filled(&mut self, answers: &[(Probed, Usage)], full_percent: u32) -> Vec<Kind> {
        let mut events = Vec::new();
        for (probed, usage) in answers {
            let Some(told) = self.0.get_mut(&key(probed)) else { continue };
            let limit = if told.is_filling { full_percent.saturating_sub(HYSTERESIS) } else { full_percent };
            let is_filling = (1.0 - free(usage)) * 100.0 >= f64::from(limit);
            if std::mem::replace(&mut told.is_filling, is_filling) != is_filling {
                let filling = FileSystemFilling {
                    file_system: Some(message(probed)),
                    filling: is_filling,
                    bytes: usage.total,
                    available_bytes: usage.available,
                    inodes: usage.inodes,
                    free_inodes: usage.inodes_free,
                };
                events.push(filling.into());
            }
        }
        events
    }
}

fn message(probed: &Probed) -> MountedFileSystem {
    MountedFileSystem {
        mount_point: probed.mount_point.clone(),
        source: probed.source.clone(),
        r#type: probed.kind.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::happening;

    fn usage(used: u64, inodes_used: u64) -> Usage {
        Usage {
            used,
            total: 100,
            total_privileged: 105,
            available: 100 - used,
            inodes: 1000,
            inodes_free: 1000 - inodes_used,
        }
    }

    fn probed(id: u64, is_read_only: bool) -> Probed {
        let mut probed = Probed::for_tests(id);
        probed.is_read_only = is_read_only;
        probed
    }

    fn words(events: &[Kind]) -> Vec<String> {
        events.iter().map(|event| happening(event).words()).collect()
    }

    #[test]
    fn what_fills_is_told_once_until_it_has_room_again() {
        let mut known = Known::default();
        let one = probed(1, false);
        for (used, inodes_used, told) in [
            (89, 0, None),
            (
                90,
                0,
                Some("is about to fill: /1 (ext4 from /dev/vda): 10 B of 100 B free, 1000 of 1000 inodes"),
            ),
            (99, 0, None),
            // Within the hysteresis nothing is reported.
            (89, 0, None),
            (85, 0, None),
            (84, 0, Some("has room again: /1 (ext4 from /dev/vda): 16 B of 100 B free, 1000 of 1000 inodes")),
            (89, 0, None),
            (
                0,
                900,
                Some("is about to fill: /1 (ext4 from /dev/vda): 100 B of 100 B free, 100 of 1000 inodes"),
            ),
            (90, 0, None),
        ] {
            assert_eq!(known.turned(std::slice::from_ref(&one)), []);
            let events = known.filled(&[(one.clone(), usage(used, inodes_used))], 90);
            let expected: Vec<_> = told.iter().map(|told| format!("file system {told}")).collect();
            assert_eq!(words(&events), expected, "{used} {inodes_used}");
        }
        // No answer: nothing is known to have changed.
        assert_eq!(known.turned(std::slice::from_ref(&one)), []);
        assert_eq!(known.filled(&[], 90), []);
        assert_eq!(known.filled(&[(one.clone(), usage(90, 0))], 90), []);
        // The same file system, also mounted for a pod and examined at that mount.
        let mut elsewhere = one.clone();
        (elsewhere.id, elsewhere.mount_point) = (7, "/p".into());
        assert_eq!(known.turned(std::slice::from_ref(&elsewhere)), []);
        assert_eq!(known.filled(&[(elsewhere, usage(90, 0))], 90), []);
        // A different file system is mounted at that mount point.
        assert_eq!(known.turned(&[probed(2, false)]), []);
        assert_eq!(known.filled(&[(one, usage(90, 0))], 90), []);
        assert_eq!(known.filled(&[(probed(2, false), usage(90, 0))], 90).len(), 1);
    }

    #[test]
    fn what_turns_read_only_is_told_and_what_was_mounted_so_is_not() {
        let mut known = Known::default();
        assert_eq!(known.turned(&[probed(1, false), probed(2, true)]), []);
        let turned = known.turned(&[probed(1, true), probed(2, true)]);
        assert_eq!(words(&turned), ["file system has become read-only: /1 (ext4 from /dev/vda)"]);
        assert_eq!(known.turned(&[probed(1, true), probed(2, true)]), []);
        let turned = known.turned(&[probed(1, false), probed(2, true)]);
        assert_eq!(words(&turned), ["file system is writable again: /1 (ext4 from /dev/vda)"]);
        let mut elsewhere = probed(1, true);
        elsewhere.id = 7;
        assert_eq!(known.turned(&[elsewhere]), [], "another mount of it is read-only");
        assert_eq!(known.turned(&[]), []);
        assert_eq!(known.turned(&[probed(1, true)]), [], "it was mounted again");
    }
}
