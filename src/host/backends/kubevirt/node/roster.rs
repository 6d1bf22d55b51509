//! VirtualMachineInstances of the node's VMs, for code that writes to these objects.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::host::changed::Changed;
use crate::labels::Labels;

/// Identity of a VirtualMachineInstance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Namespace of the object.
    pub namespace: String,
    /// Name within the namespace.
    pub name: String,
    /// UID in the API.
    pub uid: String,
    /// Number of guestlet's volumes that are plugged into it; `None` if it cannot be read.
    pub volumes: Option<u32>,
    /// Labels of the VM, as far as they are kept.
    pub labels: Arc<Labels>,
}

/// VirtualMachineInstances of the reported VMs, by VM name.
#[derive(Debug, Default)]
pub struct Roster {
    instances: Mutex<BTreeMap<String, Instance>>,
    changed: Arc<Changed>,
}

impl Roster {
    /// Creates an empty roster that reports changed VMs to `changed`.
    pub fn new(changed: Arc<Changed>) -> Self {
        Self { instances: Mutex::default(), changed }
    }

    /// Returns the instance of the VM with this name.
    pub fn get(&self, vm: &str) -> Option<Instance> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner).get(vm).cloned()
    }

    /// Sets the instance of the VM with this name, or removes it.
    pub(super) fn set(&self, vm: &str, instance: Option<Instance>) {
        let mut all = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        if all.get(vm) == instance.as_ref() {
            return;
        }
        match instance {
            Some(instance) => all.insert(vm.to_owned(), instance),
            None => all.remove(vm),
        };
        drop(all);
        self.changed.add(vm);
    }
}
