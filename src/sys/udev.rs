//! Database of udev in /run/udev/data about devices, and notifications of its changes.

use std::collections::BTreeSet;
use std::future::pending;
use std::io;

use nix::sys::inotify::{AddWatchFlags, WatchDescriptor};

use crate::sys::block::Number;
use crate::sys::inotify::{Event, Instance};
use crate::sys::root::Root;

const DATA: &str = "/run/udev/data";

/// Returns the udev database entry of a block device; `None` where udev does not run.
pub fn block_device(root: &Root, (major, minor): Number) -> Option<Vec<u8>> {
    root.read(&format!("{DATA}/b{major}:{minor}")).ok()
}

/// Returns the value of a property in an entry of the database, a line `E:NAME=value`; `None` if it is empty.
pub fn property<'a>(entry: &'a [u8], name: &str) -> Option<&'a str> {
    let value = entry
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"E:")?.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    std::str::from_utf8(value).ok().filter(|value| !value.is_empty())
}

/// Returns whether udev runs on this machine.
pub fn runs(root: &Root) -> bool {
    root.path("/run/udev/control").exists()
}

/// Returns the time at which udev had processed a device for the first time, in microseconds since boot;
/// `None` if it has not yet. It distinguishes two devices that have the same number, one after the other.
pub fn processed(root: &Root, number: Number) -> Option<u64> {
    processed_at(&block_device(root, number)?)
}

/// The same out of an entry of the database.
pub fn processed_at(entry: &[u8]) -> Option<u64> {
    let line = entry.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"I:"))?;
    std::str::from_utf8(line).ok()?.parse().ok()
}

/// Devices whose udev data has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Known set of block devices.
    About(BTreeSet<Number>),
    /// Some was lost: it may be any.
    Any,
}

/// Watch for changes to entries of udev's database.
#[derive(Debug)]
pub struct Watch {
    inotify: Instance,
    folder: Option<WatchDescriptor>,
    is_wanted: bool,
}

impl Watch {
    /// One that does not listen yet. To be kept: the kernel takes some 10 ms to close it, in which nothing else is done.
    pub fn begin() -> Self {
        Self { inotify: Instance::begin(), folder: None, is_wanted: false }
    }

    /// Watches for all changes from now on.
    ///
    /// # Errors
    /// The errors of `inotify_add_watch(2)`, also if there is no database yet.
    pub fn listen(&mut self, root: &Root) -> io::Result<()> {
        // udev writes an entry beside its place, and moves it there.
        let what = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_CLOSE_WRITE;
        self.is_wanted = true;
        self.folder = Some(self.inotify.watch(&root.path(DATA), what)?);
        Ok(())
    }

    /// Returns whether changes are being watched.
    pub fn listens(&self) -> bool {
        self.folder.is_some()
    }

    /// Stops watching for changes.
    pub fn pause(&mut self) {
        self.is_wanted = false;
        if let Some(folder) = self.folder.take()
            && let Err(error) = self.inotify.forget(folder)
        {
            tracing::debug!("cannot stop watching udev's database: {error}");
        }
    }

    /// Waits until entries of block devices are written.
    ///
    /// # Errors
    /// The errors of inotify(7).
    pub async fn changed(&self) -> io::Result<News> {
        if !self.is_wanted {
            return pending().await;
        }
        loop {
            let mut about = BTreeSet::new();
            for event in self.inotify.events().await? {
                match event {
                    Event::In(_, name) => {
                        about.extend(name.as_deref().and_then(|name| block_number(name.to_str()?)));
                    }
                    Event::Lost => return Ok(News::Any),
                }
            }
            if !about.is_empty() {
                return Ok(News::About(about));
            }
        }
    }
}

/// The number in the name of a block device's entry.
fn block_number(name: &str) -> Option<Number> {
    let (major, minor) = name.strip_prefix('b')?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Entry of a disk in a Debian 12 guest, shortened.
    const CAPTURED: &[u8] = b"S:disk/by-path/pci-0000:00:06.0\nS:disk/by-id/virtio-data-1\nI:2143861\n\
        E:ID_SERIAL=data-1\nE:ID_SERIAL_SHORT=\nE:ID_PATH=pci-0000:00:06.0\nG:systemd\nQ:systemd\nV:1\n";

    #[test]
    fn captured_entry() {
        assert_eq!(property(CAPTURED, "ID_SERIAL"), Some("data-1"));
        assert_eq!(property(CAPTURED, "ID_SERIAL_SHORT"), None);
        assert_eq!(property(CAPTURED, "ID"), None);
        assert_eq!(property(CAPTURED, "systemd"), None);
        assert_eq!(processed_at(CAPTURED), Some(2_143_861));
        assert_eq!(processed_at(b"E:I:7\nI:x\n"), None);
    }

    #[tokio::test]
    async fn entries_that_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let mut watch = Watch::begin();
        assert!(watch.listen(&root).is_err() && !watch.listens() && !runs(&root));
        let data = root.path(DATA);
        std::fs::create_dir_all(&data).unwrap();
        watch.listen(&root).unwrap();
        for name in ["c4:1", "b254:16.x", "+drm:card0", "n2"] {
            std::fs::File::create(data.join(name)).unwrap();
        }
        std::fs::File::create(root.path("/run/new")).unwrap();
        std::fs::rename(root.path("/run/new"), data.join("b254:16")).unwrap();
        assert_eq!(watch.changed().await.unwrap(), News::About([(254, 16)].into()));
        assert_eq!(processed(&root, (254, 16)), None);
        watch.pause();
        std::fs::File::create(data.join("b1:1")).unwrap();
        watch.listen(&root).unwrap();
        std::fs::File::create(data.join("b2:2")).unwrap();
        assert_eq!(watch.changed().await.unwrap(), News::About([(2, 2)].into()));
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>, value in "[^\n]{1,9}") {
            let entry = [&bytes, "\nE:ANY_NAME=".as_bytes(), value.as_bytes()].concat();
            prop_assert!(property(&entry, "ANY_NAME").is_some());
            let _ = processed_at(&bytes);
            prop_assert_eq!(property(&bytes, "ANY_NAME"), None);
        }
    }
}
