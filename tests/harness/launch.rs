//! Starts a VM: which guest, from what, with which devices.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Context as _;

use super::console::Console;
use super::gate::Gate;
use super::images::{self, Images};
use super::process::{Process, RunFolder};
use super::qemu::{Machine, PROCESSORS};
use super::qmp::Qmp;
use super::snapshot::{self, Saved, new_disk};
use super::tools::{QEMU, run_script, vhost_device_vsock};
use super::turns;
use super::vm::{Vm, said};
use super::wait_for;

/// MiB of memory of every guest.
const MEMORY: u32 = 512;

/// What kind of VM to start.
#[derive(Debug, Clone)]
pub struct Options {
    name: String,
    uuid: String,
    processors: u32,
    vsock: bool,
    vsock_module: bool,
    words: Vec<String>,
    user_data: Option<String>,
    more: Vec<String>,
    is_awaited: bool,
}

impl Options {
    /// A VM with a random UUID, one processor and vsock.
    pub fn named(name: &str) -> Self {
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
        Self {
            name: name.to_owned(),
            uuid: uuid.trim().to_owned(),
            processors: 1,
            vsock: true,
            vsock_module: true,
            words: Vec::new(),
            user_data: None,
            more: Vec::new(),
            is_awaited: false,
        }
    }

    /// Without a vsock device.
    #[must_use]
    pub fn without_vsock(mut self) -> Self {
        self.vsock = false;
        self
    }

    /// Without the kernel's modules of vsock in the first user land. A real guest has them on its disk as well.
    #[must_use]
    pub fn without_vsock_module(mut self) -> Self {
        self.vsock_module = false;
        self
    }

    /// With as many processors as there is room for. A restored guest has one, and gets another one only by
    /// [`Vm::plug_processor`].
    #[must_use]
    pub fn all_processors(mut self) -> Self {
        self.processors = PROCESSORS;
        self
    }

    /// With that SMBIOS UUID.
    #[must_use]
    pub fn uuid(mut self, uuid: &str) -> Self {
        uuid.clone_into(&mut self.uuid);
        self
    }

    /// Its SMBIOS UUID.
    pub fn its_uuid(&self) -> &str {
        &self.uuid
    }

    /// Without cloud-init, which has had its turn on the disk that it boots from, or is not wanted.
    #[must_use]
    pub fn without_cloud_init(mut self) -> Self {
        self.words.push("cloud-init=disabled".into());
        self
    }

    /// A fast guest whose agent the test starts.
    #[must_use]
    pub fn without_agent_at_boot(mut self) -> Self {
        self.words.push("testguest.agent=no".into());
        self
    }

    /// With that user data for cloud-init, and packages on the disk named `PACKAGES`.
    #[must_use]
    pub fn user_data(mut self, text: &str) -> Self {
        self.user_data = Some(text.to_owned());
        self
    }

    /// With more options of QEMU, which change no device: a saved guest has the devices that it was saved with.
    #[must_use]
    pub fn qemu(mut self, options: Vec<String>) -> Self {
        self.more = options;
        self
    }

    /// Starts the fast guest with an agent in it; its host name is the VM's name. It is not up yet.
    pub fn fast(self, images: &Images, agent: &Path) -> anyhow::Result<Vm> {
        let initrd = images.initrd_with_agent(agent)?;
        self.start(images, initrd, Source::Memory)
    }

    /// Starts the machine of a fast guest that is still elsewhere: it goes on here once [`Vm::move_to`] or [`Vm::restore`] has
    /// brought its memory.
    pub fn awaited(mut self, images: &Images, agent: &Path) -> anyhow::Result<Vm> {
        self.more.extend(["-incoming", "defer"].map(str::to_owned));
        self.is_awaited = true;
        self.fast(images, agent)
    }

    /// Starts the fast guest without an agent.
    pub fn bare(self, images: &Images) -> anyhow::Result<Vm> {
        self.start(images, images.initrd().to_owned(), Source::Memory)
    }

    /// Boots a real guest from a disk, which stays as it is; cloud-init gives it the VM's name.
    pub fn real(self, images: &Images, disk: &Path) -> anyhow::Result<Vm> {
        let initrd = self.initrd(images)?;
        self.start(images, initrd, Source::Disk(disk))
    }

