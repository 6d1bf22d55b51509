//! Exclusive turns: one operation at a time on each object.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Work in progress, by the object that it is done on.
#[derive(Debug)]
pub struct Turns<Thing: Ord, Work = ()>(Arc<Mutex<BTreeMap<Thing, Work>>>);

/// Exclusive right to work on one object, which ends when its last clone is dropped.
#[derive(Debug)]
pub struct Turn<Thing: Ord, Work = ()>(Arc<Entry<Thing, Work>>);

#[derive(Debug)]
struct Entry<Thing: Ord, Work> {
    turns: Turns<Thing, Work>,
    thing: Thing,
}

impl<Thing: Ord + Clone, Work: Clone> Turns<Thing, Work> {
    /// Takes the turn of `thing`, to do `work`.
    ///
    /// # Errors
    /// The work in progress, if another operation has the turn.
    pub fn take(&self, thing: Thing, work: Work) -> Result<Turn<Thing, Work>, Work> {
        let mut taken = self.taken();
        if let Some(work) = taken.get(&thing) {
            return Err(work.clone());
        }
        taken.insert(thing.clone(), work);
        drop(taken);
        Ok(Turn(Arc::new(Entry { turns: self.clone(), thing })))
    }
}

impl<Thing: Ord, Work> Turns<Thing, Work> {
    fn taken(&self) -> MutexGuard<'_, BTreeMap<Thing, Work>> {
        // No update under the lock can be left half done, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// Not derived, because the derived ones would require the same traits of the type parameters.
impl<Thing: Ord, Work> Clone for Turns<Thing, Work> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Thing: Ord, Work> Default for Turns<Thing, Work> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<Thing: Ord, Work> Clone for Turn<Thing, Work> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Thing: Ord, Work> Drop for Entry<Thing, Work> {
    fn drop(&mut self) {
        self.turns.taken().remove(&self.thing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_on_each_thing() {
        let turns = Turns::default();
        let held = turns.take("disk", "formatting").unwrap();
        assert_eq!(turns.take("disk", "mounting").unwrap_err(), "formatting");
        turns.take("other", "mounting").unwrap();
        let copy = held.clone();
        drop(held);
        turns.take("disk", "mounting").unwrap_err();
        drop(copy);
        turns.clone().take("disk", "mounting").unwrap();
        assert!(turns.taken().is_empty());
    }
}
