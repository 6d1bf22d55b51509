//! Grows file systems, each by its own program: ext4 in any state, XFS and btrfs only while mounted.

use std::io;

use super::{Climb, Next};
use crate::guest::volumes::held::Held;
use crate::guest::volumes::work::{self, Fate, ITSELF};
use crate::guest::volumes::{Error, PATIENCE, fsck, holding, programs};
use crate::sys::block_stack::is_on;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::superblock::{self, Kind, Superblock};
use crate::sys::{block_device, usage};

impl Climb<'_> {
    pub(super) async fn file_system(&mut self, device: &Held, kind: &str) -> Result<(), Error> {
        let what = format!("{kind} on {}", device.file().display());
        let (from, mounted) = self.look(device).await?;
        let Some(from) = from else {
            self.refuse(what, "its beginning cannot be read");
            return Ok(());
        };
        let room = device.bytes()?;
        if from.bytes > room {
            self.refuse(what, "the device is smaller than the file system");
            return Ok(());
        }
        // The remaining space is less than a block.
        if room - from.bytes < u64::from(from.block.max(1)) {
            self.note(what, 0, 0);
            return Ok(());
        }
        let done = match (from.kind, mounted) {
            (_, Some(Mounted { read_only: true, .. })) => {
                self.refuse(what, "it is mounted read-only");
                return Ok(());
            }
            (Kind::Ext, mounted) => self.ext(device, kind, mounted.is_some(), from.bytes).await,
            (Kind::Xfs, Some(mounted)) => {
                let place = mounted.mount.mount_point.as_str();
                self.online(device, "xfs_growfs", &["-d", place], &mounted).await
            }
            (Kind::Btrfs { device: number, .. }, Some(mounted)) => {
                let size = format!("{number}:max");
                let place = mounted.mount.mount_point.as_str();
                self.online(device, "btrfs", &["filesystem", "resize", &size, place], &mounted).await
            }
            (_, None) => {
                self.refuse(what, "it can be grown only while it is mounted");
                return Ok(());
            }
        };
        match done {
            Ok((from, to)) => self.note(what, from, to),
            Err(error) => drop::<Next>(self.failed(what, &error)),
        }
        Ok(())
    }

    async fn look(&self, device: &Held) -> Result<(Option<Superblock>, Option<Mounted>), Error> {
        let (root, held, number) = (self.guest.root.clone(), device.clone(), device.number());
        let look = move || {
            let found = superblock::read(&block_device::reopen(held.device(), false)?)?;
            let mounts = MountList::open(&root)?.read()?;
            let here = |mount: &Mount| is_on(&root, mount, number);
            let read_only = |options: &str| options.split(',').any(|option| option == "ro");
            // Prefer a mount that is writable.
            let mut mounts: Vec<_> = mounts.into_iter().filter(here).collect();
            mounts.sort_by_key(|mount| read_only(&mount.flags));
            let mounted = mounts.into_iter().next().map(|mount| Mounted {
                read_only: read_only(&mount.flags) || read_only(&mount.options),
                mount,
            });
            Ok::<_, io::Error>((found, mounted))
        };
        let looked = holding(device, PATIENCE, look).await?;
        looked.map_err(|error| Error::unreadable(device.file(), error))
    }

    async fn ext(&self, device: &Held, kind: &str, mounted: bool, from: u64) -> Result<(u64, u64), Error> {
        let mut fate = Fate::Killed;
        if !mounted {
            // resize2fs requires a complete check.
            fsck::check_all(self.guest, device, kind, self.deadline).await?;
            // For a mounted file system the kernel does the work. Otherwise resize2fs moves data itself, and must
            // not be killed.
            fate = Fate::Finishes;
        }
        let ended = work::run(self.guest, device, "resize2fs", &[ITSELF], fate, self.deadline).await?;
        if !ended.status.success() {
            return Err(programs::failed("resize2fs", ended));
        }
        let (after, _) = self.look(device).await?;
        Ok((from, after.map_or(from, |after| after.bytes)))
    }

    /// Runs the program that grows a mounted file system. Returns the sizes before and after.
    async fn online(
        &self,
        device: &Held,
        program: &'static str,
        arguments: &[&str],
        mounted: &Mounted,
    ) -> Result<(u64, u64), Error> {
        let size = async || {
            let (effects, mount, place) =
                (self.guest.effects.clone(), mounted.mount.clone(), mounted.mount.mount_point.clone());
            let told = holding(device, PATIENCE, move || {
                // The program takes a mount point: nothing else may be mounted there.
                effects.open_mount(&mount)?;
                usage::usage(place.as_ref())
            });
            let unreadable = |error| Error::unreadable(mounted.mount.mount_point.as_ref(), error);
            told.await?.map(|usage| usage.total_privileged).map_err(unreadable)
        };
        let from = size().await?;
        self.run(device, program, arguments).await?;
        Ok((from, size().await?))
    }
}

/// Mount of a file system.
struct Mounted {
    mount: Mount,
    read_only: bool,
}
