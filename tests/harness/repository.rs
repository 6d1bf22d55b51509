//! An archive of packages on a disk, from which a guest without a network installs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::json;

use super::cache::{Input, entry};
use super::images::text;
use super::process::RunFolder;
use super::tools::{run_script, script};
use super::vm::{SOON, Vm};
use super::wait_for;

const DEBIAN: &str = "debian-packages.sh";

/// Packages for a guest. Drop it after the VM.
#[derive(Debug)]
pub struct Repository {
    folder: RunFolder,
    packages: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Repository {
    /// With the packages in `packages`.
    pub fn new(packages: &[PathBuf]) -> anyhow::Result<Self> {
        Ok(Self { folder: RunFolder::new()?, packages: packages.to_vec(), files: Vec::new() })
    }

    /// With Debian's qemu-guest-agent, and what it needs beyond the real guest.
    pub fn add_real_agent(&mut self) -> anyhow::Result<()> {
        self.add_debian(&["qemu-guest-agent", "libglib2.0-0", "libnuma1", "liburing2"])
    }

    /// With packages of Debian.
    pub fn add_debian(&mut self, names: &[&str]) -> anyhow::Result<()> {
        let how = script(DEBIAN);
        let versions = run_script(DEBIAN, &[&["newest"], names].concat())?;
        let inputs = [Input::Words(&names.join(" ")), Input::Words(&versions), Input::File(&how)];
        let made = entry("debian", &inputs, |folder| {
            run_script(DEBIAN, &[&["fetch", text(folder)?], names].concat()).map(drop)
        })?;
        for file in std::fs::read_dir(made)? {
            self.packages.push(file?.path());
        }
        Ok(())
    }

    /// With `package` as another version of itself, on the disk and not in the archive; returns its file name.
    pub fn add_version(&mut self, package: &Path, version: &str) -> anyhow::Result<String> {
        let name = package.file_stem().and_then(std::ffi::OsStr::to_str).context("no name")?;
        let name = format!("{}_{version}.deb", name.split('_').next().unwrap_or(name));
        let made = self.folder.file(&name);
        run_script("other-version.sh", &[text(package)?, version, text(&made)?])?;
        self.files.push(made);
        Ok(name)
    }

    /// Makes the disk and plugs it into a running VM, which finds it by the label `PACKAGES`.
    pub fn plug(&self, vm: &Vm) -> anyhow::Result<()> {
        let disk = self.folder.file("packages.iso");
        let mut arguments = vec![text(&disk)?];
        for package in &self.packages {
            arguments.push(text(package)?);
        }
        arguments.push("--");
        for file in &self.files {
            arguments.push(text(file)?);
        }
        run_script("repository.sh", &arguments)?;
        let file = json!({ "driver": "file", "filename": disk, "read-only": true });
        vm.qmp().execute(
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "packages", "file": file, "read-only": true }),
        )?;
        let device =
            json!({ "driver": "scsi-hd", "bus": "scsi0.0", "drive": "packages", "serial": "packages" });
        vm.qmp().execute("device_add", device).map(drop)
    }

    /// As [`plug`](Self::plug), and mounts it in the guest: the packages are in `/srv/packages` then.
    pub fn mount(&self, vm: &Vm) -> anyhow::Result<()> {
        self.plug(vm)?;
        let mount = "mkdir -p /srv/packages && mount -o ro -L PACKAGES /srv/packages";
        wait_for("the disk of packages", SOON, || vm.run(mount).ok()).map(drop)
    }
}
