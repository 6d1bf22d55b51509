//! libvirt drives a real guest: a libvirtd of the tests' own, one domain in it, and virsh. The daemon has PID and
//! mount namespaces of its own (tests/setup/libvirtd.sh), so that its files are in the domain's folder, and QEMU
//! ends with it however the test ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::console::Console;
use super::images::{Images, text};
use super::process::{Process, RunFolder};
use super::snapshot::{Saved, new_disk};
use super::tools::{self, QEMU, run, script};
use super::turns::{self, Beside};
use super::vm::{BOOT, SOON};
use super::wait_for;

/// Longer than anything that virsh is asked here takes.
const PATIENCE: &str = "90";
const MEMORY: u32 = 512;
/// Size of the second disk.
const DATA: &str = "256M";

/// A domain that libvirt runs: two virtual processors, the root file system on `vda` (virtio) and an empty disk with
/// an ext4 file system called `data` on `sda` (SCSI, serial [`SERIAL`]), and the guest agent's channel.
/// Dropping it ends the daemon and QEMU.
#[derive(Debug)]
pub struct Domain {
    name: String,
    console: Console,
    _daemon: Process,
    tree: PathBuf,
    folder: RunFolder,
    _turn: Beside,
}

/// Serial of the second disk.
pub const SERIAL: &str = "data-1";
/// Hardware address of the network card.
pub const CARD: &str = "52:54:00:12:34:56";

/// What was asked of an agent, and what it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// The request.
    pub asked: String,
    /// The lines that came until the next request.
    pub answered: Vec<String>,
}

impl Domain {
    /// Starts a saved guest afresh, from its disk. It is booting. `edited` makes the domain's XML of the usual one.
    pub fn start(
        name: &str,
        images: &Images,
        saved: &Saved,
        edited: impl FnOnce(&str) -> String,
    ) -> anyhow::Result<Self> {
        let turn = turns::beside();
        let tree = tools::libvirt()?;
        let folder = RunFolder::new()?;
        let file = |name: &str| folder.file(name);
        new_disk(&saved.disk, &file("disk.qcow2"))?;
        run(Path::new("truncate"), &["-s", DATA, text(&file("data.raw"))?])?;
        run(Path::new("mke2fs"), &["-q", "-t", "ext4", "-L", "data", text(&file("data.raw"))?])?;
        std::fs::write(file("domain.xml"), edited(&description(name, images, &file)?))?;
        let daemon = start_daemon(&tree, &folder)?;
        let console = Console::new(file("console.sock"), file("console.log"));
        let domain = Self { name: name.to_owned(), console, _daemon: daemon, tree, folder, _turn: turn };
        wait_for("answer of libvirtd", SOON, || domain.virsh(&["version"]).ok())
            .with_context(|| domain.log())?;
        domain.virsh(&["define", text(&domain.folder.file("domain.xml"))?])?;
        domain.verb("start", &[])?;
        Ok(domain)
    }

