//! What is done next to a volume: the one place that decides who gets it, and when it is free. Pure.
//!
//! ```text
//!   request ─┐
//!   record ──┼──▶ next ──▶ Ask       who holds it? then the same again, with the answer
//!   holder? ─┘        ├──▶ a step    it is done, the record is read anew, then the same again
//!                     ├──▶ Done
//!                     └──▶ Refuse
//! ```
//!
//! Nothing else is remembered between two steps, so it does not matter where this program or another one ended in
//! between. A test explores all that can happen (`model`).

use super::super::backends::volumes::{Holder, Place, Published};

/// What is wanted of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request<'r> {
    /// The VM with this UUID is to have it.
    Publish {
        /// The VM's.
        uuid: &'r str,
        /// The guest is not to write.
        read_only: bool,
    },
    /// Nobody is to have it.
    Unpublish {
        /// Somebody answers for it that nobody has it if that cannot be told.
        by_force: bool,
    },
    /// It is to be no more.
    Remove {
        /// The VM that it is published to is known, and so has to be unpublished from first.
        is_listed: bool,
    },
    /// It is to have another size.
    Resize,
}

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Next {
    /// It is found out who holds it.
    Ask,
    /// It is plugged into the wanted VM; then the request is done.
    Plug,
    /// It is unplugged from this VM, and the record says so; then the request is done.
    Unplug(Place),
    /// It is taken away from this VM, which is not the one of the record.
    TakeBack(Place),
    /// The record is to say that nobody has it.
    Forget,
    /// It is removed; then the request is done.
    Remove,
    /// It is resized, through this VM if one holds it; then the request is done.
    Resize(Option<Place>),
    /// There is nothing to do.
    Done,
    /// It is not done.
    Refuse(Refusal),
}

/// Why it is not done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// This VM has it.
    Held(Place),
    /// It is published to a VM that has not got it now.
    Published,
    /// It is being taken away from the VM that is to have it.
    Leaving,
    /// The VM has it already, and the guest may write if this is false.
    Access {
        /// As it is.
        read_only: bool,
    },
    /// It cannot be told who holds it; in words why.
    Untold(String),
}

/// What is done next for `request`, as the record says who has the volume, and as far as it was asked who holds it.
pub fn next(request: Request<'_>, record: Option<&Published>, holder: Option<&Holder>) -> Next {
    let Some(record) = record else {
        return match (request, holder) {
            // QEMU opens an image only if nobody else uses it, and an image that is open is not removed.
            (Request::Publish { .. }, _) => Next::Plug,
            (Request::Remove { .. }, _) => Next::Remove,
            (Request::Resize, _) => Next::Resize(None),
            // It may have come back: a command to plug it may have been carried out late.
            (Request::Unpublish { .. }, None) => Next::Ask,
            (Request::Unpublish { .. }, Some(Holder::On(place))) => Next::TakeBack(place.clone()),
            (Request::Unpublish { by_force: false }, Some(Holder::Unknown(why))) => {
                Next::Refuse(Refusal::Untold(why.clone()))
            }
            (Request::Unpublish { .. }, Some(Holder::Off | Holder::Unknown(_))) => Next::Done,
        };
    };
    if let Request::Publish { uuid, read_only } = request
        && record.uuid == uuid
        && !record.leaving
    {
        return if record.read_only == read_only {
            Next::Plug
        } else {
            Next::Refuse(Refusal::Access { read_only: record.read_only })
        };
    }
    let Some(holder) = holder else { return Next::Ask };
    match (request, holder) {
        (Request::Unpublish { by_force: true }, Holder::Unknown(_)) => Next::Forget,
        (_, Holder::Unknown(why)) => Next::Refuse(Refusal::Untold(why.clone())),
        (Request::Publish { uuid, .. }, Holder::On(place)) if record.uuid == uuid && place.uuid == uuid => {
            Next::Refuse(Refusal::Leaving)
        }
        (Request::Publish { .. } | Request::Remove { .. }, Holder::On(place)) => {
            Next::Refuse(Refusal::Held(place.clone()))
        }
        (Request::Unpublish { .. }, Holder::On(place)) if place.uuid == record.uuid => {
            Next::Unplug(place.clone())
        }
        (Request::Unpublish { .. }, Holder::On(place)) => Next::TakeBack(place.clone()),
        (Request::Resize, Holder::On(place)) => Next::Resize(Some(place.clone())),
        (Request::Remove { is_listed: true }, Holder::Off) => Next::Refuse(Refusal::Published),
        (Request::Resize, Holder::Off) => Next::Resize(None),
        (Request::Publish { .. } | Request::Unpublish { .. } | Request::Remove { .. }, Holder::Off) => {
            Next::Forget
        }
    }
}
