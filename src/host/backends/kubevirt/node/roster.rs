//! Whose VMs those of the node are, for whoever writes about them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::host::changed::Changed;

/// A VirtualMachineInstance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its namespace.
    pub namespace: String,
    /// Its name in that.
    pub name: String,
    /// Its UID, as the API has it.
    pub uid: String,
    /// How many volumes of guestlet's are plugged into it; none if that cannot be read.
    pub volumes: Option<u32>,
}

/// The VirtualMachineInstances of the VMs that were told, by the VMs' names.
#[derive(Debug, Default)]
pub struct Roster {
    instances: Mutex<BTreeMap<String, Instance>>,
    changed: Arc<Changed>,
}

impl Roster {
    /// One that says which have changed.
    pub fn new(changed: Arc<Changed>) -> Self {
        Self { instances: Mutex::default(), changed }
    }

    /// That of the VM of this name.
    pub fn get(&self, vm: &str) -> Option<Instance> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner).get(vm).cloned()
    }

    /// The VM of this name has this one, or is gone.
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
