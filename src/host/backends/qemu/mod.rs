//! QEMU on this machine, without libvirt or Kubernetes: VMs come from a list; each VM's QMP socket, if it has
//! one, says whether it runs.
//!
//! QEMU serves one client on a QMP socket at a time: give this program a socket of its own.

use std::path::PathBuf;
use std::pin::Pin;

use tokio::sync::mpsc;

use super::{Backend, Change, Vm};
use crate::supervise::Scope;

pub mod monitor;
pub mod power;

/// One VM of the list.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The VM.
    pub vm: Vm,
    /// Its QMP socket.
    pub qmp: Option<PathBuf>,
}

/// The backend.
#[derive(Debug)]
pub struct Qemu {
    machines: Vec<Machine>,
}

impl Qemu {
    /// A backend for these VMs.
    pub fn new(machines: Vec<Machine>) -> Self {
        Self { machines }
    }
}

impl Backend for Qemu {
    fn watch(self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let vms = self.machines.iter().map(|machine| machine.vm.clone()).collect();
            if changes.send(Change::Listed(vms)).await.is_err() {
                return;
            }
            let monitors = Scope::new();
            for machine in self.machines {
                if let Some(path) = machine.qmp {
                    monitors.children().spawn(monitor::run(machine.vm.name, path, changes.clone()));
                }
            }
            changes.closed().await;
        })
    }
}
