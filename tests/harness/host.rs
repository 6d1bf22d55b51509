//! A host half of the tests' own: `guestlet-host` with a settings file made for some VMs, and `guestctl`
//! asking it.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::process::{Process, RunFolder};
use super::tools::program;
use super::vm::{BOOT, Vm};
use super::wait_for;

/// The host half and its settings. Dropping it kills it.
#[derive(Debug)]
pub struct HostHalf {
    process: Option<Process>,
    folder: RunFolder,
}

/// A VM as the host half is told of it.
#[derive(Debug, Clone)]
pub struct Listed {
    name: String,
    uuid: String,
    cluster: String,
    vsock: PathBuf,
    qmp: Option<PathBuf>,
    /// Its hardware address, if the host is to know it.
    hardware: Option<String>,
}

impl Listed {
    /// As the VM is.
    pub fn of(vm: &Vm) -> Self {
        Self {
            name: vm.name().into(),
            uuid: vm.uuid().into(),
            cluster: "test".into(),
            vsock: vm.vsock_socket(),
            qmp: Some(vm.host_qmp()),
            hardware: None,
        }
    }

    /// With an interface of this hardware address, in the network `nat`.
    #[must_use]
    pub fn hardware(self, address: &str) -> Self {
        Self { hardware: Some(address.to_owned()), ..self }
    }

    /// A VM that may be started later or by somebody else: its hybrid vsock socket will be there. The host half is not told of a
    /// monitor.
    pub fn at(name: &str, uuid: &str, vsock: PathBuf) -> Self {
        Self {
            name: name.into(),
            uuid: uuid.into(),
            cluster: "test".into(),
            vsock,
            qmp: None,
            hardware: None,
        }
    }

    /// With another UUID than the VM's.
    #[must_use]
    pub fn uuid(mut self, uuid: &str) -> Self {
        uuid.clone_into(&mut self.uuid);
        self
    }

    /// In that cluster.
    #[must_use]
    pub fn cluster(mut self, cluster: &str) -> Self {
        cluster.clone_into(&mut self.cluster);
        self
    }
}

impl HostHalf {
    /// Starts it for these VMs.
    pub fn start(vms: &[Listed]) -> anyhow::Result<Self> {
        Self::start_with(vms, "")
    }

    /// The same with these lines in its settings, which are of no table.
    pub fn start_with(vms: &[Listed], lines: &str) -> anyhow::Result<Self> {
        let mut half = Self { process: None, folder: RunFolder::new()? };
        let (socket, volumes, pool) = (json!(half.socket()), json!(half.volumes()), json!(half.pool()));
        let trust = json!(half.folder.file("trust"));
        let mut settings =
            format!("socket = {socket}\nvolumes-dir = {volumes}\ntrust.state-dir = {trust}\n{lines}");
        write!(settings, "\n[[pool]]\nname = \"fast\"\npath = {pool}\n")?;
        for Listed { name, uuid, cluster, vsock, qmp, hardware } in vms {
            // A JSON string is a TOML string as well.
            let vsock = json!(vsock);
            write!(settings, "\n[[vm]]\nname = {name:?}\nuuid = {uuid:?}\ncluster = {cluster:?}\n")?;
            writeln!(settings, "vsock-socket = {vsock}")?;
            if let Some(qmp) = qmp {
                writeln!(settings, "qmp = {}", json!(qmp))?;
            }
            if let Some(hardware) = hardware {
                writeln!(settings, "networks = {{ {hardware:?} = \"nat\" }}")?;
            }
        }
        std::fs::write(half.settings(), settings)?;
        half.launch()?;
        Ok(half)
    }

    fn launch(&mut self) -> anyhow::Result<()> {
        let arguments = ["--config".to_owned(), self.settings().display().to_string()];
        let process = Process::start(&program("guestlet-host")?, &arguments, &self.folder.file("log"))?;
        let socket = self.socket();
        let answers = wait_for("answer of guestlet-host", Duration::from_secs(10), || {
            (process.ended().is_some() || UnixStream::connect(&socket).is_ok()).then_some(())
        });
        if answers.is_err() || process.ended().is_some() {
            bail!("guestlet-host does not run: {}", self.log());
        }
        self.process = Some(process);
        Ok(())
    }

