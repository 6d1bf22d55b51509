//! File systems, each through its own program. ext4 grows wherever it is; XFS and btrfs only where they are mounted.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::{Climb, Next};
use crate::guest::volumes::fsck;
use crate::guest::volumes::{Device, Error, PATIENCE, holding, programs};
use crate::sys::mountinfo::MountList;
use crate::sys::superblock::{self, Kind, Superblock};
use crate::sys::{block_device, usage};

impl Climb<'_> {
    pub(super) async fn file_system(&mut self, device: &Device, kind: &str) -> Result<(), Error> {
        let what = format!("{kind} on {}", device.file.display());
        let (from, mounted) = self.look(device).await?;
        let Some(from) = from else {
            self.refuse(what, "its beginning cannot be read");
            return Ok(());
        };
        if from.bytes > device.facts.bytes {
            self.refuse(what, "the device is smaller than the file system");
            return Ok(());
        }
        // What is left is less than a block.
        if device.facts.bytes - from.bytes < u64::from(from.block.max(1)) {
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
                self.online("xfs_growfs", &["-d", &mounted.place], &mounted.place).await
            }
            (Kind::Btrfs { device: number, .. }, Some(mounted)) => {
                let size = format!("{number}:max");
                self.online("btrfs", &["filesystem", "resize", &size, &mounted.place], &mounted.place).await
            }
            (_, None) => {
                self.refuse(what, "it grows only while it is mounted");
                return Ok(());
            }
        };
        match done {
            Ok((from, to)) => self.note(what, from, to),
            Err(error) => drop::<Next>(self.failed(what, &error)),
        }
        Ok(())
    }

    async fn look(&self, device: &Device) -> Result<(Option<Superblock>, Option<Mounted>), Error> {
        let (root, file, number) = (self.guest.root.clone(), device.file.clone(), device.facts.number);
        let look = move || {
            let found = superblock::read(&block_device::open(&file)?)?;
            // What btrfs is on is told by its source only.
            let same = |source: &str| {
                let file = std::fs::metadata(root.path(source)).ok()?.rdev();
                Some(
                    (nix::sys::stat::major(file), nix::sys::stat::minor(file))
                        == (number.0.into(), number.1.into()),
                )
            };
            let mounts = MountList::open(&root)?.read()?;
            let here = |mount: &&crate::sys::mountinfo::Mount| {
                mount.device == number
                    || (mount.device.0 == 0 && mount.kind == "btrfs" && same(&mount.source) == Some(true))
            };
            let read_only = |options: &str| options.split(',').any(|option| option == "ro");
            // One that can be written through, if there is one.
            let mut mounts: Vec<_> = mounts.iter().filter(here).collect();
            mounts.sort_by_key(|mount| read_only(&mount.flags));
            let mounted = mounts.first().map(|mount| Mounted {
                place: mount.mount_point.clone(),
                read_only: read_only(&mount.flags) || read_only(&mount.options),
            });
            Ok::<_, io::Error>((found, mounted))
        };
        holding(&self.held, &device.file, PATIENCE, look)
            .await?
            .map_err(|error| Error::unreadable(&device.file, error))
    }

    async fn ext(&self, device: &Device, kind: &str, mounted: bool, from: u64) -> Result<(u64, u64), Error> {
        let path = programs::text(&device.file)?;
        if !mounted {
            // resize2fs asks for that.
            fsck::check_all(self.guest, &device.file, kind, self.deadline).await?;
        }
        self.run("resize2fs", &[path]).await?;
        let (after, _) = self.look(device).await?;
        Ok((from, after.map_or(from, |after| after.bytes)))
    }

    /// Runs the program that lets a mounted file system grow, and says how large it was and is.
    async fn online(
        &self,
        program: &'static str,
        arguments: &[&str],
        place: &str,
    ) -> Result<(u64, u64), Error> {
        let size = async || {
            let place = place.to_owned();
            let told = holding(&self.held, Path::new(&place.clone()), PATIENCE, move || {
                usage::usage(place.as_ref())
            })
            .await?;
            told.map(|usage| usage.total_privileged)
                .map_err(|error| Error::unreadable(Path::new(program), error))
        };
        let from = size().await?;
        self.run(program, arguments).await?;
        Ok((from, size().await?))
    }
}

/// Where a file system is mounted.
struct Mounted {
    place: String,
    read_only: bool,
}
