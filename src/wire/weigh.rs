//! Estimate of the memory that a message of a guest takes once it is decoded, computed from its bytes: an
//! empty submessage has two bytes on the wire, and several hundred in memory. Pure.
//!
//! The estimate is never less than what the decoder takes, also while its lists grow; it may be several times
//! as much. The shapes of the messages are generated from the protos ([`super::messages`]).

use std::any::TypeId;

use super::messages::{event_kinds, messages};
use super::proto::v1;

/// Overhead of the allocator for each allocation, in bytes.
const PIECE: usize = 16;
/// Bytes of the smallest text that is not empty.
const SHORTEST: usize = 8;
/// A list that grows is there twice for a moment, and the new one has room for twice as many.
const GROWTH: usize = 5;
/// An empty table of labels, as [`super::heap`] counts it.
const TABLE: usize = 1024;
/// Maximum memory of an answer to a call, in bytes: it concerns one disk, or the guest.
const LARGEST_ANSWER: usize = 1024 * 1024;

/// A list of which a guest may have a limited number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum List {
    /// Network interfaces of the guest.
    Interfaces,
    /// Addresses of one interface.
    Addresses,
    /// File systems that are mounted.
    FileSystems,
    /// Login sessions of users.
    Users,
    /// Disks of the guest.
    Disks,
}

/// Reason why a message is not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// This list has more entries than allowed.
    #[error("too many entries")]
    Many(List),
    /// Malformed message, or one with groups, a deprecated encoding.
    #[error("the message cannot be decoded")]
    Malformed,
}

/// Memory layout of a message type.
#[derive(Debug)]
pub struct Shape {
    size: usize,
    parts: &'static [(u32, Part)],
}

/// A field; those that are not named are numbers, or not known.
#[derive(Debug)]
enum Part {
    Text,
    Texts(Option<List>),
    /// From text to text.
    Map,
    One(&'static Shape),
    Many(&'static Shape, Option<List>),
}

/// A message of which it is known what its parts take.
pub trait Shaped: 'static {
    /// Layout of the message: its size, and its fields that allocate memory.
    const SHAPE: &'static Shape;
}

macro_rules! list {
    (None) => {
        None
    };
    ($list:ident) => {
        Some(List::$list)
    };
}

macro_rules! part {
    (text $inner:ident $list:ident) => {
        Part::Text
    };
    (texts $inner:ident $list:ident) => {
        Part::Texts(list!($list))
    };
    (map $inner:ident $list:ident) => {
        Part::Map
    };
    (one $inner:ident $list:ident) => {
        Part::One(<v1::$inner as Shaped>::SHAPE)
    };
    (many $inner:ident $list:ident) => {
        Part::Many(<v1::$inner as Shaped>::SHAPE, list!($list))
    };
}

/// Memory of a field without contents, in bytes.
macro_rules! empty {
    (map) => {
        TABLE
    };
    ($kind:ident) => {
        0
    };
}

macro_rules! of_messages {
    ($($message:ident { $($field:ident: $kind:ident ($inner:ident, $list:ident) = $number:literal;)* })*) => {
        $(impl Shaped for v1::$message {
            const SHAPE: &'static Shape = &Shape {
                size: size_of::<v1::$message>() $(+ empty!($kind))*,
                parts: &[$(($number, part!($kind $inner $list))),*],
            };
        })*
    };
}

messages!(of_messages);

macro_rules! of_events {
    ($($message:ident $name:literal = $number:literal;)*) => {
        impl Shaped for v1::Event {
            const SHAPE: &'static Shape = &Shape {
                size: size_of::<v1::Event>(),
                parts: &[$(($number, Part::One(<v1::$message as Shaped>::SHAPE))),*],
            };
        }
    };
}

event_kinds!(of_events);

/// Checks an answer to a call before it is decoded: those of guests that have lists.
///
/// # Errors
/// If it would take more memory than any answer needs, in words.
pub fn check<T: 'static>(bytes: &[u8]) -> Result<(), String> {
    let is = |other| TypeId::of::<T>() == other;
    let shape = if is(TypeId::of::<v1::GuestInfo>()) {
        v1::GuestInfo::SHAPE
    } else if is(TypeId::of::<v1::FindDiskResponse>()) {
        v1::FindDiskResponse::SHAPE
    } else if is(TypeId::of::<v1::ReleaseDiskResponse>()) {
        v1::ReleaseDiskResponse::SHAPE
    } else {
        return Ok(());
    };
    match weigh(shape, bytes, |_| usize::MAX) {
        Ok(bytes) if bytes > LARGEST_ANSWER => Err(format!(
            "Error, message length too large: decoded it takes {bytes} bytes, the limit is: {LARGEST_ANSWER} bytes"
        )),
        Ok(_) => Ok(()),
        Err(unfit) => Err(unfit.to_string()),
    }
}

/// Returns the maximum memory in bytes that decoding takes, for a message whose lists have no more entries
/// than `most` allows.
///
/// # Errors
/// If a list has more entries, which is detected at the first one beyond the limit, or if the message is
/// malformed.
pub fn weigh(shape: &Shape, bytes: &[u8], most: impl Fn(List) -> usize) -> Result<usize, Unfit> {
    add_up(shape, bytes, &most, &mut Counts::default())
}

/// Number of entries counted so far in each list.
#[derive(Default)]
struct Counts([usize; 5]);

