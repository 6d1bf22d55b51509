//! A running VM: QEMU, its vsock device and all its sockets ([`launch`](super::launch) starts it). Dropping it ends both and removes its files; if
//! that happens because a test panicked, it shows what the guest and QEMU said last.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::console::Console;
use super::forward::couple;
use super::gate::Gate;
use super::launch::start_vsock;
use super::process::{Process, RunFolder};
use super::qemu::VSOCK_BUS;
use super::qga::QgaClient;
use super::qmp::Qmp;
use super::turns::Beside;
use super::wait_for;

/// How long an emulated guest may take for anything short of a boot.
pub const SOON: Duration = Duration::from_secs(120);
/// How long a boot may take.
pub const BOOT: Duration = Duration::from_secs(300);

/// Bytes of a file that one command line writes.
const AT_ONCE: usize = 800;

/// What a guest prints on its console when it is up.
pub const FAST_READY: &str = "testguest: ready";
/// The same of a real guest.
pub const REAL_READY: &str = "testguest: cloud-init done";

/// A running VM.
#[derive(Debug)]
pub struct Vm {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) cid: Option<u32>,
    pub(super) qmp: Qmp,
    pub(super) console: Console,
    pub(super) qemu: Process,
    pub(super) vhost: Option<Process>,
    pub(super) gate: Option<Gate>,
    pub(super) folder: RunFolder,
    pub(super) _turn: Beside,
}

/// Connects to a port of the guest whose vsock this is the host's end of.
fn dial(vsock: &Path, port: u32) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\n") {
        let mut byte = [0];
        if stream.read(&mut byte)? == 0 {
            bail!("nobody listens on vsock port {port}");
        }
        answer.extend(byte);
    }
    if !answer.starts_with(b"OK ") {
        bail!("the vsock device says {:?}", String::from_utf8_lossy(&answer));
    }
    Ok(stream)
}

