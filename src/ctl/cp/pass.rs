//! State of one pass over everything that is to be copied.

use super::Job;
use super::ends::{Reading, Writing};
use super::state::State;

/// State of one pass.
pub struct Pass<'p> {
    /// End that is read from.
    pub from: &'p mut Reading,
    /// End that is written to.
    pub to: &'p mut Writing,
    /// Copy to be made.
    pub job: &'p Job,
    /// State of the copy across passes.
    pub state: &'p mut State,
    /// True if existing files may already be copies.
    pub goes_on: bool,
    /// Mode bits that the umask of this process removes.
    pub mask: u32,
    /// True if the writing end can set owners.
    pub sets_owners: bool,
    /// Device and inode of the directory that receives everything, if both ends are the same guest and it exists:
    /// it is left out of the copy.
    pub made_by_itself: Option<(u64, u64)>,
    /// True if both ends are the same guest.
    pub is_into_itself: bool,
}
