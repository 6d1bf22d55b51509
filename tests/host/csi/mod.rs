//! What guests ask of volumes: `csi.v1.Controller`, with pools and a QEMU behind it.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::guest::{Door, Guest, Manner, info};
use crate::hypervisor::Hypervisor;
use crate::lab::{Lab, text, uuid};

mod access;
mod authority;
mod busy;
mod clusters;
mod faults;
mod full;
mod io_errors;
mod life;
pub mod machine;
mod many;
mod mirror;
mod people;
mod places;
mod random;
mod rules;
mod sidecar;

pub use sidecar::{Asking, block, mount, publishing, refused, wait, wanted};

/// A machine with VMs, each with an agent and a QEMU, that have volumes.
pub struct Machines {
    pub lab: Lab,
    vms: HashMap<String, (Guest, Hypervisor)>,
}

/// The pools of most tests: `fast` is raw and thin, `full` is raw and full, `qcow` is qcow2.
const POOLS: [(&str, &str); 3] =
    [("fast", "default = true"), ("full", "allocation = 'full'"), ("qcow", "format = 'qcow2'")];

/// A VM's name, its number and its cluster.
type Vm = (&'static str, u8, &'static str);

/// Two VMs of one cluster, and one of another.
pub const USUAL: [Vm; 3] = [("a", 1, "dev"), ("b", 2, "dev"), ("c", 3, "prod")];

/// A daemon with the pools, these VMs and further settings, and all agents connected.
pub fn started(vms: &[Vm], settings: &str) -> Machines {
    let mut lab = Lab::new();
    for (name, rest) in POOLS {
        let path = text(&lab.path(&format!("pools/{name}")));
        lab = lab.set(&format!("[[pool]]\nname = '{name}'\npath = '{path}'\n{rest}"));
    }
    lab = lab.set(settings);
    let mut running = HashMap::new();
    for (name, number, cluster) in vms {
        let rest = format!(
            "unix-socket = '@{name}.sock'\nqmp = '@{name}.qmp'\n\
             cluster = '{cluster}'"
        );
        lab = lab.vm(name, *number, &rest);
        running.insert((*name).to_owned(), boot(&lab, name, *number));
    }
    let lab = lab.start();
    for (name, ..) in vms {
        lab.until_vm(name, |vm| vm["power"] == "running" && vm["callback"] == "open");
    }
    Machines { lab, vms: running }
}

fn boot(lab: &Lab, name: &str, number: u8) -> (Guest, Hypervisor) {
    let qemu = Hypervisor::start(&lab.path(&format!("{name}.qmp")), &["port1"]);
    let mut info = info(&uuid(number), "boot-1");
    info.capabilities.push("disks".to_owned());
    let path = lab.path(&format!("{name}.sock"));
    (Guest::start(&path, Door::Unix, Manner::Good, info), qemu)
}

impl Machines {
    pub fn guest(&self, vm: &str) -> &Guest {
        &self.vms[vm].0
    }

    pub fn qemu(&self, vm: &str) -> &Hypervisor {
        &self.vms[vm].1
    }

    /// Asks as the guest of this VM does.
    pub fn of(&self, vm: &str) -> Asking {
        Asking(self.guest(vm).client())
    }

    /// Ends a VM.
    pub fn end(&mut self, vm: &str) {
        drop(self.vms.remove(vm).unwrap());
        self.lab.until_vm(vm, |vm| vm["power"] == "off");
    }

    /// Starts a VM that has ended; its QEMU knows of no disks.
    pub fn boot(&mut self, vm: &str, number: u8) {
        let running = boot(&self.lab, vm, number);
        self.vms.insert(vm.to_owned(), running);
        self.lab.until_vm(vm, |vm| vm["power"] == "running" && vm["callback"] == "open");
    }

    /// The files in a pool, but for hidden ones.
    pub fn files(&self, pool: &str) -> Vec<String> {
        let folder = self.lab.path(&format!("pools/{pool}"));
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    pub fn file(&self, pool: &str, id: &str, ending: &str) -> PathBuf {
        self.lab.path(&format!("pools/{pool}/{}.{ending}", serial(id)))
    }
}

/// How a guest knows a volume.
pub fn serial(id: &str) -> &str {
    id.rsplit_once('.').unwrap().1
}
