//! Intake of a guest's events, from their bytes to the fleet.
//!
//! ```text
//!  bytes ──weighed──▶ turn ──decoded, cleaned──▶ Heard ──▶ the fleet makes it part of the state, and the turn ends
//!            └── more entries, or more memory, than allowed: refused, and never decoded
//! ```
//!
//! An event of a few hundred kilobytes may take some megabytes once it is decoded. The large events of all guests
//! together may take 32 MiB at a time; the others wait undecoded.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::Limits;
use super::text;
use crate::events::state::{Bounds as _, Excess};
use crate::wire::proto::v1;
use crate::wire::weigh::{self, Shaped as _, Unfit};

/// Limit on the bytes of all large events together.
const MOST: usize = 32 * 1024 * 1024;
/// Bytes up to which an event is decoded without a turn. Their memory is bounded anyway: each guest has one such
/// event at a time, besides those in the fleet's inbox.
const SMALL: usize = 8 * 1024;
/// Unit in bytes in which turns are counted.
const UNIT: usize = 1024;
/// Factor by which an event in memory may be larger than the limit of a message on the wire.
const TIMES: usize = 32;

/// Reason why an event is rejected.
#[derive(Debug, thiserror::Error)]
pub enum Unwanted {
    /// A list has more entries than allowed.
    #[error(transparent)]
    Excess(#[from] Excess),
    /// The decoded event would take more memory than allowed.
    #[error("the event takes {weight} bytes once it is decoded; at most {most} are allowed")]
    Heavy {
        /// Bytes that it would take.
        weight: usize,
        /// Bytes that it may take.
        most: usize,
    },
    /// The bytes cannot be decoded as an event.
    #[error("{0}")]
    Malformed(String),
}

/// Intake of the large events of all guests, in turns; clones share it.
#[derive(Debug, Clone)]
pub struct Intake(Arc<Semaphore>);

/// Cleaned event. Until it is dropped, it counts towards the limit on large events.
#[derive(Debug)]
pub struct Heard {
    /// Event of the guest.
    pub event: Box<v1::Event>,
    _turn: Option<OwnedSemaphorePermit>,
}

impl From<v1::Event> for Heard {
    /// Wraps an event that needs no turn.
    fn from(event: v1::Event) -> Self {
        Self { event: Box::new(event), _turn: None }
    }
}

impl Default for Intake {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST / UNIT)))
    }
}

impl Intake {
    /// Decodes and cleans an event, once it is its turn.
    ///
    /// # Errors
    /// If it has more entries than allowed, would take too much memory, or cannot be decoded.
    pub async fn take(&self, bytes: Bytes, limits: &Limits) -> Result<Heard, Unwanted> {
        let weight = weigh(&bytes, limits)?;
        let turn = if weight > SMALL {
            // An event as large as the limit takes all of it.
            let units = u32::try_from(weight.min(MOST).div_ceil(UNIT)).unwrap_or(u32::MAX);
            // The semaphore is never closed, so this does not fail.
            Arc::clone(&self.0).acquire_many_owned(units).await.ok()
        } else {
            None
        };
        let event = v1::Event::decode(bytes).map_err(|error| Unwanted::Malformed(error.to_string()))?;
        let mut event = Box::new(event);
        text::clean_event(&mut event);
        Ok(Heard { event, _turn: turn })
    }
}

