//! Owners of the files and programs that clients have opened and started. Handles and PIDs are easy to guess: a
//! caller must not be able to read what another one has opened by its number alone. All QGA clients are one
//! caller, as in qemu-ga.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::policy::Asker;

/// Maximum number of owners that are remembered of each kind: more than the files that can be open, and than the
/// results of programs that are kept.
const MOST: usize = 2048;

/// Kind of object that a number denotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Handle of an open file.
    File,
    /// PID of a program.
    Program,
}

/// Table of owners. Numbers that are not in it belong to QGA clients.
#[derive(Debug, Default)]
pub struct Owners(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// Owners by kind and number, with a sequence number for the order of their creation.
    owners: BTreeMap<(Kind, i64), (u64, String)>,
    made: u64,
}

/// Returns the name of a caller; empty for QGA clients. It is unambiguous, because neither part can contain a line
/// break.
fn name(asker: &Asker) -> String {
    match asker {
        Asker::Qga => String::new(),
        Asker::Host(_) => format!("{}\n{}", asker.who(), asker.caller()),
    }
}

impl Owners {
    /// Makes the caller the owner of a new number. Beyond the maximum the oldest entry of the kind is dropped.
    pub fn give(&self, kind: Kind, number: i64, asker: &Asker) {
        let mut table = self.table();
        table.made += 1;
        let made = table.made;
        if matches!(asker, Asker::Qga) {
            table.owners.remove(&(kind, number));
            return;
        }
        table.owners.insert((kind, number), (made, name(asker)));
        let of_kind = table.owners.iter().filter(|((one, _), _)| *one == kind);
        if of_kind.clone().count() > MOST
            && let Some(oldest) = of_kind.min_by_key(|(_, (made, _))| *made).map(|(key, _)| *key)
        {
            table.owners.remove(&oldest);
        }
    }

    /// Returns whether the number belongs to this caller.
    pub fn has(&self, kind: Kind, number: i64, asker: &Asker) -> bool {
        let table = self.table();
        let owner = table.owners.get(&(kind, number)).map_or("", |(_, owner)| owner);
        owner == name(asker)
    }

    /// Removes the owner of a number that is no longer in use.
    pub fn forget(&self, kind: Kind, number: i64) {
        self.table().owners.remove(&(kind, number));
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No step under the lock can leave the table half changed, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::policy::HostHalf;

    fn host(caller: &str) -> Asker {
        Asker::Host(Arc::new(HostHalf::unproved(caller)))
    }

    #[test]
    fn a_number_is_of_no_use_to_others() {
        let owners = Owners::default();
        let (root, other) = (host("uid:0 root"), host("uid:1000 a"));
        owners.give(Kind::File, 1001, &root);
        assert!(owners.has(Kind::File, 1001, &host("uid:0 root")));
        assert!(!owners.has(Kind::File, 1001, &other) && !owners.has(Kind::File, 1001, &Asker::Qga));
        assert!(!owners.has(Kind::Program, 1001, &root), "another kind");
        assert!(owners.has(Kind::File, 1002, &Asker::Qga) && !owners.has(Kind::File, 1002, &root));
        owners.give(Kind::File, 1001, &Asker::Qga);
        assert!(owners.has(Kind::File, 1001, &Asker::Qga));
    }

    #[test]
    fn what_is_forgotten_belongs_to_nobody_who_asks_on_a_session() {
        let owners = Owners::default();
        let one = host("a");
        for number in 0..=i64::try_from(MOST).unwrap() {
            owners.give(Kind::Program, number, &one);
        }
        assert!(!owners.has(Kind::Program, 0, &one) && owners.has(Kind::Program, 1, &one));
        owners.forget(Kind::Program, 1);
        assert!(!owners.has(Kind::Program, 1, &one));
    }
}
