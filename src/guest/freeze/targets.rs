//! File systems of a freeze, opened before anything is frozen, so that the thaw needs no path; and their thaw.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::guest::freeze::error::{Error, denial_hint};
use crate::guest::freeze::marker::Frozen;
use crate::guest::freeze::plan::{FileSystem, counts, plan};
use crate::sys::block_stack::{BlockStack, Device};
use crate::sys::effects::Effects;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::process_group::thread;
use crate::sys::root::Root;

/// Longest time that one thaw delays the next one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval at which those that have already ended are thawed again, as long as another thaw waits.
const AGAIN: Duration = Duration::from_millis(500);
/// Limit on the nested freezes of one file system.
const NESTED: u32 = 1000;
/// Boolean of the `SELinux` policy that allows qemu-ga to open what is mounted.
pub const OPEN_BOOLEAN: &str = "virt_qemu_ga_read_nonsecurity_files";

/// Opened file system.
#[derive(Debug)]
pub struct Target {
    /// Device number of the file system.
    pub device: Device,
    /// Mount point by which it was opened.
    pub mount_point: String,
    descriptor: OwnedFd,
}

impl Target {
    /// Freezes the file system.
    ///
    /// # Errors
    /// The errors of [`Effects::freeze`].
    pub fn freeze(&self, effects: &dyn Effects) -> io::Result<()> {
        retried(|| effects.freeze(self.descriptor.as_fd()))
    }

