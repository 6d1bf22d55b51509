//! Saved real guests: booted once with cloud-init done, and the same with the agent's package installed by
//! dpkg. Restoring one takes seconds where a boot takes most of a minute.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::json;

use super::cache::{Input, entry, key};
use super::images::{AGENT_SETTINGS, Images, text};
use super::launch::Options;
use super::process::RunFolder;
use super::tools::{qemu_version, run};
use super::turns;
use super::vm::{BOOT, REAL_READY, Vm};
use super::{qemu, wait_for};

/// The UUID of every restored guest: it is in the saved memory.
pub const UUID: &str = "5e1f7e57-0000-4000-8000-000000000001";

/// A real guest's state.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Its disk, also good to boot from.
    pub disk: PathBuf,
    /// Its memory and devices.
    pub memory: PathBuf,
    /// Its cloud-init seed.
    pub seed: PathBuf,
    folder: PathBuf,
}

impl Saved {
    fn at(folder: PathBuf) -> Self {
        let file = |name| folder.join(name);
        Self { disk: file("disk.qcow2"), memory: file("memory"), seed: file("seed.iso"), folder }
    }

    /// The guest after its first boot.
    pub fn booted(images: &Images) -> anyhow::Result<Self> {
        let _turn = turns::beside();
        let root = images.root()?;
        let version = qemu_version()?;
        let words = format!("{version} {} {}", images.accelerator, processor(images)?);
        let parts = [key(root.parent().unwrap_or(&root)), &words, qemu::SOURCE, include_str!("snapshot.rs")];
        let inputs: Vec<_> =
            parts.into_iter().map(Input::Words).chain([Input::File(images.initrd())]).collect();
        let made = entry("booted", &inputs, |folder| {
            let vm = Options::named("real").without_vsock().uuid(UUID).real(images, &root)?;
            vm.wait_booted(REAL_READY, 1)?;
            vm.run("systemctl is-system-running --wait || :")?;
            save(&vm, &vm.file("seed.iso"), folder)
        })?;
        Ok(Self::at(made))
    }

    /// A restored guest's state as it is now, without vsock; the VM ends.
    pub fn now(vm: &Vm, like: &Self, folder: &Path) -> anyhow::Result<Self> {
        save(vm, &like.seed, folder)?;
        Ok(Self::at(folder.to_owned()))
    }

    /// The guest with the package installed and its agent running.
    pub fn installed(images: &Images, package: &Path) -> anyhow::Result<Self> {
        let _turn = turns::beside();
        let before = Self::booted(images)?;
        let inputs = [
            Input::Words(key(&before.folder)),
            Input::File(package),
            Input::Words(AGENT_SETTINGS),
            Input::Words(include_str!("snapshot.rs")),
        ];
        let made = entry("installed", &inputs, |folder| {
            let vm = Options::named("real").without_vsock().restored(images, &before)?;
            install(&vm, package)?;
            save(&vm, &before.seed, folder)
        })?;
        Ok(Self::at(made))
    }
}

/// Installs the package as a person would, from a disk that is plugged for it, and sets what the tests need.
pub fn install(vm: &Vm, package: &Path) -> anyhow::Result<()> {
    let folder = RunFolder::new()?;
    let disk = folder.file("package.iso");
    let graft = format!("/guestlet.deb={}", text(package)?);
    run(Path::new("genisoimage"), &["-quiet", "-rock", "-graft-points", "-output", text(&disk)?, &graft])?;
    let file = json!({ "driver": "file", "filename": disk, "read-only": true });
    vm.qmp().execute(
        "blockdev-add",
        json!({ "driver": "raw", "node-name": "package", "file": file, "read-only": true }),
    )?;
    let device = json!({ "driver": "scsi-hd", "id": "package0", "bus": "scsi0.0", "drive": "package" });
    vm.qmp().execute("device_add", device)?;
    vm.run("for try in $(seq 100); do [ -b /dev/sda ] && break; sleep 0.1; done; mount -o ro /dev/sda /mnt")?;
    let (status, said) = vm.console().run("dpkg -i /mnt/guestlet.deb", BOOT)?;
    if status != 0 {
        bail!("dpkg ended with {status}: {said}");
    }
    vm.run("mkdir -p /etc/guestlet/agent.d")?;
    vm.write("/etc/guestlet/agent.d/tests.toml", AGENT_SETTINGS.as_bytes())?;
    vm.run("systemctl restart guestlet.service && systemctl is-active guestlet.service guestlet.socket")
        .with_context(|| format!("the agent does not run after its installation:\n{said}"))?;
    vm.run("umount /mnt")?;
    vm.qmp().execute("device_del", json!({ "id": "package0" }))?;
    vm.qmp().wait_event("DEVICE_DELETED", Duration::from_secs(20))?;
    wait_for("release of the package's disk", Duration::from_secs(5), || {
        vm.qmp().execute("blockdev-del", json!({ "node-name": "package" })).ok()
    })?;
    Ok(())
}

fn save(vm: &Vm, seed: &Path, folder: &Path) -> anyhow::Result<()> {
    // What is not in memory need not be saved.
    vm.run("journalctl --sync; sync; echo 3 > /proc/sys/vm/drop_caches")?;
    vm.save(&folder.join("memory"))?;
    std::fs::copy(vm.file("disk.qcow2"), folder.join("disk.qcow2"))?;
    std::fs::copy(seed, folder.join("seed.iso"))?;
    Ok(())
}

/// A disk that starts as a copy of `base` and leaves that as it is.
pub fn new_disk(base: &Path, disk: &Path) -> anyhow::Result<()> {
    let format = if base.extension().is_some_and(|extension| extension == "raw") { "raw" } else { "qcow2" };
    let arguments = ["create", "-q", "-f", "qcow2", "-F", format, "-b", text(base)?, text(disk)?, "8G"];
    run(Path::new("qemu-img"), &arguments).map(drop)
}

/// With KVM the guest sees this machine's processor, and can only be restored on one like it.
fn processor(images: &Images) -> anyhow::Result<String> {
    if images.accelerator != "kvm" {
        return Ok(String::new());
    }
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    Ok(text.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_owned())
}
