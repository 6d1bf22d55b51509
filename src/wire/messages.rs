//! Lists that `build.rs` makes of the protos, for macros that have something to do for each kind of event, or for each message
//! that a guest sends. What follows from a message alone, such as its name and what it takes in memory, is written nowhere else.
//!
//! `event_kinds!(callback)` calls `callback!` with a row `Message "name" = number;` for each kind of event; `messages!(callback)` with
//! `Message { field: kind (message within, limit) = number; … }`, where the kind is `text`, `texts`, `map`, `one` or `many`,
//! and the limit names a [`List`](super::weigh::List) or is `None`.

use std::collections::{BTreeMap, HashMap};

include!(concat!(env!("OUT_DIR"), "/messages.rs"));

pub(crate) use {event_kinds, messages};

/// Labels in an order that does not change, for programs that read JSON.
///
/// # Errors
/// Those of the serializer.
#[allow(clippy::implicit_hasher, reason = "messages have no others")]
pub fn sorted<S: serde::Serializer>(
    labels: &HashMap<String, String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(labels.iter().collect::<BTreeMap<_, _>>())
}
