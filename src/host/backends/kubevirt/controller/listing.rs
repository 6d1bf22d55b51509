//! Which VMs list volumes of ours, as far as is known: so that whoever looks for what is not as it should be asks of these
//! alone.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The names of these VMs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Listing(Arc<Mutex<BTreeSet<String>>>);

impl Listing {
    /// Whether the VM of this name does.
    pub fn has(&self, vm: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(vm)
    }

    /// The VM of this name does, or does not any more.
    pub(super) fn set(&self, vm: &str, lists: bool) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !lists {
            names.remove(vm);
        } else if !names.contains(vm) {
            names.insert(vm.to_owned());
        }
    }
}