/// What a program wrote to its log.
pub(super) fn said(log: &Path) -> String {
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

    /// Which of its boots the guest is in.
    pub fn boot_id(&self) -> anyhow::Result<String> {
        Ok(self.run("cat /proc/sys/kernel/random/boot_id")?.trim().to_owned())
    }

    /// Resets the machine, and waits until the guest is far enough into its next boot to run commands.
    pub fn reset_and_wait(&self) -> anyhow::Result<()> {
        let before = self.boot_id()?;
        self.reset()?;
        wait_for("the guest's next boot", BOOT, || self.boot_id().ok().filter(|now| *now != before)).map(drop)
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

    /// Writes a small file in the guest.
    pub fn write(&self, path: &str, contents: &[u8]) -> anyhow::Result<()> {
        let nothing: Option<&[u8]> = contents.is_empty().then_some(&[]);
        for (place, part) in contents.chunks(AT_ONCE).chain(nothing).enumerate() {
            let mut octal = String::new();
            for byte in part {
                write!(octal, "\\{byte:03o}")?;
            }
            let how = if place == 0 { ">" } else { ">>" };
            self.run(&format!("printf '{octal}' {how} {path}"))?;
        }
        Ok(())
    }

    /// Serves connections that the guest makes to this port of its host, each with one to `address`: until the VM ends,
    /// and whatever vsock device it has.
    pub fn forward(&self, port: u32, address: SocketAddr) -> anyhow::Result<()> {
        let listener = UnixListener::bind(self.file(&format!("vhost.uds_{port}")))?;
        std::thread::spawn(move || {
            for from_guest in listener.incoming().map_while(Result::ok) {
                let Ok(to_server) = TcpStream::connect(address) else { continue };
                std::thread::spawn(move || couple(&from_guest, &to_server));
            }
        });
        Ok(())
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
        dial(&self.vsock_socket(), port).with_context(|| format!("{} cannot be reached", self.name))
    }

    /// Serves connections at a unix socket, each with one to this vsock port of the guest: until the test ends, and
    /// whatever vsock device the guest has. Where it listens.
    pub fn reach(&self, port: u32) -> anyhow::Result<PathBuf> {
        let (socket, vsock) = (self.file(&format!("port-{port}.sock")), self.vsock_socket());
        let listener = UnixListener::bind(&socket)?;
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let vsock = vsock.clone();
                std::thread::spawn(move || {
                    let Ok(guest) = dial(&vsock, port) else { return };
                    drop(guest.set_read_timeout(None));
                    couple(&guest, &client);
                });
            }
        });
        Ok(socket)
    }

    /// Plugs a disk that the guest may only read, with what is in this file on it.
    pub fn plug_read_only(&self, name: &str, file: &Path) -> anyhow::Result<()> {
        let file = json!({ "driver": "file", "filename": file, "read-only": true });
        let node = json!({ "driver": "raw", "node-name": name, "file": file, "read-only": true });
        self.qmp.execute("blockdev-add", node)?;
        let device =
            json!({ "driver": "scsi-hd", "id": format!("{name}0"), "bus": "scsi0.0", "drive": name });
        self.qmp.execute("device_add", device).map(drop)
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

    /// Goes on with a state that [`Vm::save`] has saved, of a VM whose vsock device was unplugged before.
    pub fn restore(&self, memory: &Path) -> anyhow::Result<()> {
        let command = format!("exec:cat {}", super::qemu::shell_quoted(memory));
        self.qmp.execute("migrate-incoming", json!({ "uri": command }))?;
        self.finish_restore()
    }

    /// Moves the guest to the QEMU of `to`, and ends this one. The guest stands still meanwhile: QEMU 7.2 loses what an emulated
    /// processor writes to memory that is being moved, and the guest's kernel crashes. QEMU cannot move a vhost-user-vsock device: the guest
    /// loses this one, and gets that of `to`, with another address. A kernel's vhost-vsock device tells the guest to drop its
    /// connections and to look at its address again.
    pub fn move_to(&mut self, to: &Self) -> anyhow::Result<()> {
        self.unplug_vsock()?;
        let uri = json!({ "uri": format!("unix:{}", to.file("incoming.sock").display()) });
        to.qmp.execute("migrate-incoming", uri.clone())?;
        self.qmp.execute("stop", json!({}))?;
        self.qmp.execute("migrate-set-parameters", json!({ "max-bandwidth": 1u64 << 34 }))?;
        self.qmp.execute("migrate", uri)?;
        self.wait_migrated()?;
        to.finish_restore()?;
        self.qmp.execute("quit", json!({}))?;
        self.wait_off(SOON)
    }

    /// Waits until the saved state is loaded, plugs vsock and lets the guest run.
    pub(super) fn finish_restore(&self) -> anyhow::Result<()> {
        self.wait_migrated()?;
        if self.vhost.is_some() {
            self.plug_vsock()?;
        }
        self.qmp.execute("cont", json!({})).map(drop)
    }

    /// Plugs the processor that there is room for, and waits until the guest has seen it. It is not online yet.
    pub fn plug_processor(&self) -> anyhow::Result<()> {
        let places = self.qmp.execute("query-hotpluggable-cpus", json!({}))?;
        let free = places.as_array().into_iter().flatten().find(|place| place.get("qom-path").is_none());
        let free = free.with_context(|| format!("there is no room for a processor: {places}"))?;
        let mut device = free["props"].clone();
        device["driver"] = free["type"].clone();
        device["id"] = json!("processor1");
        self.qmp.execute("device_add", device)?;
        wait_for("the processor", SOON, || self.run("test -e /sys/devices/system/cpu/cpu1/online").ok())
            .map(drop)
    }

    /// Takes the vsock device away, as a migration does.
    pub fn unplug_vsock(&mut self) -> anyhow::Result<()> {
        self.gate = None;
        self.qmp.execute("device_del", json!({ "id": "vsock0" }))?;
        self.qmp.wait_event("DEVICE_DELETED", SOON)?;
        wait_for("release of the vsock device", SOON, || {
            self.qmp.execute("chardev-remove", json!({ "id": "vsock" })).ok()
        })?;
        self.vhost = None;
        self.cid = None;
        for name in ["vhost.sock", "vhost.uds"] {
            drop(std::fs::remove_file(self.file(name)));
        }
        drop(std::fs::remove_file(self.vsock_socket()));
        Ok(())
    }

    /// Gives the guest another vsock device, with another address.
    pub fn replug_vsock(&mut self) -> anyhow::Result<()> {
        (self.cid, self.vhost) = start_vsock(&self.folder)?;
        self.plug_vsock()?;
        self.gate =
            Some(Gate::start(self.vsock_socket(), self.file("vhost.uds"), &self.file("qmp-gate.sock"))?);
        Ok(())
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

    /// For a restored guest, which thinks that it is still the time when it was saved.
    pub(super) fn set_clock(&self) -> anyhow::Result<()> {
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
