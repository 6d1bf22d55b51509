//! How much memory a message of a guest takes once it is decoded, told from its bytes: an empty part has two bytes on the wire,
//! and some hundred in memory. Pure.
//!
//! What is told is never less than what the decoder takes, also while its lists grow; it may be several times as much. To add
//! a message that a guest sends: its shape, and with it all its fields that are lists or messages.

use std::any::TypeId;

use super::proto::v1;

/// What the allocator takes for itself, for each piece of memory.
const PIECE: usize = 16;
/// Bytes of the smallest text that is not empty.
const SHORTEST: usize = 8;
/// A list that grows is there twice for a moment, and the new one has room for twice as many.
const GROWTH: usize = 5;
/// An empty table of labels, as `host::weight` counts it.
const TABLE: usize = 1024;
/// The most that an answer to a call may take: it is about one disk, or the guest.
const LARGEST_ANSWER: usize = 1024 * 1024;

/// A list of which a guest may have a limited number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum List {
    /// Network interfaces.
    Interfaces,
    /// Addresses of one interface.
    Addresses,
    /// Mounted file systems.
    FileSystems,
    /// Sessions of users.
    Users,
    /// Disks.
    Disks,
}

/// Why a message is not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// This list has more entries than allowed.
    #[error("too many entries")]
    Many(List),
    /// It is no message, or has groups, which nobody uses any more.
    #[error("the message cannot be decoded")]
    Malformed,
}

/// What is known of a message.
#[derive(Debug)]
pub struct Shape {
    size: usize,
    parts: &'static [(u32, Part)],
}

