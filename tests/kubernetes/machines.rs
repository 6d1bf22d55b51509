//! The domains of `KubeVirt`'s VMs: QEMU machines, into which disks are plugged by QMP. A disk is a file, named after its
//! `PersistentVolume`; QEMU's own locks let one machine have it at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::harness::images::Images;
use crate::harness::launch::Options;
use crate::harness::process::RunFolder;
use crate::harness::snapshot::{self, Saved};
use crate::harness::tools;
use crate::harness::vm::{FAST_READY, Vm};
use crate::harness::wait_for;
use crate::model::domain::{Disk, Domain};

/// How soon a machine lets a disk go, however busy this machine is.
const LET_GO: Duration = Duration::from_secs(30);

/// What a machine boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// Debian with systemd and the package, restored as it was when that had been installed.
    Real,
    /// A kernel, and the agent alone.
    Fast,
}

pub struct Machines {
    images: Images,
    installed: Saved,
    agent: PathBuf,
    folder: RunFolder,
    /// Those that run, by the UID of the instance.
    running: Mutex<BTreeMap<String, Arc<Vm>>>,
    /// Instances whose machine has ended.
    ended: Mutex<BTreeSet<String>>,
    changed: Notify,
}

impl Machines {
    pub fn new() -> Self {
        let images = Images::prepare().unwrap();
        let installed = Saved::installed(&images, &tools::package().unwrap()).unwrap();
        let agent = tools::program("guestlet").unwrap();
        Self {
            images,
            installed,
            agent,
            folder: RunFolder::new().unwrap(),
            running: Mutex::default(),
            ended: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// The UUID that a guest reads; restored guests have one for all.
    pub fn uuid(guest: Guest) -> String {
        match guest {
            Guest::Real => snapshot::UUID.to_owned(),
            Guest::Fast => Options::named("vm").its_uuid().to_owned(),
        }
    }

    /// Starts the machine of an instance, and waits until its guest runs.
    pub fn boot(&self, name: &str, guest: Guest, instance: &Value) -> Arc<Vm> {
        let uuid = instance["spec"]["domain"]["firmware"]["uuid"].as_str().unwrap();
        let options = Options::named(name).uuid(uuid);
        let vm = match guest {
            Guest::Real => options.restored(&self.images, &self.installed).unwrap(),
            Guest::Fast => {
                let vm = options.fast(&self.images, &self.agent).unwrap();
                vm.wait_booted(FAST_READY, 1).unwrap();
                vm
            }
        };
        let vm = Arc::new(vm);
        let of = instance["metadata"]["uid"].as_str().unwrap();
        self.running().insert(of.to_owned(), Arc::clone(&vm));
        self.changed.notify_waiters();
        vm
    }

    /// Kills the machine of an instance. Who still asks it something hears that it is gone.
    pub fn kill(&self, instance: &str) {
        self.ended().insert(instance.to_owned());
        let vm = self.running().remove(instance).unwrap();
        vm.qemu().signal(Signal::SIGKILL).unwrap();
        vm.qemu().wait(LET_GO).unwrap();
        self.changed.notify_waiters();
    }

    /// What the disks that are plugged into each machine show as the text of page 83h, as QEMU itself says.
    pub fn plugged(&self) -> Vec<(String, Vec<String>)> {
        let running: Vec<_> = self.running().values().map(Arc::clone).collect();
        // One that was killed a moment ago has none.
        running.iter().map(|vm| (vm.name().to_owned(), plugged_into(vm).unwrap_or_default())).collect()
    }

    /// The machine of an instance, once it runs.
    async fn of(&self, instance: &str) -> Result<Arc<Vm>, String> {
        loop {
            let changed = self.changed.notified();
            if self.ended().contains(instance) {
                return Err("the domain has ended".to_owned());
            }
            if let Some(vm) = self.running().get(instance) {
                return Ok(Arc::clone(vm));
            }
            changed.await;
        }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Vm>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl Domain for Machines {
    async fn plug(&self, disk: &Disk) -> Result<(), String> {
        let vm = self.of(&disk.instance).await?;
        let file = self.folder.file(&disk.persistent_volume);
        let disk = disk.clone();
        work(move || plug(&vm, &file, &disk)).await
    }

    async fn unplug(&self, disk: &Disk) -> Result<(), String> {
        let vm = self.of(&disk.instance).await?;
        let name = name(disk);
        work(move || unplug(&vm, &name)).await
    }

    async fn resize(&self, disk: &Disk) {
        let Ok(vm) = self.of(&disk.instance).await else { return };
        let arguments = json!({ "node-name": name(disk), "size": disk.bytes });
        let resized = work(move || vm.qmp().execute("block_resize", arguments).map(drop)).await;
        resized.unwrap_or_else(|error| eprintln!("{}: {error}", disk.volume));
    }
}

fn plugged_into(vm: &Vm) -> Option<Vec<String>> {
    let blocks = vm.qmp().execute("query-block", json!({})).ok()?;
    let mut texts = Vec::new();
    for path in blocks.as_array()?.iter().filter_map(|one| one["qdev"].as_str()) {
        let property = json!({ "path": path, "property": "device_id" });
        // Of one that is gone by now, or is on another bus, there is none.
        let text = vm.qmp().execute("qom-get", property).unwrap_or_default();
        texts.extend(text.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
    }
    Some(texts)
}

/// Does something to a machine. What fails is tried again, and shown if the program fails.
async fn work(work: impl FnOnce() -> anyhow::Result<()> + Send + 'static) -> Result<(), String> {
    let done = tokio::task::spawn_blocking(work).await.unwrap();
    done.map_err(|error| format!("{error:#}")).inspect_err(|error| eprintln!("a machine: {error}"))
}

/// What the disk is called in QEMU, where names have 31 characters at most.
fn name(disk: &Disk) -> String {
    let characters = disk.persistent_volume.chars().filter(char::is_ascii_alphanumeric);
    format!("v{}", characters.rev().take(24).collect::<String>())
}

fn plug(vm: &Vm, file: &Path, disk: &Disk) -> anyhow::Result<()> {
    let opened = std::fs::File::options().create(true).append(true).open(file)?;
    if opened.metadata()?.len() < disk.bytes {
        opened.set_len(disk.bytes)?;
    }
    let name = name(disk);
    let node = json!({ "driver": "raw", "node-name": name, "file": { "driver": "file", "filename": file } });
    vm.qmp().execute("blockdev-add", node)?;
    let mut device = json!({
        "driver": "scsi-hd",
        "id": name,
        "bus": "scsi0.0",
        "drive": name,
        // As libvirt has it, whether there is a serial number or not.
        "device_id": disk.device_id(),
    });
    if !disk.serial.is_empty() {
        device["serial"] = disk.serial.as_str().into();
    }
    vm.qmp().execute("device_add", device).map(drop).inspect_err(|_| {
        drop(vm.qmp().execute("blockdev-del", json!({ "node-name": name })));
    })
}

fn unplug(vm: &Vm, name: &str) -> anyhow::Result<()> {
    // What was begun before and failed then may be done in part.
    drop(vm.qmp().execute("device_del", json!({ "id": name })));
    wait_for("release of the disk", LET_GO, || {
        let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true })).ok()?;
        let is_there = nodes.as_array()?.iter().any(|node| node["node-name"] == name);
        let is_gone = !is_there || vm.qmp().execute("blockdev-del", json!({ "node-name": name })).is_ok();
        is_gone.then_some(())
    })
}
