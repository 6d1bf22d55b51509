//! Decides the next step of an operation on a volume. No other code decides who gets a volume, and when it is
//! free. Pure.
//!
//! ```text
//!   request ─┐
//!   record ──┼──▶ next ──▶ Ask       who holds it? then the same again, with the answer
//!   holder? ─┘        ├──▶ a step    it is done, the record is read anew, then the same again
//!                     ├──▶ Done
//!                     └──▶ Refuse
//! ```
//!
//! Nothing else is remembered between two steps, so it does not matter where this program, or an earlier run of
//! it, has ended. A test explores everything that can happen (`model`).

use super::super::backends::volumes::{Holder, Place, Published};

/// Request that is to be carried out on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request<'r> {
    /// The VM with this UUID is to have it.
    Publish {
        /// UUID of the VM.
        uuid: &'r str,
        /// True if the guest must not write.
        read_only: bool,
    },
    /// No VM is to have it.
    Unpublish {
        /// A person vouches that no VM has it, in case this cannot be determined.
        by_force: bool,
    },
    /// Its image and record are to be removed.
    Remove {
        /// True if the VM of the record is known, so that the volume has to be unpublished first.
        is_listed: bool,
    },
    /// Its size is to change.
    Resize,
}

/// Next step of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Next {
    /// Find out who holds the volume, and decide again.
    Ask,
    /// Plug it into the requested VM; then the request is done.
    Plug,
    /// Unplug it from this VM, and record that; then the request is done.
    Unplug(Place),
    /// Unplug it from this VM, which is not the one of the record.
    TakeBack(Place),
    /// Remove the record that a VM has it.
    Forget,
    /// Remove it; then the request is done.
    Remove,
    /// Resize it, through this VM if one holds it; then the request is done.
    Resize(Option<Place>),
    /// Nothing is left to do.
    Done,
    /// End the request with an error.
    Refuse(Refusal),
}

/// Reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// This VM has it.
    Held(Place),
    /// It is published to a VM that does not have it at the moment.
    Published,
    /// It is being unplugged from the VM that requests it.
    Leaving,
    /// The VM already has it with the other access: the guest may write if `read_only` is false.
    Access {
        /// Present access of the VM.
        read_only: bool,
    },
    /// The holder cannot be determined, for this reason.
    Untold(String),
}

/// Decides the next step for `request`. `record` is the VM to which the volume is published, and `holder` the
/// answer to the last `Next::Ask`, if there was one.
pub fn next(request: Request<'_>, record: Option<&Published>, holder: Option<&Holder>) -> Next {
    let Some(record) = record else {
        return match (request, holder) {
            // No holder is asked for: QEMU opens an image only if nobody else uses it, and an open image is not removed.
            (Request::Publish { .. }, _) => Next::Plug,
            (Request::Remove { .. }, _) => Next::Remove,
            (Request::Resize, _) => Next::Resize(None),
            // A VM may have got the volume without a record, if a command to plug it was carried out late.
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
