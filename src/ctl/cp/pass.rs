//! What one pass through what is to be copied works with.

use super::Job;
use super::ends::{Reading, Writing};
use super::state::State;

/// What one pass works with.
pub struct Pass<'p> {
    /// The end that is read.
    pub from: &'p mut Reading,
    /// The end that is written to.
    pub to: &'p mut Writing,
    /// What is to be done.
    pub job: &'p Job,
    /// What was done.
    pub state: &'p mut State,
    /// Something is there already that may be the same.
    pub goes_on: bool,
    /// Bits of modes that are not given to others here.
    pub mask: u32,
    /// Owners can be set at the writing end.
    pub sets_owners: bool,
    /// Where both ends are the same guest, the directory that everything goes into, as soon as there is one: it is not copied.
    pub made_by_itself: Option<(u64, u64)>,
    /// Both ends are the same guest.
    pub is_into_itself: bool,
}
