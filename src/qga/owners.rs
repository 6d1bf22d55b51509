//! Whose the files and programs are that clients have opened and started. Handles and process ids are guessed easily: what
//! one asker may open, another one may not read by the number alone. All QGA clients are one asker, as with qemu-ga.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::policy::Asker;

/// Numbers that are remembered of each kind. More files cannot be open, and results of no more programs are kept.
const MOST: usize = 2048;

/// What a number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An open file.
    File,
    /// A program.
    Program,
}

/// Who owns which number. What is not listed belongs to QGA clients.
#[derive(Debug, Default)]
pub struct Owners(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// By kind and number: when it was made, and by whom.
    owners: BTreeMap<(Kind, i64), (u64, String)>,
    made: u64,
}

/// An asker's name; empty for QGA clients. The caller cannot contain a line break.
fn name(asker: &Asker) -> String {
    match asker {
        Asker::Qga => String::new(),
        Asker::Host(_) => format!("{}\n{}", asker.who(), asker.caller()),
    }
}

impl Owners {
    /// The number was given to this asker just now.
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

    /// Whether the number is this asker's.
    pub fn has(&self, kind: Kind, number: i64, asker: &Asker) -> bool {
        let table = self.table();
        let owner = table.owners.get(&(kind, number)).map_or("", |(_, owner)| owner);
        owner == name(asker)
    }

    /// The number stands for nothing any more.
    pub fn forget(&self, kind: Kind, number: i64) {
        self.table().owners.remove(&(kind, number));
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing that is done under the lock leaves it half changed.
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