/// Returns how much memory an event will take, if it may be decoded.
fn weigh(bytes: &[u8], limits: &Limits) -> Result<usize, Unwanted> {
    let most = TIMES.saturating_mul(limits.message_bytes);
    match weigh::weigh(v1::Event::SHAPE, bytes, |list| limits.of(list)) {
        Ok(weight) if weight > most => Err(Unwanted::Heavy { weight, most }),
        Ok(weight) => Ok(weight),
        Err(Unfit::Many(list)) => Err(Excess::new(list, limits).into()),
        Err(Unfit::Malformed) => Err(Unwanted::Malformed(Unfit::Malformed.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::heap::Heap as _;
    use crate::wire::proto::v1::event::Kind;
    use proptest::prelude::*;

    fn ready(state: v1::GuestState) -> Bytes {
        let ready = v1::AgentReady { state: Some(Box::new(state)), ..v1::AgentReady::default() };
        v1::Event { kind: Some(Kind::AgentReady(ready)), ..v1::Event::default() }.encode_to_vec().into()
    }

    fn holders(count: usize) -> Bytes {
        let disk = v1::Disk { holders: vec![v1::DiskHolder::default(); count], ..v1::Disk::default() };
        ready(v1::GuestState { disks: vec![disk], ..v1::GuestState::default() })
    }

    #[tokio::test]
    async fn what_is_more_than_allowed_is_never_decoded() {
        let limits = Limits::default();
        let disks = ready(v1::GuestState { disks: vec![v1::Disk::default(); 1025], ..Default::default() });
        for (bytes, words) in [
            (disks, "more than 1024 disks"),
            (holders(120_000), "once it is decoded"),
            (Bytes::from_static(b"\x1b\x1c"), "cannot be decoded"),
        ] {
            assert!(bytes.len() < limits.message_bytes);
            let error = Intake::default().take(bytes, &limits).await.unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        let error = Intake::default().take(Bytes::from_static(b"\xff"), &limits).await.unwrap_err();
        assert!(matches!(error, Unwanted::Malformed(_)), "{error:?}");
    }

    #[tokio::test]
    async fn large_events_take_turns_and_small_ones_need_none() {
        let (intake, limits) = (Intake::default(), Limits::default());
        let mut inside = Vec::new();
        let next = loop {
            let mut next = Box::pin(intake.take(holders(15_000), &limits));
            tokio::select! {
                biased;
                heard = &mut next => inside.push(heard.unwrap()),
                () = std::future::ready(()) => break next,
            }
        };
        let each = weigh(&holders(15_000), &limits).unwrap();
        assert_eq!(inside.len(), MOST / each, "{each} bytes each");
        assert!((2..10).contains(&inside.len()), "{}", inside.len());
        intake.take(Bytes::new(), &limits).await.unwrap();
        inside.pop();
        next.await.unwrap();
    }

    #[tokio::test]
    async fn the_usual_limits_leave_room_for_as_many_disks_as_they_name() {
        let limits = Limits::default();
        let text = || "x".repeat(16);
        let disk = v1::Disk {
            name: text(),
            file: text(),
            alias: text(),
            serials: vec![v1::SerialNumber { value: text(), source: text() }; 2],
            partitions: vec![v1::Partition { name: text(), ..v1::Partition::default() }; 3],
            ..v1::Disk::default()
        };
        let bytes = ready(v1::GuestState { disks: vec![disk; 1024], ..v1::GuestState::default() });
        assert!(bytes.len() < limits.message_bytes, "the test: {}", bytes.len());
        Intake::default().take(bytes, &limits).await.unwrap();
    }

    /// Fields within fields, whatever they mean: what fits is taken for a message, and the rest for a text.
    fn message() -> impl Strategy<Value = Vec<u8>> {
        let leaf = prop::collection::vec(0_u8..0x80, 0..6);
        leaf.prop_recursive(6, 400, 12, |inner| {
            let number = prop_oneof![1_u32..=4, 1_u32..=15, 1_u32..=43];
            let field = (number, inner, 1..20_usize);
            prop::collection::vec(field, 0..12).prop_map(|fields| {
                let mut bytes = Vec::new();
                for (number, value, times) in fields {
                    for _ in 0..times.saturating_sub(12).max(1) {
                        prost::encoding::encode_key(
                            number,
                            prost::encoding::WireType::LengthDelimited,
                            &mut bytes,
                        );
                        prost::encoding::encode_varint(value.len() as u64, &mut bytes);
                        bytes.extend_from_slice(&value);
                    }
                }
                bytes
            })
        })
    }

    /// Entries of all lists that have a limit.
    fn counted(kind: &Kind) -> usize {
        let addresses = |list: &[v1::NetworkInterface]| list.iter().map(|one| one.addresses.len()).sum();
        match kind {
            Kind::AgentReady(v1::AgentReady { state: Some(state), .. }) => {
                let addresses: usize = addresses(&state.interfaces);
                let lists = state.disks.len() + state.users.len() + state.file_systems.len();
                addresses + state.interfaces.len() + lists
            }
            Kind::InterfacesChanged(changed) => addresses(&changed.interfaces) + changed.interfaces.len(),
            _ => 0,
        }
    }

    /// Returns whether a message contains a group, also within fields that may be messages.
    fn has_group(mut bytes: &[u8]) -> bool {
        use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

        while let Ok((number, wire)) = decode_key(&mut bytes) {
            match wire {
                WireType::StartGroup => {
                    return skip_field(wire, number, &mut bytes, DecodeContext::default()).is_ok();
                }
                WireType::LengthDelimited => {
                    let length =
                        decode_varint(&mut bytes).ok().and_then(|length| usize::try_from(length).ok());
                    let Some(value) = length.and_then(|length| bytes.split_off(..length)) else {
                        return false;
                    };
                    if has_group(value) {
                        return true;
                    }
                }
                wire if skip_field(wire, number, &mut bytes, DecodeContext::default()).is_err() => {
                    return false;
                }
                _ => {}
            }
        }
        false
    }

    #[test]
    fn groups_are_told_from_other_fields() {
        assert!(has_group(&[59, 60]) && has_group(&[8, 1, 59, 60]) && has_group(&[26, 2, 59, 60]));
        assert!(!has_group(&[]) && !has_group(&[8, 59]) && !has_group(&[26, 1, 59, 8, 1]));
    }

    fn is_never_less(bytes: &[u8]) -> Result<(), TestCaseError> {
        let Ok(event) = v1::Event::decode(bytes) else { return Ok(()) };
        let Some(kind) = &event.kind else { return Ok(()) };
        let weight = match weigh::weigh(v1::Event::SHAPE, bytes, |_| usize::MAX) {
            Ok(weight) => weight,
            // prost passes over groups, which nobody sends.
            Err(Unfit::Malformed) if has_group(bytes) => return Ok(()),
            Err(unfit) => return Err(TestCaseError::fail(format!("{unfit}: {event:?}"))),
        };
        prop_assert!(weight >= kind.heap(), "{weight} < {}: {event:?}", kind.heap());
        if counted(kind) > 0 {
            prop_assert!(weigh::weigh(v1::Event::SHAPE, bytes, |_| 0).is_err(), "{event:?}");
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_event_takes_more_than_it_was_weighed(kind in 3_u32..=43, whole in message(), state: bool) {
            let inside = |number, value: &[u8]| {
                let mut bytes = Vec::new();
                let wire = prost::encoding::WireType::LengthDelimited;
                prost::encoding::encode_key(number, wire, &mut bytes);
                prost::encoding::encode_varint(value.len() as u64, &mut bytes);
                bytes.extend_from_slice(value);
                bytes
            };
            // A whole state contains most kinds of entries.
            let event = if state { inside(3, &inside(4, &whole)) } else { inside(kind, &whole) };
            is_never_less(&event)?;
            is_never_less(&whole)?;
        }

        #[test]
        fn bytes_of_any_kind_hurt_nobody(bytes: Vec<u8>) {
            is_never_less(&bytes)?;
        }
    }
}
