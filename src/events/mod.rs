//! Kinds of events of a guest, and what all programs need to know of them. Pure, and used on both ends: agents
//! report events, host halves keep them, and users read them.
//!
//! To add a kind: its message, and its field in `Event` (`proto/guestlet/v1/guest.proto`); its [`Happening`] in
//! the file of its subject here; its row in `docs/events.md`. Its name, its keys for programs, and the code that
//! decodes, weighs and cleans it follow from the message ([`crate::wire::messages`]).

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

/// Number of lines of a list that are kept in an event that is too large.
const FEW: usize = 8;

/// Behaviour of a kind of event.
pub trait Happening: fmt::Debug {
    /// Describes the event in one line, for users.
    fn words(&self) -> String;

    /// Updates the state of the guest. Most kinds change nothing in it.
    ///
    /// # Errors
    /// If the state would have more entries than allowed; an implementation must then leave it unchanged.
    fn apply(&self, _state: &mut Change<'_>) -> Result<(), Excess> {
        Ok(())
    }

    /// Shortens lists until the event takes at most `most` bytes of memory. Kinds without lists need not implement it,
    /// because single texts are never that long.
    fn slim(&mut self, _most: usize) {}
}

macro_rules! table {
    ($($message:ident $name:literal = $number:literal;)*) => {
        /// Names of all kinds, in the order of the protos.
        pub const NAMES: &[&str] = &[$($name),*];

        /// Returns the name of a kind; always one of [`NAMES`].
        pub fn name(kind: &Kind) -> &'static str {
            match kind {
                $(Kind::$message(_) => $name,)*
            }
        }

        /// Returns the behaviour of an event's kind.
        pub fn happening(kind: &Kind) -> &dyn Happening {
            match kind {
                $(Kind::$message(event) => event,)*
            }
        }

        /// Returns the behaviour of an event's kind, for changing the event.
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

/// Truncates a list to its first lines.
fn few(list: &mut Vec<String>) {
    list.truncate(FEW);
    list.shrink_to_fit();
}
