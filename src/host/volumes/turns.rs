//! Limits operations: one at a time on each thing, and few at a time from each guest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::problem::{Kind, Problem};
use crate::turns;

/// Operations that a guest may have under way.
const MOST: usize = 16;

/// Thing that at most one operation may work on. A guest chooses identifiers and names, but its choices cannot
/// collide with things of another kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// Volume by its identifier.
    Volume(String),
    /// Name that a cluster gives a volume, whether or not the volume exists.
    Name {
        /// Cluster that the name belongs to.
        cluster: String,
        /// Name of the volume in its cluster.
        name: String,
    },
    /// All volumes of a VM, by the name of the VM.
    Vm(String),
}

impl Thing {
    /// Returns the thing that stands for the volume with this identifier.
    pub fn volume(id: &str) -> Self {
        Self::Volume(id.to_owned())
    }
}

/// Things that operations work on now, and the number of operations of each guest.
#[derive(Debug, Clone, Default)]
pub struct Turns {
    things: turns::Turns<Thing>,
    operations: Operations,
}

/// Number of operations under way, by the name of the VM.
type Operations = Arc<Mutex<BTreeMap<String, usize>>>;

/// Right to work on one thing, until it is dropped.
pub type Turn = turns::Turn<Thing>;

/// Operation of a guest, which counts until it is dropped.
#[derive(Debug)]
pub struct Place {
    operations: Operations,
    vm: String,
}

fn locked(operations: &Operations) -> MutexGuard<'_, BTreeMap<String, usize>> {
    // A panic under the lock leaves the map consistent, so poisoning can be ignored.
    operations.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turns {
    /// Takes the right to work on a thing.
    ///
    /// # Errors
    /// If another operation has it.
    pub fn take(&self, thing: Thing) -> Result<Turn, Problem> {
        self.things
            .take(thing, ())
            .map_err(|()| Problem::new(Kind::Aborted, "another operation on this volume is under way"))
    }

    /// Begins an operation of a guest.
    ///
    /// # Errors
    /// If the guest has too many under way.
    pub fn enter(&self, vm: &str) -> Result<Place, Problem> {
        let mut operations = locked(&self.operations);
        let count = operations.entry(vm.to_owned()).or_default();
        if *count >= MOST {
            return Err(Problem::new(
                Kind::Aborted,
                format!("{MOST} operations of this VM are under way; repeat this one later"),
            ));
        }
        *count += 1;
        Ok(Place { operations: Arc::clone(&self.operations), vm: vm.to_owned() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut operations = locked(&self.operations);
        if let Some(count) = operations.get_mut(&self.vm) {
            *count -= 1;
            if *count == 0 {
                operations.remove(&self.vm);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_not_too_many() {
        let turns = Turns::default();
        let take = |id: &str| turns.take(Thing::volume(id));
        let turn = take("a").unwrap();
        assert_eq!(take("a").unwrap_err().kind, Kind::Aborted);
        take("b").unwrap();
        turns.take(Thing::Vm("a".into())).unwrap();
        drop(turn);
        take("a").unwrap();
        let mut places: Vec<_> = (0..MOST).map(|_| turns.enter("vm").unwrap()).collect();
        assert_eq!(turns.enter("vm").unwrap_err().kind, Kind::Aborted);
        turns.enter("other").unwrap();
        places.pop();
        turns.enter("vm").unwrap();
        drop(places);
        assert!(locked(&turns.operations).is_empty());
    }
}
