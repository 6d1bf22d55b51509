//! What lies between a disk and its file systems: encryption (LUKS) and LVM, each through its own programs. They find
//! devices by name, and are run while those are held.
//!
//! A volume group may have room that its owner keeps for something: a logical volume gets what the disk brought, and no
//! more. How large the physical volume was is noted before it grows, so that what was interrupted is finished later.

use std::path::{Path, PathBuf};

use super::{Climb, Next};
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, PATIENCE, holding, programs};
use crate::sys::program::Ended;
use crate::sys::{block, files};

/// Where it is noted how large physical volumes were.
const FOLDER: &str = "/var/lib/guestlet/growths";

impl Climb<'_> {
    /// An encrypted device grows once it is open.
    pub(super) async fn encryption(&mut self, device: &Held) -> Result<Next, Error> {
        let what = format!("the encryption of {}", device.file().display());
        let Some((name, file)) = self.mapped(device) else { return Ok(self.refuse(what, "it is not open")) };
        let above = self.hold(&file).await?;
        let before = above.bytes()?;
        // With the key in the kernel's keyring it is not asked for; else it says that it is missing.
        if let Err(error) = self.run(device, "cryptsetup", &["--batch-mode", "resize", &name]).await {
            return Ok(self.failed(what, &error));
        }
        self.note(what, before, above.bytes()?);
        Ok(Next::On(above))
    }

    /// The name and the file of the one device that is made of this one.
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
            return Ok(self.refuse(what, "LVM does not know it"));
        };
        let (Ok(before), Ok(extents)) = (size.parse::<u64>(), extents.parse::<u64>()) else {
            return Ok(self.refuse(what, "LVM does not say how large it is"));
        };
        let note = (!group.is_empty()).then(|| Note { uuid: uuid.clone() });
        let extents = match &note {
            Some(note) => note.begin(self, device, extents).await?,
            None => extents,
        };
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
            return Ok(self.refuse(what, "LVM does not say how large it is"));
        };
        self.note(what, before, after);
        let Some(note) = note else { return Ok(Next::End) };
        let brought = extents_now.saturating_sub(extents);
        let next = match self.logical_volume(group, path, brought).await? {
            Ok(next) => next,
            // Tried again the next time.
            Err(Failed { what, error }) => return Ok(self.failed(what, &error)),
        };
        note.end(self, device).await?;
        Ok(next)
    }

    /// The one logical volume of a group that can take what a physical volume has `brought`, in extents.
    async fn logical_volume(
        &mut self,
        group: &str,
        physical: &str,
        brought: u64,
    ) -> Result<Result<Next, Failed>, Error> {
        let what = format!("the volume group {group}");
        let told = match self.report("lvs", "lv_name,lv_dm_path,segtype", group).await {
            Ok(told) => told,
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let mut candidates = Vec::new();
        for volume in &told {
            let [name, path, kind] = volume.as_slice() else { continue };
            // Swap space is made in the size that it shall have.
            let swaps = told.len() > 1
                && contents(self.guest, path.as_ref()).await.is_ok_and(|it| it.kind() == Some("swap"));
            if !swaps {
                candidates.push((name, PathBuf::from(path), kind));
            }
        }
        let [(name, path, kind)] = candidates.as_slice() else {
            let why = format!("it has {} logical volumes that could take the room", candidates.len());
            return Ok(Ok(self.refuse(what, why)));
        };
        let what = format!("the logical volume {group}/{name}");
        if *kind != "linear" {
            return Ok(Ok(self.refuse(what, format!("it is {kind}, and only linear ones grow"))));
        }
        let free = match self.report("vgs", "vg_free_count", group).await {
            Ok(told) => told.first().and_then(|line| line.first()?.parse::<u64>().ok()),
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let Some(free) = free else {
            return Ok(Ok(self.refuse(what, "LVM does not say how much room its group has")));
        };
        let device = match self.hold(path).await {
            Ok(device) => device,
            Err(error) => return Ok(Err(Failed { what, error })),
        };
        let before = device.bytes()?;
        if let Some(extents) = extension(brought, free) {
            let volume = format!("{group}/{name}");
            let arguments = ["--quiet", "-l", &extents, &volume, physical];
            if let Err(error) = self.run(&device, "lvextend", &arguments).await {
                return Ok(Err(Failed { what, error }));
            }
        }
        self.note(what, before, device.bytes()?);
        Ok(Ok(Next::On(device)))
    }

    /// What LVM tells of `about`: lines of fields, sizes in bytes.
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

    /// Runs a program that changes what is made of a device, and has to succeed.
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

/// What was not done, and is to be tried again.
struct Failed {
    what: String,
    error: Error,
}

/// By how much a logical volume is extended, in the words of lvextend(8), where a disk has brought so many extents and so
/// many are free; nothing if by none.
fn extension(brought: u64, free: u64) -> Option<String> {
    let extents = brought.min(free);
    (extents > 0).then(|| format!("+{extents}"))
}

/// How large a physical volume was, in extents, before it grew: there until the room has gone where it belongs.
struct Note {
    uuid: String,
}

impl Note {
    /// Notes that it has so many extents, unless that was noted before; how many it had then.
    async fn begin(&self, climb: &Climb<'_>, device: &Held, extents: u64) -> Result<u64, Error> {
        let file = self.file(climb)?;
        let noted = holding(device, PATIENCE, move || {
            if let Some(before) = files::read(&file).and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
                return Ok(before);
            }
            file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            files::replace_synced(&file, extents.to_string().as_bytes())?;
            Ok(extents)
        });
        noted.await?.map_err(|source| Error::Note { device: device.file().to_owned(), source })
    }

    async fn end(&self, climb: &Climb<'_>, device: &Held) -> Result<(), Error> {
        let file = self.file(climb)?;
        let removed = holding(device, PATIENCE, move || files::remove_synced(&file)).await?;
        removed.map_err(|source| Error::Note { device: device.file().to_owned(), source })
    }

    fn file(&self, climb: &Climb<'_>) -> Result<PathBuf, Error> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if self.uuid.is_empty() || !self.uuid.bytes().all(plain) {
            return Err(Error::wrong("the name that LVM gave the physical volume", "cannot be"));
        }
        Ok(climb.guest.root.path(FOLDER).join(Path::new(&self.uuid).with_extension("json")))
    }
}

fn parse(report: &str) -> Vec<Vec<String>> {
    let line = |line: &str| line.split('|').map(|field| field.trim().to_owned()).collect();
    report.lines().filter(|line| !line.trim().is_empty()).map(line).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_volume_gets_what_the_disk_brought() {
        for (brought, free, by) in [
            (25, 40, Some("+25")),
            (25, 25, Some("+25")),
            (25, 10, Some("+10")),
            (0, 40, None),
            (25, 0, None),
        ] {
            assert_eq!(super::extension(brought, free).as_deref(), by, "{brought} of {free}");
        }
    }

    #[test]
    fn reports_of_lvm() {
        let told =
            super::parse("  root|/dev/mapper/vg-root|linear\n  swap_1|/dev/mapper/vg-swap_1|linear\n\n");
        assert_eq!(
            told,
            [["root", "/dev/mapper/vg-root", "linear"], ["swap_1", "/dev/mapper/vg-swap_1", "linear"]]
        );
        assert_eq!(super::parse("  1073741824|\n"), [["1073741824", ""]]);
    }
}
