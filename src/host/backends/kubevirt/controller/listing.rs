//! Set of the VMs that list volumes of guestlet's, as far as is known. A search for volumes in an unexpected
//! state needs to query only these VMs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Names of these VMs; clones share the set.
#[derive(Debug, Clone, Default)]
pub struct Listing(Arc<Mutex<BTreeSet<String>>>);

impl Listing {
    /// Reports whether the VM with this name lists any.
    pub fn has(&self, vm: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(vm)
    }

    /// Records whether the VM with this name lists any.
    pub(super) fn set(&self, vm: &str, lists: bool) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !lists {
            names.remove(vm);
        } else if !names.contains(vm) {
            names.insert(vm.to_owned());
        }
    }
}
