//! A running VM: QEMU, its vsock device and all its sockets. Dropping it ends both and removes its files; if
//! that happens because a test panicked, it shows what the guest and QEMU said last.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::console::Console;
use super::gate::Gate;
use super::images::Images;
use super::process::{Process, RunFolder};
use super::qemu::{Machine, VSOCK_BUS};
use super::qga::QgaClient;
use super::qmp::Qmp;
use super::snapshot::{Saved, new_disk};
use super::tools::{QEMU, run_script, vhost_device_vsock};
use super::{images, wait_for};

/// How long an emulated guest may take for anything short of a boot.
pub const SOON: Duration = Duration::from_secs(30);
/// How long a boot may take.
pub const BOOT: Duration = Duration::from_secs(180);
/// MiB of memory of every guest.
const MEMORY: u32 = 512;

/// What a guest prints on its console when it is up.
pub const FAST_READY: &str = "testguest: ready";
/// The same of a real guest.
pub const REAL_READY: &str = "testguest: cloud-init done";

/// A running VM.
#[derive(Debug)]
pub struct Vm {
    name: String,
    uuid: String,
    cid: Option<u32>,
    qmp: Qmp,
    console: Console,
    qemu: Process,
    vhost: Option<Process>,
    gate: Option<Gate>,
    folder: RunFolder,
}

/// What kind of VM to start.
#[derive(Debug, Clone)]
pub struct Options {
    name: String,
    uuid: String,
    vsock: bool,
    words: Vec<String>,
}

impl Options {
    /// A VM with a random UUID and with vsock.
    pub fn named(name: &str) -> Self {
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
        Self { name: name.to_owned(), uuid: uuid.trim().to_owned(), vsock: true, words: Vec::new() }
    }

    /// Without a vsock device.
    #[must_use]
    pub fn without_vsock(mut self) -> Self {
        self.vsock = false;
        self
    }

    /// With that SMBIOS UUID.
    #[must_use]
    pub fn uuid(mut self, uuid: &str) -> Self {
        uuid.clone_into(&mut self.uuid);
        self
    }

    /// Starts the fast guest with an agent in it; its host name is the VM's name. It is not up yet.
    pub fn fast(self, images: &Images, agent: &Path) -> anyhow::Result<Vm> {
        let initrd = images.initrd_with_agent(agent)?;
        self.start(images, initrd, Source::Memory)
    }

    /// Starts the fast guest without an agent.
    pub fn bare(self, images: &Images) -> anyhow::Result<Vm> {
        self.start(images, images.initrd().to_owned(), Source::Memory)
    }

    /// Boots a real guest from a disk, which stays as it is; cloud-init gives it the VM's name.
    pub fn real(self, images: &Images, disk: &Path) -> anyhow::Result<Vm> {
        self.start(images, images.initrd().to_owned(), Source::Disk(disk))
    }

    /// Restores a saved real guest: it runs, and vsock is plugged, when this returns.
    pub fn restored(self, images: &Images, saved: &Saved) -> anyhow::Result<Vm> {
        let vm = self.uuid(super::snapshot::UUID).start(
            images,
            images.initrd().to_owned(),
            Source::Saved(saved),
        )?;
        vm.set_clock()?;
        Ok(vm)
    }