/// A field; those that are not named are numbers or single texts.
#[derive(Debug)]
enum Part {
    Texts(Option<List>),
    /// From text to text.
    Map,
    One(&'static Shape),
    Many(&'static Shape, Option<List>),
}

use Part::{Many, Map, One, Texts};

macro_rules! shapes {
    ($($(#[$doc:meta])* $visibility:vis $name:ident = $size:expr; { $($number:literal $part:expr),* })*) => {
        $($(#[$doc])* $visibility static $name: Shape = Shape { size: $size, parts: &[$(($number, $part)),*] };)*
    };
}

shapes! {
    SERIAL = size_of::<v1::SerialNumber>(); {}
    PARTITION = size_of::<v1::Partition>(); {}
    HOLDER = size_of::<v1::DiskHolder>(); {}
    DISK = size_of::<v1::Disk>(); { 7 Many(&SERIAL, None), 14 Many(&PARTITION, None), 15 Many(&HOLDER, None) }
    INTERFACE = size_of::<v1::NetworkInterface>(); { 4 Texts(Some(List::Addresses)) }
    FILE_SYSTEM = size_of::<v1::MountedFileSystem>(); {}
    USER = size_of::<v1::UserSession>(); {}
    TOPOLOGY = size_of::<v1::Topology>() + TABLE; { 4 Map }
    NODE = size_of::<v1::Node>() + TABLE; { 6 Map, 7 Texts(None), 8 Texts(None) }
    HEALTH = size_of::<v1::Health>(); { 2 Texts(None), 3 Texts(None) }
    FREEZE = size_of::<v1::LastFreeze>(); {}
    STATE = size_of::<v1::GuestState>(); {
        1 Many(&INTERFACE, Some(List::Interfaces)),
        2 Many(&FILE_SYSTEM, Some(List::FileSystems)),
        3 Many(&USER, Some(List::Users)),
        4 Many(&DISK, Some(List::Disks)),
        40 One(&TOPOLOGY),
        41 One(&NODE),
        42 One(&HEALTH),
        43 One(&FREEZE)
    }
    READY = size_of::<v1::AgentReady>(); { 4 One(&STATE) }
    INTERFACES_CHANGED = size_of::<v1::InterfacesChanged>(); { 1 Many(&INTERFACE, Some(List::Interfaces)) }
    OF_FILE_SYSTEM = size_of::<v1::FileSystemMounted>(); { 1 One(&FILE_SYSTEM) }
    OF_USER = size_of::<v1::UserLoggedIn>(); { 1 One(&USER) }
    OF_WORDS = size_of::<v1::Thawed>(); {}
    OF_DISK = size_of::<v1::DiskMounted>(); { 1 One(&DISK), 2 Texts(None) }
    OF_TOPOLOGY = size_of::<v1::TopologyChanged>(); { 1 One(&TOPOLOGY) }
    OF_NODE = size_of::<v1::NodeChanged>(); { 1 One(&NODE) }
    OF_HEALTH = size_of::<v1::HealthChanged>(); { 1 One(&HEALTH) }
    /// Of an event.
    pub EVENT = size_of::<v1::Event>(); {
        3 One(&READY),
        6 One(&OF_WORDS),
        9 One(&INTERFACES_CHANGED),
        10 One(&OF_FILE_SYSTEM),
        11 One(&OF_FILE_SYSTEM),
        12 One(&OF_USER),
        13 One(&OF_USER),
        17 One(&OF_WORDS),
        18 One(&OF_WORDS),
        19 One(&OF_DISK),
        20 One(&OF_DISK),
        21 One(&OF_DISK),
        22 One(&OF_DISK),
        23 One(&OF_DISK),
        24 One(&OF_DISK),
        40 One(&OF_TOPOLOGY),
        41 One(&OF_WORDS),
        42 One(&OF_NODE),
        43 One(&OF_HEALTH)
    }
    SYSTEM = size_of::<v1::OperatingSystem>(); {}
    INFO = size_of::<v1::GuestInfo>(); { 5 One(&SYSTEM), 9 Texts(None) }
    ANSWER = size_of::<v1::ReleaseDiskResponse>(); { 1 One(&DISK) }
}

/// Checks an answer to a call before it is decoded: those of guests that have lists.
///
/// # Errors
/// If it would take more memory than any answer needs, in words.
pub fn check<T: 'static>(bytes: &[u8]) -> Result<(), String> {
    let is = |other| TypeId::of::<T>() == other;
    let shape = if is(TypeId::of::<v1::GuestInfo>()) {
        &INFO
    } else if is(TypeId::of::<v1::FindDiskResponse>()) || is(TypeId::of::<v1::ReleaseDiskResponse>()) {
        &ANSWER
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

/// The bytes of memory that decoding takes at most, of a message whose lists have no more entries than `most` allows.
///
/// # Errors
/// If they have more, which is told as soon as one entry is too many, or if it is no message.
pub fn weigh(shape: &Shape, bytes: &[u8], most: impl Fn(List) -> usize) -> Result<usize, Unfit> {
    add_up(shape, bytes, &most, &mut Counts::default())
}

/// Entries so far.
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
            None => text(value),
            Some(Texts(list)) => {
                counts.add(*list, most)?;
                GROWTH * size_of::<String>() + text(value)
            }
            Some(Map) => GROWTH * (2 * size_of::<String>() + 1) + text(value) + text(&[]),
            // Several of a single message are made one, with all entries of their lists.
            Some(One(shape)) => 2 * shape.size + PIECE + add_up(shape, value, most, counts)?,
            Some(Many(shape, list)) => {
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

/// Takes the next field: its number, and what it holds if that is bytes. None if there is none.
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
            weigh(&EVENT, &bytes, move |list| match list {
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
        assert_eq!(weigh(&EVENT, &twice, most(9)), Err(Unfit::Many(List::Disks)));
        assert!(weigh(&EVENT, &twice, most(10)).is_ok());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&b"\x00"[..], b"\x0a", b"\x0a\x02x", b"\x1b\x1c", b"\x80", &[0xff; 11], b"\x09123"] {
            assert_eq!(weigh(&EVENT, bytes, |_| usize::MAX), Err(Unfit::Malformed), "{bytes:x?}");
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