    /// Runs virsh to its end and gives what it printed.
    ///
    /// # Errors
    /// With what it said if it fails.
    pub fn virsh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let socket = self.folder.file("run/libvirt-sock");
        let output = Command::new("timeout")
            .args(["--signal=KILL", PATIENCE])
            .arg(self.tree.join("usr/bin/virsh"))
            .args(["--quiet", "--connect", &format!("qemu:///system?socket={}", text(&socket)?)])
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.tree.join("usr/lib/x86_64-linux-gnu"))
            .output()
            .context("cannot run virsh")?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("virsh {}: {} {}", arguments.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A verb of virsh for this domain.
    pub fn verb(&self, verb: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let mut all = vec![verb, &self.name];
        all.extend(arguments);
        self.virsh(&all)
    }

    /// What virsh prints as lines of `name : value`.
    pub fn table(&self, verb: &str, arguments: &[&str]) -> anyhow::Result<BTreeMap<String, String>> {
        let lines = self.verb(verb, arguments)?;
        let pair =
            |line: &str| line.split_once(':').map(|(name, value)| (name.trim().into(), value.trim().into()));
        Ok(lines.lines().filter_map(pair).collect())
    }

    /// Sends a QGA command as it is, by `virsh qemu-agent-command`, and gives what it returns.
    pub fn agent(&self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments }).to_string();
        let mut answer: Value = serde_json::from_str(&self.verb("qemu-agent-command", &[&request])?)?;
        Ok(answer["return"].take())
    }

    /// Waits until the agent has the channel open and answers.
    pub fn wait_agent(&self) -> anyhow::Result<()> {
        wait_for("agent on the domain's channel", BOOT, || {
            self.verb("dumpxml", &[]).ok()?.contains("state='connected'").then_some(())
        })?;
        // It may have been open for a moment only, by the agent of a guest that goes down.
        wait_for("answer of the agent", SOON, || self.agent("guest-ping", &json!({})).ok()).map(drop)
    }

    /// Waits until the domain is in that state.
    pub fn wait_state(&self, state: &str, limit: Duration) -> anyhow::Result<()> {
        wait_for(&format!("state {state:?}"), limit, || {
            (self.verb("domstate", &[]).ok()?.trim() == state).then_some(())
        })
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

    /// The serial console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// A file in the domain's folder. The second disk is `data.raw`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.file(name)
    }

    /// All that libvirtd logged.
    pub fn log(&self) -> String {
        let read = |name| std::fs::read_to_string(self.folder.file(name)).unwrap_or_default();
        format!("{}{}", read("daemon.log"), read("log/libvirtd.log"))
    }

    /// What libvirt asked agents so far, and what they answered.
    pub fn exchanges(&self) -> Vec<Exchange> {
        let mut exchanges: Vec<Exchange> = Vec::new();
        for line in self.log().lines() {
            if let Some((_, rest)) = line.split_once("Send command '") {
                let asked = rest.rsplit_once("' for write").map_or(rest, |(asked, _)| asked);
                exchanges.push(Exchange { asked: asked.to_owned(), answered: Vec::new() });
            } else if let Some((_, rest)) = line.split_once(": Line [")
                && let Some(last) = exchanges.last_mut()
            {
                last.answered.push(rest.trim_end_matches(']').to_owned());
            }
        }
        exchanges
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("──── console of {} ────\n{}", self.name, self.console.tail(60));
            let log = self.log();
            let log: Vec<_> = log.lines().filter(|line| !line.contains(": debug :")).collect();
            eprintln!("──── libvirtd ────\n{}", log[log.len().saturating_sub(40)..].join("\n"));
        }
    }
}

fn start_daemon(tree: &Path, folder: &RunFolder) -> anyhow::Result<Process> {
    let namespaces =
        ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--propagation", "private"];
    let program = script("libvirtd.sh");
    let folder_path = folder.file("");
    let paths = [text(&program)?, text(tree)?, text(&folder_path)?];
    let arguments: Vec<_> = namespaces.into_iter().chain(paths).map(str::to_owned).collect();
    Process::start(Path::new("unshare"), &arguments, &folder.file("daemon.log"))
}

/// The domain's XML. Suspending is offered to the guest; cloud-init has done its work at the first boot.
fn description(name: &str, images: &Images, file: &impl Fn(&str) -> PathBuf) -> anyhow::Result<String> {
    let kind = if images.accelerator == "kvm" { "kvm" } else { "qemu" };
    let emulator = run(Path::new("which"), &[QEMU])?;
    let path = |path: &Path| path.display().to_string().replace('&', "&amp;").replace('\'', "&apos;");
    let (kernel, initrd) = (path(&images.kernel()), path(images.initrd()));
    let (disk, data) = (path(&file("disk.qcow2")), path(&file("data.raw")));
    let (console, log) = (path(&file("console.sock")), path(&file("console.log")));
    let emulator = emulator.trim();
    Ok(format!(
        "<domain type='{kind}'>
  <name>{name}</name>
  <memory unit='MiB'>{MEMORY}</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>console=ttyS0 quiet testguest.root=/dev/vda cloud-init=disabled</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='maximum'/>
  <pm><suspend-to-mem enabled='yes'/><suspend-to-disk enabled='yes'/></pm>
  <devices>
    <emulator>{emulator}</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='unsafe'/><source file='{disk}'/><target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='unsafe' discard='unmap'/><source file='{data}'/>
      <target dev='sda' bus='scsi'/><serial>{SERIAL}</serial>
    </disk>
    <controller type='scsi' index='0' model='virtio-scsi'/>
    <controller type='usb' model='none'/>
    <interface type='user'><mac address='{CARD}'/><model type='virtio'/></interface>
    <serial type='unix'><source mode='bind' path='{console}'/><log file='{log}'/><target port='0'/></serial>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <memballoon model='none'/>
  </devices>
</domain>
"
    ))
}
