//! What the programs know of each kind of event of a guest. Pure, of both ends: agents tell events, host halves keep them, and people
//! read them.
//!
//! To add a kind: its message, and its field in `Event` (`proto/guestlet/v1/guest.proto`); its [`Happening`] in the file of its
//! subject here; its row in `docs/events.md`. Its name, its keys for programs, how it is decoded, weighed and cleaned follow from the
//! message ([`crate::wire::messages`]).

use std::fmt;

use crate::wire::messages::event_kinds;
pub use crate::wire::proto::v1::event::Kind;

pub mod agent;
pub mod disks;
pub mod file_systems;
pub mod freezes;
pub mod interfaces;
pub mod places;
pub mod state;
pub mod users;

use state::{Change, Excess};

/// Lines of a list that stay in an event that is too large.
const FEW: usize = 8;

/// A kind of event.
pub trait Happening: fmt::Debug {
    /// What happened, in one line for people.
    fn words(&self) -> String;

    /// Makes of the state of the guest what happened. Most kinds change nothing in it.
    ///
    /// # Errors
    /// If the state would have more entries than allowed; it has to stay as it was then.
    fn apply(&self, _state: &mut Change<'_>) -> Result<(), Excess> {
        Ok(())
    }

    /// Leaves out what makes it larger than `most` bytes of memory. For kinds with lists: texts alone are never that long.
    fn slim(&mut self, _most: usize) {}
}

macro_rules! table {
    ($($message:ident $name:literal = $number:literal;)*) => {
        /// The names of all kinds, in the order of the protos.
        pub const NAMES: &[&str] = &[$($name),*];

        /// The name of a kind; always one of [`NAMES`].
        pub fn name(kind: &Kind) -> &'static str {
            match kind {
                $(Kind::$message(_) => $name,)*
            }
        }

        /// What is known of an event.
        pub fn happening(kind: &Kind) -> &dyn Happening {
            match kind {
                $(Kind::$message(event) => event,)*
            }
        }

        /// What is known of an event that may be changed.
        pub fn happening_mut(kind: &mut Kind) -> &mut dyn Happening {
            match kind {
                $(Kind::$message(event) => event,)*
            }
        }

        $(impl From<crate::wire::proto::v1::$message> for Kind {
            fn from(event: crate::wire::proto::v1::$message) -> Self {
                Self::$message(event)
            }
        })*
    };
}

event_kinds!(table);

/// Leaves the first lines of a list.
fn few(list: &mut Vec<String>) {
    list.truncate(FEW);
    list.shrink_to_fit();
}
