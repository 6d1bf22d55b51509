//! Grows the layers between a disk and its file systems: encryption (LUKS) and LVM, each by its own programs. They
//! find devices by name, and are run while those are held.
//!
//! A volume group may have free space that its owner reserves: a logical volume gets only what the disk has
//! gained. The size of the physical volume is noted before it grows, and that of the logical volume before it
//! does, so that an interrupted run is completed later, and nothing is done twice.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Climb, Next};
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding, programs};
use crate::sys::program::Ended;
use crate::sys::{block, files};

/// Directory of the notes about the sizes of physical and logical volumes.
const FOLDER: &str = "/var/lib/guestlet/growths";
/// Limit on the bytes of a note.
const MOST: u64 = 4096;

impl Climb<'_> {
    /// Grows an encrypted device, which has to be open.
    pub(super) async fn encryption(&mut self, device: &Held) -> Result<Next, Error> {
        let what = format!("the encryption of {}", device.file().display());
        let Some((name, file)) = self.mapped(device) else { return Ok(self.refuse(what, "it is not open")) };
        let above = self.hold(&file).await?;
        let before = above.bytes()?;
        // cryptsetup needs no passphrase if the key is in the kernel's keyring; otherwise it fails with a message.
        if let Err(error) = self.run(device, "cryptsetup", &["--batch-mode", "resize", &name]).await {
            return Ok(self.failed(what, &error));
        }
        self.note(what, before, above.bytes()?);
        Ok(Next::On(above))
    }

    /// Returns the name and the device node of the only device that is built on this one.
    fn mapped(&self, device: &Held) -> Option<(String, PathBuf)> {
        let root = &self.guest.root;
        let place = block::place(root, device.number()).ok()?;
        let mut holders = std::fs::read_dir(root.path(&format!("{place}/holders"))).ok()?.flatten();
        let holder = holders.next().filter(|_| holders.next().is_none())?.file_name().into_string().ok()?;
        let name = root.line(&format!("/sys/class/block/{holder}/dm/name"));
        let encrypted = root.line(&format!("/sys/class/block/{holder}/dm/uuid")).starts_with("CRYPT-");
        (encrypted && !name.is_empty()).then(|| (name, root.path(&block::file(&holder))))
    }

    pub(super) async fn physical_volume(&mut self, device: &Held) -> Result<Next, Error> {
        let what = format!("the physical volume {}", device.file().display());
        let path = programs::text(device.file())?;
        let told = match self.report("pvs", "pv_size,vg_name,pv_pe_count,pv_uuid", path).await {
            Ok(told) => told,
            Err(error) => return Ok(self.failed(what, &error)),
        };
        let [size, group, extents, uuid] = told.first().map(Vec::as_slice).unwrap_or_default() else {
            return Ok(self.refuse(what, "it is not known to LVM"));
        };
        let (Ok(before), Ok(extents)) = (size.parse::<u64>(), extents.parse::<u64>()) else {
            return Ok(self.refuse(what, "LVM does not report its size"));
        };
        let mut note =
            if group.is_empty() { None } else { Some(Note::begin(self, device, uuid, extents).await?) };
        if let Err(error) = self.run(device, "pvresize", &["--quiet", "--yes", path]).await {
            return Ok(self.failed(what, &error));
        }
        let told = self.report("pvs", "pv_size,pv_pe_count", path).await;
        let numbers = |told: Vec<Vec<String>>| {
            let line = told.first()?;
            Some((line.first()?.parse::<u64>().ok()?, line.get(1)?.parse::<u64>().ok()?))
        };
        let after = match told {
            Ok(told) => numbers(told),
            Err(error) => return Ok(self.failed(what, &error)),
        };
        let Some((after, extents_now)) = after else {
            return Ok(self.refuse(what, "LVM does not report its size"));
        };
        self.note(what, before, after);
        let Some(note) = &mut note else { return Ok(Next::End) };
        let brought = extents_now.saturating_sub(note.growth.physical);
        let next = match self.logical_volume(device, group, path, brought, note).await? {
            Ok(next) => next,
            // Retried at the next call.
            Err(Failed { what, error }) => return Ok(self.failed(what, &error)),
        };
        note.end(self, device).await?;
        Ok(next)
    }

    /// Extends the only suitable logical volume of a group by what the physical volume has gained (`brought`), in
    /// extents.
    async fn logical_volume(
        &mut self,
        disk: &Held,
        group: &str,
        physical: &str,
        brought: u64,
        note: &mut Note,
    ) -> Result<Result<Next, Failed>, Error> {
        let what = format!("the volume group {group}");
        let told = match self.report("lvs", "lv_name,lv_dm_path,lv_uuid,segtype,seg_size_pe", group).await {
            Ok(told) => told,
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let Some(volumes) = logical_volumes(&told) else {
            return Ok(Ok(self.refuse(what, "LVM does not report the sizes of its logical volumes")));
        };
        let several = volumes.len() > 1;
        let mut candidates = Vec::new();
        for volume in volumes {
            // Swap space is made in its final size.
            let swaps =
                several && contents(self.guest, &volume.path).await.is_ok_and(|it| it.kind() == Some("swap"));
            if !swaps {
                candidates.push(volume);
            }
        }
        let [volume] = candidates.as_slice() else {
            let why = format!("it has {} logical volumes that could take the space", candidates.len());
            return Ok(Ok(self.refuse(what, why)));
        };
        let name = format!("{group}/{}", volume.name);
        let what = format!("the logical volume {name}");
        if let Some(kind) = volume.kinds.iter().find(|kind| *kind != "linear") {
            return Ok(Ok(
                self.refuse(what, format!("it is {kind}; only linear logical volumes can be grown"))
            ));
        }
        let free = match self.report("vgs", "vg_free_count", group).await {
            Ok(told) => told.first().and_then(|line| line.first()?.parse::<u64>().ok()),
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let Some(free) = free else {
            return Ok(Ok(self.refuse(what, "LVM does not report the free space of its volume group")));
        };
        let device = match self.hold(&volume.path).await {
            Ok(device) => device,
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let before = device.bytes()?;
        let extents_before = note.extents_of(self, disk, volume).await?;
        if let Some(extents) = target(extents_before, brought, volume.extents, free) {
            let arguments = ["--quiet", "-l", &extents.to_string(), &name, physical];
            if let Err(error) = self.run(&device, "lvextend", &arguments).await {
                return Ok(Err(Failed { what, error }));
            }
        }
        self.note(what, before, device.bytes()?);
        Ok(Ok(Next::On(device)))
    }

    /// Returns LVM's report on `about`: lines of fields, with sizes in bytes.
    async fn report(
        &self,
        program: &'static str,
        fields: &str,
        about: &str,
    ) -> Result<Vec<Vec<String>>, Error> {
        let arguments =
            ["--noheadings", "--nosuffix", "--units", "b", "--separator", "|", "-o", fields, about];
        Ok(parse(&self.ask(program, &arguments).await?.output))
    }

    /// Runs a program that changes what is built on a device. Its failure is an error.
    pub(super) async fn run(
        &self,
        device: &Held,
        program: &'static str,
        arguments: &[&str],
    ) -> Result<Ended, Error> {
        device.verify().await?;
        self.ask(program, arguments).await
    }

    async fn ask(&self, program: &'static str, arguments: &[&str]) -> Result<Ended, Error> {
        let ended = programs::run(&self.guest.root, program, arguments, self.deadline).await?;
        if ended.status.success() { Ok(ended) } else { Err(programs::failed(program, ended)) }
    }
}

/// Failed step, to be retried.
struct Failed {
    what: String,
    error: Error,
}

/// Logical volume as reported by LVM.
#[derive(Debug, PartialEq, Eq)]
struct LogicalVolume {
    name: String,
    path: PathBuf,
    uuid: String,
    /// Types of its segments.
    kinds: Vec<String>,
    extents: u64,
}

/// Parses a report that has a line for each segment into logical volumes. Returns none if it is malformed.
fn logical_volumes(told: &[Vec<String>]) -> Option<Vec<LogicalVolume>> {
    let mut all: Vec<LogicalVolume> = Vec::new();
    for line in told {
        let [name, path, uuid, kind, extents] = line.as_slice() else { return None };
        let extents: u64 = extents.parse().ok()?;
        if let Some(known) = all.iter_mut().find(|known| known.uuid == *uuid) {
            known.kinds.push(kind.clone());
            known.extents = known.extents.checked_add(extents)?;
        } else {
            all.push(LogicalVolume {
                name: name.clone(),
                path: path.into(),
                uuid: uuid.clone(),
                kinds: vec![kind.clone()],
                extents,
            });
        }
    }
    Some(all)
}

/// Returns the number of extents to which a logical volume is extended; none if it stays as it is. It had `before`
/// extents before the disk gained its space and has `now`; these differ if it was extended by a run that was
/// interrupted before it removed the note.
fn target(before: u64, brought: u64, now: u64, free: u64) -> Option<u64> {
    let extents = before.saturating_add(brought).min(now.saturating_add(free));
    (extents > now).then_some(extents)
}

/// Note of the sizes of volumes before they grew, in extents. Exists until the gained space has been used.
struct Note {
    /// UUID of the physical volume.
    uuid: String,
    growth: Growth,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Growth {
    /// Extents of the physical volume.
    physical: u64,
    /// UUID of the logical volume, and its extents.
    logical: Option<(String, u64)>,
}

impl Note {
    /// Notes the number of extents of a physical volume, unless an earlier note exists.
    async fn begin(climb: &Climb<'_>, device: &Held, uuid: &str, extents: u64) -> Result<Self, Error> {
        let file = file(climb, uuid)?;
        let noted = holding(device, PATIENCE, move || {
            if let Some(bytes) = files::read_at_most(&file, MOST)? {
                return serde_json::from_slice(&bytes).map_err(io::Error::from);
            }
            let growth = Growth { physical: extents, logical: None };
            write(&file, &growth)?;
            Ok(growth)
        });
        let growth =
            noted.await?.map_err(|source| Error::Note { device: device.file().to_owned(), source })?;
        Ok(Self { uuid: uuid.to_owned(), growth })
    }

    /// Returns the number of extents that a logical volume had before it was extended. Notes the present number if
    /// there is no such note yet.
    async fn extents_of(
        &mut self,
        climb: &Climb<'_>,
        device: &Held,
        volume: &LogicalVolume,
    ) -> Result<u64, Error> {
        if let Some((uuid, extents)) = &self.growth.logical
            && *uuid == volume.uuid
        {
            return Ok(*extents);
        }
        self.growth.logical = Some((volume.uuid.clone(), volume.extents));
        let (file, growth) = (file(climb, &self.uuid)?, self.growth.clone());
        let written = holding(device, PATIENCE, move || write(&file, &growth)).await?;
        written.map_err(|source| Error::Note { device: device.file().to_owned(), source })?;
        Ok(volume.extents)
    }

    async fn end(&self, climb: &Climb<'_>, device: &Held) -> Result<(), Error> {
        let file = file(climb, &self.uuid)?;
        let removed = holding(device, PATIENCE, move || files::remove_synced(&file)).await?;
        removed.map_err(|source| Error::Note { device: device.file().to_owned(), source })
    }
}

/// Returns the path of the note about a physical volume.
fn file(climb: &Climb<'_>, uuid: &str) -> Result<PathBuf, Error> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if uuid.is_empty() || !uuid.bytes().all(plain) {
        return Err(Error::wrong("the name that LVM gave the physical volume", "cannot be"));
    }
    Ok(climb.guest.root.path(FOLDER).join(Path::new(uuid).with_extension("json")))
}

fn write(file: &Path, growth: &Growth) -> io::Result<()> {
    file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    files::replace_synced(file, &serde_json::to_vec(growth)?)
}

fn parse(report: &str) -> Vec<Vec<String>> {
    let line = |line: &str| line.split('|').map(|field| field.trim().to_owned()).collect();
    report.lines().filter(|line| !line.trim().is_empty()).map(line).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_volume_gets_what_the_disk_brought() {
        for (before, brought, now, free, to) in [
            (10, 25, 10, 40, Some(35)),
            (10, 25, 10, 25, Some(35)),
            (10, 25, 10, 10, Some(20)),
            (10, 0, 10, 40, None),
            (10, 25, 10, 0, None),
            // The extension was done, completely or in part, or somebody did more.
            (10, 25, 35, 15, None),
            (10, 25, 20, 15, Some(35)),
            (10, 25, 40, 15, None),
        ] {
            assert_eq!(super::target(before, brought, now, free), to, "{before} + {brought}, {now}, {free}");
        }
    }

    #[test]
    fn reports_of_lvm() {
        let told = super::parse(
            "  root|/dev/mapper/vg-root|a-1|linear|5\n  swap_1|/dev/mapper/vg-swap_1|b-2|linear|7\n\n  \
             root|/dev/mapper/vg-root|a-1|striped|4\n",
        );
        let volumes = super::logical_volumes(&told).unwrap();
        assert_eq!(volumes.len(), 2, "{volumes:?}");
        assert_eq!((volumes[0].name.as_str(), volumes[0].extents), ("root", 9));
        assert_eq!((volumes[0].path.to_str(), volumes[1].extents), (Some("/dev/mapper/vg-root"), 7));
        assert_eq!(volumes[0].kinds, ["linear", "striped"]);
        assert_eq!(super::logical_volumes(&super::parse("root|/dev/mapper/vg-root|a-1|linear|\n")), None);
        assert_eq!(super::parse("  1073741824|\n"), [["1073741824", ""]]);
    }
}
