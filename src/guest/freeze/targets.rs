//! The file systems of a freeze, opened before anything is frozen, so that the thaw needs no path; and their thaw.

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

/// How long one thaw may hold up the next one.
const PATIENCE: Duration = Duration::from_secs(2);
/// When what does not wait is thawed again, as long as another thaw waits.
const AGAIN: Duration = Duration::from_millis(500);
/// Freezes that one file system may have on top of each other.
const NESTED: u32 = 1000;
/// The boolean by which the policy of `SELinux` lets qemu-ga open what is mounted.
pub const OPEN_BOOLEAN: &str = "virt_qemu_ga_read_nonsecurity_files";

/// A file system, opened.
#[derive(Debug)]
pub struct Target {
    /// Its number.
    pub device: Device,
    /// Where it is mounted.
    pub mount_point: String,
    descriptor: OwnedFd,
}

impl Target {
    /// Freezes it.
    ///
    /// # Errors
    /// As [`Effects::freeze`].
    pub fn freeze(&self, effects: &dyn Effects) -> io::Result<()> {
        retried(|| effects.freeze(self.descriptor.as_fd()))
    }

    /// Thaws it until it is not frozen any more; says how often that was.
    ///
    /// # Errors
    /// As [`Effects::thaw`], but for those that say that it is not frozen.
    pub fn thaw(&self, effects: &dyn Effects) -> io::Result<u32> {
        let mut times = 0;
        while times < NESTED {
            match retried(|| effects.thaw(self.descriptor.as_fd())) {
                Ok(()) => times += 1,
                // Not frozen, or it cannot be.
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

    /// As the marker names it.
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

/// What is mounted.
///
/// # Errors
/// If the kernel's list cannot be read.
pub fn mounts(root: &Root) -> Result<Vec<Mount>, Error> {
    MountList::open(root).and_then(|list| list.read()).map_err(Error::Mounts)
}

/// Those of the mounted file systems that `which` names by a mount point, in the order in which they are frozen; without
/// it, all.
///
/// # Errors
/// If what is named is no mount point, or the kernel's list cannot be read.
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
            // The last one mounted there hides the others; but what is no text has no name of its own, and several
            // places may have been listed by this one.
            let most = if point.contains(char::REPLACEMENT_CHARACTER) { usize::MAX } else { 1 };
            devices.extend(found.take(most).map(|mount| mount.device));
        }
        all.retain(|file_system| devices.contains(&file_system.device));
    }
    Ok(all)
}

/// Opens them. One that other mounts hide everywhere is left out, which the log tells: no path leads there.
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
            // Neither a folder nor a plain file; there may be a better place.
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Opens what a marker names, wherever it is mounted now; what is not mounted any more cannot be frozen. The second
/// part says what could not be opened.
///
/// # Errors
/// If what is mounted cannot be read.
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

/// Thaws that were begun.
#[derive(Debug)]
pub struct Thaws {
    sender: Sender<(Device, io::Result<u32>)>,
    results: Receiver<(Device, io::Result<u32>)>,
    /// Those that have ended: how often each was thawed, or why it was not.
    pub ended: Vec<(Device, io::Result<u32>)>,
    /// Those that have not.
    pub left: Vec<Device>,
}

impl Thaws {
    /// Thaws the last one first. One that takes long holds up the others for a moment only.
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
                // Who waited may have gone.
                let _ = sender.send((work.device, work.thaw(&*on_thread)));
            });
            match begun {
                Ok(()) => self.wait_for(|thaws| !thaws.left.contains(&target.device), PATIENCE),
                // Without a thread it is done here, however long that takes.
                Err(_) => self.note(target.device, target.thaw(&**effects)),
            }
        }
    }

    /// Waits until all have ended, or for the time that is given.
    pub fn finish(&mut self, longest: Duration) {
        self.wait_for(|thaws| thaws.left.is_empty(), longest);
    }

    /// The same in place of an agent that was killed, or hangs, while it froze. What it had not quite frozen is frozen only
    /// now, and keeps waiting the thaw of what is on it: it is thawed again.
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