    /// Thaws the file system until it is no longer frozen, and returns how many times that took.
    ///
    /// # Errors
    /// The errors of [`Effects::thaw`], except for those which mean that it is not frozen.
    pub fn thaw(&self, effects: &dyn Effects) -> io::Result<u32> {
        let mut times = 0;
        while times < NESTED {
            match retried(|| effects.thaw(self.descriptor.as_fd())) {
                Ok(()) => times += 1,
                // The file system is not frozen, or does not support freezing.
                Err(error)
                    if error.raw_os_error() == Some(Errno::EINVAL as i32)
                        || error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32) =>
                {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(times)
    }

    /// Returns the entry for the marker.
    pub fn marked(&self) -> Frozen {
        Frozen { device: self.device, mount_point: self.mount_point.clone() }
    }
}

fn retried(mut work: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Returns all mounts.
///
/// # Errors
/// If the kernel's list cannot be read.
pub fn mounts(root: &Root) -> Result<Vec<Mount>, Error> {
    MountList::open(root).and_then(|list| list.read()).map_err(Error::Mounts)
}

/// Returns the mounted file systems that `which` names by mount points, or all, in the order in which they are
/// frozen.
///
/// # Errors
/// If a name is not a mount point, or the kernel's list cannot be read.
pub fn selected(root: &Root, which: Option<&[String]>) -> Result<Vec<FileSystem>, Error> {
    let mounts = mounts(root)?;
    let mut stack =
        BlockStack::read(root, mounts.iter().map(|mount| mount.device).filter(|device| device.0 != 0));
    for mount in mounts.iter().filter(|mount| mount.device.0 == 0 && counts(mount)) {
        stack.add_btrfs(root, mount.device, &mount.source);
    }
    let mut all = plan(&mounts, &stack);
    if let Some(which) = which {
        let mut devices = Vec::new();
        for name in which {
            let point = if name.len() > 1 { name.trim_end_matches('/') } else { name };
            let mut found = mounts.iter().rev().filter(|mount| mount.mount_point == point).peekable();
            if found.peek().is_none() {
                return Err(Error::NotMounted(name.chars().take(256).collect()));
            }
            // The last mount at a mount point hides the others. But several mount points that are not valid UTF-8
            // may be listed under the same name.
            let most = if point.contains(char::REPLACEMENT_CHARACTER) { usize::MAX } else { 1 };
            devices.extend(found.take(most).map(|mount| mount.device));
        }
        all.retain(|file_system| devices.contains(&file_system.device));
    }
    Ok(all)
}

/// Opens the file systems. One that is hidden by other mounts everywhere is left out, with a log message, as no
/// path leads to it.
///
/// # Errors
/// If one cannot be opened for another reason.
pub fn open(root: &Root, effects: &dyn Effects, plan: &[FileSystem]) -> Result<Vec<Arc<Target>>, Error> {
    let mut targets = Vec::new();
    for file_system in plan {
        match open_one(effects, file_system) {
            Ok(target) => targets.push(Arc::new(target)),
            Err(source) if source.raw_os_error() == Some(Errno::ESTALE as i32) => {
                tracing::warn!("{} is hidden by another mount, and is not frozen", file_system.name());
            }
            Err(source) => {
                let hint = denial_hint(root, &source, OPEN_BOOLEAN);
                return Err(Error::FileSystem {
                    verb: "open",
                    path: file_system.name().to_owned(),
                    error: source,
                    hint,
                });
            }
        }
    }
    Ok(targets)
}

fn open_one(effects: &dyn Effects, file_system: &FileSystem) -> io::Result<Target> {
    let mut failure = io::Error::from(Errno::ESTALE);
    for mount in &file_system.mounts {
        match effects.open_mount(mount) {
            Ok(descriptor) => {
                return Ok(Target {
                    device: file_system.device,
                    mount_point: mount.mount_point.clone(),
                    descriptor,
                });
            }
            // Neither a directory nor a regular file; another mount of it may be usable.
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Opens the file systems that a marker names, wherever they are mounted now. One that is no longer mounted cannot
/// be frozen. The second part describes what could not be opened.
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn open_marked(
    root: &Root,
    effects: &dyn Effects,
    marked: &[Frozen],
) -> Result<(Vec<Arc<Target>>, Vec<String>), Error> {
    let mounts = mounts(root)?;
    let mut targets = Vec::new();
    let mut problems = Vec::new();
    for Frozen { device, mount_point } in marked {
        let places = mounts.iter().rev().filter(|mount| mount.device == *device).cloned();
        let file_system = FileSystem { device: *device, mounts: places.collect() };
        if file_system.mounts.is_empty() {
            continue;
        }
        match open_one(effects, &file_system) {
            Ok(target) => targets.push(Arc::new(target)),
            Err(error) => problems.push(format!("cannot open {mount_point}: {error}")),
        }
    }
    Ok((targets, problems))
}

/// Thaws that have been started.
#[derive(Debug)]
pub struct Thaws {
    sender: Sender<(Device, io::Result<u32>)>,
    results: Receiver<(Device, io::Result<u32>)>,
    /// Finished thaws: how many times each file system was thawed, or the error.
    pub ended: Vec<(Device, io::Result<u32>)>,
    /// File systems whose thaw has not finished.
    pub left: Vec<Device>,
}

impl Thaws {
    /// Starts the thaws, the last file system first. A slow one delays the others only briefly.
    pub fn begin(effects: &Arc<dyn Effects>, targets: &[Arc<Target>]) -> Self {
        let (sender, results) = channel();
        let mut thaws = Self { sender, results, ended: Vec::new(), left: Vec::new() };
        thaws.thaw(effects, targets);
        thaws
    }

    fn thaw(&mut self, effects: &Arc<dyn Effects>, targets: &[Arc<Target>]) {
        for target in targets.iter().rev() {
            if self.left.contains(&target.device) {
                continue;
            }
            self.left.push(target.device);
            let (work, on_thread, sender) = (Arc::clone(target), Arc::clone(effects), self.sender.clone());
            let begun = thread("thaw", move || {
                // The receiver may no longer exist.
                let _ = sender.send((work.device, work.thaw(&*on_thread)));
            });
            match begun {
                Ok(()) => self.wait_for(|thaws| !thaws.left.contains(&target.device), PATIENCE),
                // Without a thread the thaw runs here, however long that takes.
                Err(_) => self.note(target.device, target.thaw(&**effects)),
            }
        }
    }

    /// Waits until all have finished, or until the time is up.
    pub fn finish(&mut self, longest: Duration) {
        self.wait_for(|thaws| thaws.left.is_empty(), longest);
    }

    /// Waits in place of an agent that was killed, or hangs, while it froze. A file system that was not quite
    /// frozen may become frozen only now, and would block the thaw of those stored on it: those that have finished
    /// are thawed again.
    pub fn finish_again(&mut self, effects: &Arc<dyn Effects>, targets: &[Arc<Target>], longest: Duration) {
        let deadline = Instant::now() + longest;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.finish(AGAIN.min(left));
            if self.left.is_empty() || left.is_zero() {
                return;
            }
            self.thaw(effects, targets);
        }
    }

    fn wait_for(&mut self, done: impl Fn(&Self) -> bool, longest: Duration) {
        let deadline = Instant::now() + longest;
        while !done(self) {
            match self.results.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((device, result)) => self.note(device, result),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn note(&mut self, device: Device, result: io::Result<u32>) {
        self.left.retain(|left| *left != device);
        self.ended.push((device, result));
    }
}