    /// Restores a saved real guest: it runs, and vsock is plugged, when this returns.
    pub fn restored(self, images: &Images, saved: &Saved) -> anyhow::Result<Vm> {
        // That is for its next boot.
        let mut options = self.uuid(snapshot::UUID).without_cloud_init();
        options.processors = 1;
        let initrd = options.initrd(images)?;
        let vm = options.start(images, initrd, Source::Saved(saved))?;
        vm.set_clock()?;
        Ok(vm)
    }

    fn initrd(&self, images: &Images) -> anyhow::Result<PathBuf> {
        if self.vsock_module { Ok(images.initrd().to_owned()) } else { images.initrd_without_vsock() }
    }

    fn start(mut self, images: &Images, initrd: PathBuf, source: Source<'_>) -> anyhow::Result<Vm> {
        let turn = turns::beside();
        // Without it a guest that is emulated on a busy machine may find that its timer does not work, and panic.
        self.words.push("no_timer_check".into());
        let folder = RunFolder::new()?;
        let disk = match source {
            Source::Memory => {
                self.words.push(format!("testguest.name={}", self.name));
                None
            }
            Source::Disk(base) => {
                let seed = folder.file("seed.iso");
                let mut arguments = vec![self.name.as_str(), images::text(&seed)?];
                let user_data = folder.file("user-data");
                if let Some(text) = &self.user_data {
                    std::fs::write(&user_data, text)?;
                    arguments.push(images::text(&user_data)?);
                }
                run_script("seed.sh", &arguments)?;
                Some((base, seed))
            }
            Source::Saved(saved) => Some((&*saved.disk, saved.seed.clone())),
        };
        let disk = match disk {
            Some((base, seed)) => {
                self.words.push("testguest.root=/dev/vda".into());
                new_disk(base, &folder.file("disk.qcow2"))?;
                Some((folder.file("disk.qcow2"), seed))
            }
            None => None,
        };
        let restore = if let Source::Saved(saved) = source { Some(saved.memory.clone()) } else { None };
        let (cid, vhost) = if self.vsock { start_vsock(&folder)? } else { (None, None) };
        let machine = Machine {
            name: self.name.clone(),
            uuid: self.uuid.clone(),
            accelerator: images.accelerator,
            processors: self.processors,
            memory: MEMORY,
            kernel: images.kernel(),
            initrd,
            words: self.words,
            disk,
            vsock: (vhost.is_some() && restore.is_none() && !self.is_awaited)
                .then(|| folder.file("vhost.sock")),
            restore,
        };
        let mut arguments = machine.arguments(|name| folder.file(name));
        arguments.extend(self.more);
        let qemu = Process::start(Path::new(QEMU), &arguments, &folder.file("qemu.log"))?;
        let qmp = Qmp::connect(&folder.file("qmp.sock")).with_context(|| said(&folder.file("qemu.log")))?;
        let console = Console::new(folder.file("console.sock"), folder.file("console.log"));
        let gate = None;
        let mut vm = Vm {
            name: self.name,
            uuid: self.uuid,
            cid,
            qmp,
            console,
            qemu,
            vhost,
            gate,
            folder,
            _turn: turn,
        };
        if machine.restore.is_some() {
            vm.finish_restore()?;
        }
        if vm.vhost.is_some() {
            let monitor = vm.file("qmp-gate.sock");
            vm.gate = Some(Gate::start(vm.vsock_socket(), vm.file("vhost.uds"), &monitor)?);
        }
        Ok(vm)
    }
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Memory,
    Disk(&'a Path),
    Saved(&'a Saved),
}

pub(super) fn start_vsock(folder: &RunFolder) -> anyhow::Result<(Option<u32>, Option<Process>)> {
    static NEXT: AtomicU32 = AtomicU32::new(3);
    let cid = NEXT.fetch_add(1, Ordering::Relaxed);
    let (socket, uds) = (folder.file("vhost.sock"), folder.file("vhost.uds"));
    let arguments = [
        "--guest-cid",
        &cid.to_string(),
        "--socket",
        images::text(&socket)?,
        "--uds-path",
        images::text(&uds)?,
    ]
    .map(str::to_owned);
    let vhost = Process::start(&vhost_device_vsock()?, &arguments, &folder.file("vhost.log"))?;
    wait_for("vsock device", Duration::from_secs(10), || socket.exists().then_some(()))
        .with_context(|| said(&folder.file("vhost.log")))?;
    Ok((Some(cid), Some(vhost)))
}
