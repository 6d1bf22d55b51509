//! Whose VMs those of the node are, for whoever writes about them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A VirtualMachineInstance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its namespace.
    pub namespace: String,
    /// Its name in that.
    pub name: String,
    /// Its UID, as the API has it.
    pub uid: String,
}

/// The VirtualMachineInstances of the VMs that were told, by the VMs' names.
#[derive(Debug, Default)]
pub struct Roster(Mutex<BTreeMap<String, Instance>>);

impl Roster {
    /// That of the VM of this name.
    pub fn get(&self, vm: &str) -> Option<Instance> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(vm).cloned()
    }

    /// The VM of this name has this one, or is gone.
    pub(super) fn set(&self, vm: &str, instance: Option<Instance>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match instance {
            Some(instance) => all.insert(vm.to_owned(), instance),
            None => all.remove(vm),
        };
    }
}