    /// Stops it as systemd does and starts it again.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        if let Some(process) = self.process.take() {
            let status = process.terminate(Duration::from_secs(15))?;
            if !status.success() {
                bail!("guestlet-host ended with {status}: {}", self.log());
            }
        }
        self.launch()
    }

    /// Kills it and starts it again.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.process = None;
        self.launch()
    }

    /// Says, in a drop-in of the settings, in which zone this host is from now on.
    pub fn place(&self, zone: &str) -> anyhow::Result<()> {
        let folder = self.folder.file("host.d");
        std::fs::create_dir_all(&folder)?;
        let beside = folder.join("zone.new");
        std::fs::write(&beside, format!("[topology]\nregion = \"eu\"\nzone = {zone:?}\n"))?;
        Ok(std::fs::rename(beside, folder.join("zone.toml"))?)
    }

    /// Waits until the guest of this name has acknowledged the zone, and says how long that took.
    pub fn wait_placed(&self, name: &str, zone: &str, limit: Duration) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        wait_for(&format!("{name} in zone {zone}"), limit, || {
            let all: Value = serde_json::from_str(&self.ctl(&["topology", "-o", "json"]).ok()?).ok()?;
            let mut vms = all["virtual_machines"].as_array()?.iter();
            let vm = vms.find(|vm| vm["name"] == name)?;
            (vm["topology"]["acknowledged"]["zone"] == zone).then_some(())
        })?;
        Ok(begun.elapsed())
    }

    /// The socket that guestctl asks.
    pub fn socket(&self) -> PathBuf {
        self.folder.file("api.sock")
    }

    /// The folder of its volumes.
    pub fn volumes(&self) -> PathBuf {
        self.folder.file("volumes")
    }

    /// The folder of its clusters' volumes.
    pub fn pool(&self) -> PathBuf {
        self.folder.file("pool")
    }

    /// What is in that folder, but for hidden files.
    pub fn pool_files(&self) -> anyhow::Result<Vec<String>> {
        let names =
            std::fs::read_dir(self.pool())?.map(|entry| Ok(entry?.file_name().to_string_lossy().into()));
        Ok(names
            .collect::<anyhow::Result<Vec<String>>>()?
            .into_iter()
            .filter(|name| !name.starts_with('.'))
            .collect())
    }

    /// Its settings file.
    pub fn settings(&self) -> PathBuf {
        self.folder.file("host.toml")
    }

    /// All that it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.file("log")).unwrap_or_default()
    }

    /// Runs guestctl; gives what it printed.
    ///
    /// # Errors
    /// If it fails, with what it said.
    pub fn ctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output =
            Command::new(program("guestctl")?).arg("--socket").arg(self.socket()).args(arguments).output()?;
        if !output.status.success() {
            bail!("guestctl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The page that Prometheus reads at this path.
    pub fn page(&self, path: &str) -> anyhow::Result<String> {
        let mut stream = UnixStream::connect(self.folder.file("metrics.sock"))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("half an answer")?;
        if !head.contains(" 200 ") {
            bail!("{path}: {head}\n{body}");
        }
        Ok(body.to_owned())
    }

    /// All VMs, as `guestctl ls` gives them to programs.
    pub fn list(&self) -> anyhow::Result<Vec<Value>> {
        Ok(serde_json::from_str(&self.ctl(&["ls", "-o", "json"])?)?)
    }

    /// One VM, as `guestctl info` gives it to programs.
    pub fn info(&self, name: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.ctl(&["info", name, "-o", "json"])?)?)
    }

    /// Waits until a VM is as `wanted` says; gives it and the time that took.
    pub fn wait(
        &self,
        name: &str,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<(Value, Duration)> {
        let started = Instant::now();
        let mut last = Value::Null;
        let found = wait_for(&format!("{name} {what}"), limit, || {
            last = self.info(name).unwrap_or_else(|error| Value::String(format!("{error:#}")));
            wanted(&last).then(|| last.clone())
        });
        match found {
            Ok(found) => Ok((found, started.elapsed())),
            Err(error) => Err(error)
                .with_context(|| format!("last seen: {last}\nlog of guestlet-host:\n{}", self.log())),
        }
    }

    /// Waits until a session with a VM's agent is open.
    pub fn wait_connected(&self, name: &str, limit: Duration) -> anyhow::Result<(Value, Duration)> {
        self.wait(name, "connected", limit, |vm| vm["session"] == "connected")
    }

    /// Resets a VM and waits until a session with the agent of its next boot is open; gives what is known of it then,
    /// and the time that took.
    pub fn reset(&self, vm: &Vm) -> anyhow::Result<(Value, Duration)> {
        let before = vm.boot_id()?;
        vm.reset()?;
        self.wait(vm.name(), "connected again", BOOT, |now| {
            now["session"] == "connected" && now["guest"]["boot_id"] != before.as_str()
        })
    }

    /// Watches a VM's events.
    pub fn watch(&self, name: &str, how: &[&str]) -> anyhow::Result<Watch> {
        let mut arguments =
            vec!["--socket".to_owned(), self.socket().display().to_string(), "watch".into(), name.into()];
        arguments.extend(how.iter().map(|word| (*word).to_owned()));
        Watch::start(&program("guestctl")?, &arguments, &self.folder.file("watch.log"))
    }
}

impl Drop for HostHalf {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("──── guestlet-host ────\n{}", self.log());
        }
    }
}

/// A running `guestctl watch`.
#[derive(Debug)]
pub struct Watch {
    lines: Receiver<String>,
    _process: Process,
}

impl Watch {
    fn start(program: &Path, arguments: &[String], log: &Path) -> anyhow::Result<Self> {
        let (process, output) = Process::start_piped(program, arguments, log)?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Ok(Self { lines, _process: process })
    }

    /// The next line within `limit`.
    pub fn next(&self, limit: Duration) -> Option<String> {
        self.lines.recv_timeout(limit).ok()
    }
}