    fn start(mut self, images: &Images, initrd: PathBuf, source: Source<'_>) -> anyhow::Result<Vm> {
        let folder = RunFolder::new()?;
        let disk = match source {
            Source::Memory => {
                self.words.push(format!("testguest.name={}", self.name));
                None
            }
            Source::Disk(base) => {
                let seed = folder.file("seed.iso");
                run_script("seed.sh", &[&self.name, images::text(&seed)?])?;
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
            memory: MEMORY,
            kernel: images.kernel(),
            initrd,
            words: self.words,
            disk,
            vsock: (vhost.is_some() && restore.is_none()).then(|| folder.file("vhost.sock")),
            restore,
        };
        let arguments = machine.arguments(|name| folder.file(name));
        let qemu = Process::start(Path::new(QEMU), &arguments, &folder.file("qemu.log"))?;
        let qmp = Qmp::connect(&folder.file("qmp.sock")).with_context(|| said(&folder.file("qemu.log")))?;
        let console = Console::new(folder.file("console.sock"), folder.file("console.log"));
        let gate = None;
        let mut vm = Vm { name: self.name, uuid: self.uuid, cid, qmp, console, qemu, vhost, gate, folder };
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

enum Source<'a> {
    Memory,
    Disk(&'a Path),
    Saved(&'a Saved),
}

fn start_vsock(folder: &RunFolder) -> anyhow::Result<(Option<u32>, Option<Process>)> {
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

fn said(log: &Path) -> String {
    std::fs::read_to_string(log).unwrap_or_default().trim().to_owned()
}

impl Vm {
    /// Its name, and the host name of a fast guest.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The SMBIOS UUID that the guest reads. All restored guests have the same.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The guest's vsock address.
    pub fn cid(&self) -> Option<u32> {
        self.cid
    }

    /// The monitor.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The serial console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// QEMU itself.
    pub fn qemu(&self) -> &Process {
        &self.qemu
    }

    /// A second monitor, for the host half.
    pub fn host_qmp(&self) -> PathBuf {
        self.folder.file("qmp-host.sock")
    }

    /// The host's end of the guest agent's virtio-serial port.
    pub fn qga_socket(&self) -> PathBuf {
        self.folder.file("qga.sock")
    }

    /// The host's end of the guest's vsock.
    pub fn vsock_socket(&self) -> PathBuf {
        self.folder.file("vsock.uds")
    }

    /// A file in the VM's folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.file(name)
    }

    /// Waits until the guest has booted `times` times.
    pub fn wait_booted(&self, marker: &str, times: usize) -> anyhow::Result<()> {
        self.console.wait(marker, times, BOOT)
    }

    /// Runs a command line in the guest.
    ///
    /// # Errors
    /// If its status is not 0, with its output.
    pub fn run(&self, command: &str) -> anyhow::Result<String> {
        match self.console.run(command, SOON)? {
            (0, output) => Ok(output),
            (status, output) => bail!("{command:?} ended with {status}: {output}"),
        }
    }

    /// A QGA client that is in step with the agent.
    pub fn qga(&self) -> anyhow::Result<QgaClient> {
        let mut client = QgaClient::connect(&self.qga_socket())?;
        client.synchronize()?;
        Ok(client)
    }

    /// Connects to a vsock port of the guest, as a host does.
    ///
    /// # Errors
    /// If nobody listens there.
    pub fn dial(&self, port: u32) -> anyhow::Result<UnixStream> {
        let mut stream = UnixStream::connect(self.vsock_socket())?;
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\n") {
            let mut byte = [0];
            if stream.read(&mut byte)? == 0 {
                bail!("nobody listens on vsock port {port} of {}", self.name);
            }
            answer.extend(byte);
        }
        match answer.starts_with(b"OK ") {
            true => Ok(stream),
            false => bail!("the vsock device says {:?}", String::from_utf8_lossy(&answer)),
        }
    }

    /// Resets the machine, as its reset button does.
    pub fn reset(&self) -> anyhow::Result<()> {
        self.qmp.execute("system_reset", json!({})).map(drop)
    }

    /// Presses the power button.
    pub fn press_power(&self) -> anyhow::Result<()> {
        self.qmp.execute("system_powerdown", json!({})).map(drop)
    }

    /// Waits until QEMU has ended, as it does when the guest powers off.
    pub fn wait_off(&self, limit: Duration) -> anyhow::Result<()> {
        self.qemu.wait(limit).map(drop)
    }

    /// Saves the machine's state to a file and ends QEMU.
    pub fn save(&self, memory: &Path) -> anyhow::Result<()> {
        let command = format!("exec:cat > {}", super::qemu::shell_quoted(memory));
        self.qmp.execute("stop", json!({}))?;
        self.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 34 }))?;
        self.qmp.execute("migrate", json!({ "uri": command }))?;
        self.wait_migrated()?;
        self.qmp.execute("quit", json!({}))?;
        self.wait_off(SOON)
    }

    fn finish_restore(&self) -> anyhow::Result<()> {
        self.wait_migrated()?;
        if self.vhost.is_some() {
            self.plug_vsock()?;
        }
        self.qmp.execute("cont", json!({})).map(drop)
    }

    fn plug_vsock(&self) -> anyhow::Result<()> {
        let path = self.folder.file("vhost.sock");
        let address = json!({ "type": "unix", "data": { "path": path } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": "vsock", "backend": backend }))?;
        let device =
            json!({ "driver": "vhost-user-vsock-pci", "id": "vsock0", "chardev": "vsock", "bus": VSOCK_BUS });
        self.qmp.execute("device_add", device).map(drop)
    }

    fn wait_migrated(&self) -> anyhow::Result<()> {
        let state = wait_for("saved or restored state", BOOT, || {
            let state = self.qmp.execute("query-migrate", json!({})).unwrap_or_default();
            let ended = matches!(state["status"].as_str(), Some("completed" | "failed"));
            (ended || self.qemu.ended().is_some()).then_some(state)
        })?;
        if state["status"] != "completed" {
            bail!("QEMU cannot save or restore the VM: {state} {}", said(&self.folder.file("qemu.log")));
        }
        Ok(())
    }

    /// A restored guest thinks that it is still the time when it was saved.
    fn set_clock(&self) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        self.run(&format!("date -s @{now:.2}")).map(drop)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let agent = said(&self.folder.file("agent.log"));
            let agent: Vec<_> = agent.lines().rev().take(30).collect();
            eprintln!("──── console of {} ────\n{}", self.name, self.console.tail(80));
            eprintln!("──── agent ────");
            agent.iter().rev().for_each(|line| eprintln!("{line}"));
            eprintln!("──── QEMU ────\n{}", said(&self.folder.file("qemu.log")));
        }
    }
}
