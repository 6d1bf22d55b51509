//! What lies between a disk and its file systems: encryption (LUKS) and LVM, each through its own programs. They find
//! devices by name, and are run while those are held.

use std::path::PathBuf;

use super::{Climb, Next};
use crate::guest::volumes::contents::contents;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::{Error, programs};
use crate::sys::block;
use crate::sys::program::Ended;

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
        let told = match self.report("pvs", "pv_size,vg_name", path).await {
            Ok(told) => told,
            Err(error) => return Ok(self.failed(what, &error)),
        };
        let [before, group] = told.first().map(Vec::as_slice).unwrap_or_default() else {
            return Ok(self.refuse(what, "LVM does not know it"));
        };
        let (before, group) = (before.parse().unwrap_or(0), group.clone());
        if let Err(error) = self.run(device, "pvresize", &["--quiet", "--yes", path]).await {
            return Ok(self.failed(what, &error));
        }
        let after = self
            .report("pvs", "pv_size", path)
            .await
            .ok()
            .and_then(|told| told.first()?.first()?.parse().ok());
        self.note(what, before, after.unwrap_or(before));
        if group.is_empty() {
            return Ok(Next::End);
        }
        self.logical_volume(&group).await
    }

    /// The one logical volume of a group that can take its room.
    async fn logical_volume(&mut self, group: &str) -> Result<Next, Error> {
        let what = format!("the volume group {group}");
        let told = match self.report("lvs", "lv_name,lv_dm_path,segtype", group).await {
            Ok(told) => told,
            Err(error) => return Ok(self.failed(what, &error)),
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
            return Ok(self.refuse(what, why));
        };
        let what = format!("the logical volume {group}/{name}");
        if *kind != "linear" {
            return Ok(self.refuse(what, format!("it is {kind}, and only linear ones grow")));
        }
        let free = self
            .report("vgs", "vg_free", group)
            .await
            .ok()
            .and_then(|told| told.first()?.first()?.parse::<u64>().ok());
        let device = match self.hold(path).await {
            Ok(device) => device,
            Err(error) => return Ok(self.failed(what, &error)),
        };
        let before = device.bytes()?;
        if free != Some(0)
            && let Err(error) = self
                .run(&device, "lvextend", &["--quiet", "-l", "+100%FREE", &format!("{group}/{name}")])
                .await
        {
            return Ok(self.failed(what, &error));
        }
        self.note(what, before, device.bytes()?);
        Ok(Next::On(device))
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

fn parse(report: &str) -> Vec<Vec<String>> {
    let line = |line: &str| line.split('|').map(|field| field.trim().to_owned()).collect();
    report.lines().filter(|line| !line.trim().is_empty()).map(line).collect()
}

#[cfg(test)]
mod tests {
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