impl Counts {
    fn add(&mut self, list: Option<List>, most: &dyn Fn(List) -> usize) -> Result<(), Unfit> {
        let Some(list) = list else { return Ok(()) };
        let count = &mut self.0[list as usize];
        *count += 1;
        if *count > most(list) { Err(Unfit::Many(list)) } else { Ok(()) }
    }
}

fn add_up(
    shape: &Shape,
    mut bytes: &[u8],
    most: &dyn Fn(List) -> usize,
    counts: &mut Counts,
) -> Result<usize, Unfit> {
    let mut sum = 0_usize;
    while !bytes.is_empty() {
        let (number, Some(value)) = field(&mut bytes).ok_or(Unfit::Malformed)? else { continue };
        let part = shape.parts.iter().find(|(named, _)| *named == number).map(|(_, part)| part);
        sum += match part {
            None | Some(Part::Text) => text(value),
            Some(Part::Texts(list)) => {
                counts.add(*list, most)?;
                GROWTH * size_of::<String>() + text(value)
            }
            Some(Part::Map) => GROWTH * (2 * size_of::<String>() + 1) + text(value) + text(&[]),
            // Several of a single message are made one, with all entries of their lists.
            Some(Part::One(shape)) => 2 * shape.size + PIECE + add_up(shape, value, most, counts)?,
            Some(Part::Many(shape, list)) => {
                counts.add(*list, most)?;
                GROWTH * shape.size + add_up(shape, value, most, &mut Counts::default())?
            }
        };
    }
    Ok(sum)
}

fn text(text: &[u8]) -> usize {
    text.len().max(SHORTEST) + PIECE
}

/// Takes the next field, and returns its number, and its contents if they are bytes. `None` if the field is
/// malformed.
fn field<'b>(bytes: &mut &'b [u8]) -> Option<(u32, Option<&'b [u8]>)> {
    let key = varint(bytes)?;
    let number = u32::try_from(key >> 3).ok().filter(|number| *number > 0)?;
    let value = match key & 7 {
        0 => varint(bytes).map(|_| None)?,
        1 => bytes.split_off(..8).map(|_| None)?,
        2 => {
            let length = usize::try_from(varint(bytes)?).ok()?;
            Some(bytes.split_off(..length)?)
        }
        5 => bytes.split_off(..4).map(|_| None)?,
        _ => return None,
    };
    Some((number, value))
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let byte = *bytes.split_off_first()?;
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    fn ready(state: v1::GuestState) -> Vec<u8> {
        let ready = v1::AgentReady { state: Some(Box::new(state)), ..v1::AgentReady::default() };
        v1::Event { kind: Some(v1::event::Kind::AgentReady(ready)), ..v1::Event::default() }.encode_to_vec()
    }

    #[test]
    fn entries_are_counted_before_anything_is_decoded() {
        let interface = v1::NetworkInterface { addresses: vec![String::new(); 3], ..Default::default() };
        let state = v1::GuestState {
            interfaces: vec![interface; 4],
            disks: vec![v1::Disk::default(); 5],
            ..v1::GuestState::default()
        };
        let bytes = ready(state);
        let limits = |addresses, interfaces, disks| {
            weigh(v1::Event::SHAPE, &bytes, move |list| match list {
                List::Addresses => addresses,
                List::Interfaces => interfaces,
                List::Disks => disks,
                List::FileSystems | List::Users => 0,
            })
        };
        assert!(limits(3, 4, 5).is_ok(), "addresses are of one interface each");
        assert_eq!(limits(2, 4, 5), Err(Unfit::Many(List::Addresses)));
        assert_eq!(limits(3, 3, 5), Err(Unfit::Many(List::Interfaces)));
        assert_eq!(limits(3, 4, 4), Err(Unfit::Many(List::Disks)));
        // Decoders put together what is sent in parts.
        let twice = [&bytes[..], &bytes].concat();
        let Some(v1::event::Kind::AgentReady(whole)) = v1::Event::decode(&twice[..]).unwrap().kind else {
            panic!()
        };
        assert_eq!(whole.state.unwrap().disks.len(), 10);
        let most = |most| move |list| if list == List::Disks { most } else { usize::MAX };
        assert_eq!(weigh(v1::Event::SHAPE, &twice, most(9)), Err(Unfit::Many(List::Disks)));
        assert!(weigh(v1::Event::SHAPE, &twice, most(10)).is_ok());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&b"\x00"[..], b"\x0a", b"\x0a\x02x", b"\x1b\x1c", b"\x80", &[0xff; 11], b"\x09123"] {
            assert_eq!(weigh(v1::Event::SHAPE, bytes, |_| usize::MAX), Err(Unfit::Malformed), "{bytes:x?}");
        }
    }

    #[test]
    fn answers_that_would_take_much_memory_are_refused() {
        let info = |count| v1::GuestInfo { capabilities: vec![String::new(); count], ..Default::default() };
        let disk = |count| v1::Disk { holders: vec![v1::DiskHolder::default(); count], ..Default::default() };
        let found = |count| v1::FindDiskResponse { disk: Some(disk(count)) }.encode_to_vec();
        check::<v1::GuestInfo>(&info(64).encode_to_vec()).unwrap();
        check::<v1::FindDiskResponse>(&found(64)).unwrap();
        let words = check::<v1::GuestInfo>(&info(100_000).encode_to_vec()).unwrap_err();
        assert!(words.contains("message length too large"), "{words}");
        check::<v1::FindDiskResponse>(&found(100_000)).unwrap_err();
        check::<v1::ReleaseDiskResponse>(&found(100_000)).unwrap_err();
        check::<v1::PingResponse>(&found(100_000)).unwrap();
    }
}
