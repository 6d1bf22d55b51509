//! What must hold for any bytes from the other side: shared by the fuzz targets and the test of their corpus.

#[path = "dispatch.rs"]
pub mod dispatch;
#[path = "greeting.rs"]
pub mod greeting;

use std::cell::RefCell;
use std::convert::Infallible;

use futures_util::StreamExt as _;
use guestlet::config::{environment_file, key_file};
use guestlet::guest::disks::location::locate;
use guestlet::qga::request::Request;
use guestlet::sys::partition_table::Disk as _;
use guestlet::sys::rtnetlink::message::Answer as NetworkAnswer;
use guestlet::sys::{
    block, disk_serial, diskstats, mountinfo, os_release, partition_table, smbios, superblock, udev, uevents,
    vital_product_data,
};
use guestlet::transport::callback;
use guestlet::transport::http2::foreign::Requests;
use guestlet::trust::anchors;
use guestlet::wire::hybrid::{Answer, MAX_ANSWER};
use guestlet::wire::proto::v1::callback_from_host::Message as FromHost;
use guestlet::wire::proto::v1::{CallbackBounds, CallbackFromGuest, CallbackFromHost};
use guestlet::wire::qga::{Decoder, Frame};
use guestlet::wire::qmp::{Lines, Message};

/// Framing and requests of the QGA protocol.
pub fn qga(bytes: &[u8]) {
    let whole = frames(bytes, bytes.len().max(1));
    assert_eq!(whole, frames(bytes, 1), "how bytes are cut into reads must not matter");
    for message in whole.into_iter().flatten() {
        assert!(matches!(message.first(), Some(b'{' | b'[')), "a message is an object or an array");
        if let Ok(request) = Request::parse(&message)
            && let Ok((name, arguments)) = request.call()
        {
            assert!(name.len() <= message.len());
            let _ = arguments.none();
        }
    }
    // Whatever came before: after the reset byte and a line's end the next message is understood.
    let message = b"{\"execute\":\"guest-ping\"}";
    let cleaned = frames(&[bytes, b"\xff\n", message].concat(), 7);
    assert_eq!(cleaned.last(), Some(&Some(message.to_vec())));
}

/// Messages, or nothing where something was malformed.
fn frames(bytes: &[u8], step: usize) -> Vec<Option<Vec<u8>>> {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    for piece in bytes.chunks(step) {
        decoder.input().extend_from_slice(piece);
        while let Some(frame) = decoder.next() {
            frames.push(match frame {
                Frame::Message(text) => Some(text.into_owned()),
                Frame::Malformed(_) => None,
            });
        }
    }
    frames
}

/// What a gRPC client sends: the frames of HTTP/2 and the header blocks in them.
pub fn http2(bytes: &[u8]) {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let passed = |bytes: &[u8], step: usize| {
        let mut requests = Requests::default();
        let mut out = Vec::new();
        for piece in bytes.chunks(step) {
            requests.take(piece, &mut out);
        }
        out
    };
    let connection = [preface, bytes].concat();
    let whole = passed(&connection, connection.len());
    assert_eq!(whole, passed(&connection, 1), "how bytes are cut into reads must not matter");
    assert!(whole.starts_with(preface));
    // An authority that was replaced is one that is left as it is.
    assert_eq!(whole, passed(&whole, 7));
    // One byte names that of the static table, which becomes three.
    assert!(whole.len() <= preface.len() + 3 * bytes.len(), "{} from {}", whole.len(), bytes.len());
    if !preface.starts_with(bytes) && !bytes.starts_with(preface) {
        assert_eq!(passed(bytes, 3), bytes, "what is not HTTP/2 passes");
    }
}

/// The answer of a hybrid vsock's socket.
pub fn hybrid(bytes: &[u8]) {
    let mut answer = Answer::default();
    for (count, byte) in bytes.iter().enumerate() {
        match answer.push(*byte) {
            Ok(None) => assert!(count < MAX_ANSWER, "an answer without end"),
            Ok(Some(_)) => return assert_eq!(*byte, b'\n'),
            Err(_) => return,
        }
    }
}

/// What a QMP socket says.
pub fn qmp(bytes: &[u8]) {
    let lines = |step: usize| {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        for piece in bytes.chunks(step) {
            lines.push(piece);
            while let Ok(Some(line)) = lines.next_line() {
                found.push(line);
            }
        }
        found
    };
    let whole = lines(bytes.len().max(1));
    assert_eq!(whole, lines(1), "how bytes are cut into reads must not matter");
    for line in whole {
        let _ = Message::parse(&line);
    }
}

/// Files of the kernel and of the distribution.
pub fn parsers(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    netlink(bytes);
    drop(os_release::value(bytes, "ID"));
    drop(mountinfo::parse(bytes));
    drop(block::parse_partitions(&text));
    drop(diskstats::parse(&text));
    drop(disk_serial::unit_serial(bytes));
    drop(disk_serial::vendor_identifier(bytes));
    drop(vital_product_data::designation(bytes));
    assert!(uevents::parse(bytes).is_none_or(|uevent| uevent.place.starts_with("/sys/")));
    let _ = udev::property(bytes, "ID_SERIAL");
    for path in text.lines() {
        locate(&block::follow("/sys/block", path), |_| Some("ahci".into()), |_, _| vec![1]);
    }
    drop(environment_file::parse(&text));
    for entry in key_file::parse(bytes).unwrap_or_default() {
        assert!(!entry.group.is_empty() && !entry.key.is_empty());
        if let Ok(value) = key_file::string(entry.value) {
            let again = format!("[general]\nkey={}", key_file::quote(&value));
            let again = key_file::parse(again.as_bytes()).unwrap_or_default();
            assert_eq!(again.first().map(|entry| key_file::string(entry.value)), Some(Ok(value)));
        }
    }
}

/// Lines of public keys: what is read can be written, and is the same again.
pub fn anchors(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match anchors::parse("fuzz", &text) {
        Ok(found) => {
            assert!((1..=anchors::MAX_KEYS).contains(&found.len()));
            let line = |anchor: &anchors::Anchor| {
                anchors::line(&anchor.public_key, anchor.is_ca, &anchor.roles, &anchor.comment)
            };
            let written: Vec<_> = found.iter().map(line).collect();
            let again = anchors::parse("fuzz", &written.join("\n")).expect("what was written is read");
            assert_eq!(again.iter().map(line).collect::<Vec<_>>(), written);
            assert_eq!(anchors::merge([found.clone(), again]).expect("both say the same"), found);
        }
        Err(error) => {
            assert!(error.origin.line <= text.lines().count().max(1));
            assert!(error.to_string().len() < 512, "a message repeats what was read: {error}");
        }
    }
}

/// The table of the firmware.
pub fn smbios(bytes: &[u8]) {
    if let Ok(strings) = smbios::oem_strings(bytes) {
        assert!(strings.iter().map(|string| string.len() + 1).sum::<usize>() <= bytes.len());
        assert!(strings.iter().all(|string| !string.is_empty() && !string.contains(&0)));
    }
}

/// What is on a disk: partition tables and superblocks. The input is pieces: where each is put (four bytes), how long it is
/// (two), and its bytes; on a disk of 2 MiB that is empty else. The first byte says how long the disk's sectors are.
pub fn disk(bytes: &[u8]) {
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let disk =
        Small { sector: if first & 1 == 0 { 512 } else { 4096 }, bytes: RefCell::new(vec![0; 2 << 20]) };
    while let Some((head, tail)) = rest.split_first_chunk::<6>() {
        let at = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let length = usize::from(u16::from_le_bytes([head[4], head[5]])).min(tail.len());
        let (piece, after) = tail.split_at(length);
        let mut bytes = disk.bytes.borrow_mut();
        let end = bytes.len();
        let (at, until) = (at.min(end), at.saturating_add(length).min(end));
        bytes[at..until].copy_from_slice(&piece[..until - at]);
        rest = after;
    }
    if let Some(found) = superblock::parse(&disk.bytes.borrow()) {
        assert!(found.block > 0, "{found:?}");
    }
    let Ok(before) = partition_table::partitions(&disk) else { return };
    assert!(before.iter().all(|partition| partition.number > 0));
    let Ok(growth) = partition_table::grow(&disk, None) else { return };
    let grown = growth.partition;
    assert!(grown.start + grown.sectors <= disk.sectors(), "beyond the disk: {grown:?}");
    let last = before.iter().find(|partition| partition.number == grown.number).unwrap();
    assert!(last.start == grown.start && last.sectors <= grown.sectors, "{last:?} {grown:?}");
    for write in growth.writes.iter().flatten() {
        let at = usize::try_from(write.sector).unwrap() * disk.sector as usize;
        disk.bytes.borrow_mut()[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    let after = partition_table::partitions(&disk).expect("a table that was written is a table");
    for (before, after) in before.iter().zip(&after) {
        let expected = if before.number == grown.number { grown } else { *before };
        assert_eq!(*after, expected);
    }
    let again = partition_table::grow(&disk, None).expect("it can grow again");
    assert!(again.writes.is_empty() && again.partition == grown, "{again:?}");
}

struct Small {
    sector: u32,
    bytes: RefCell<Vec<u8>>,
}

impl partition_table::Disk for Small {
    type Error = Infallible;

    fn sector(&self) -> u32 {
        self.sector
    }

    fn sectors(&self) -> u64 {
        self.bytes.borrow().len() as u64 / u64::from(self.sector)
    }

    fn read(&self, first: u64, count: u64) -> Result<Vec<u8>, Infallible> {
        assert!(count <= self.sectors(), "more than there is: {count}");
        let at = |sector: u64| {
            usize::try_from(sector.saturating_mul(u64::from(self.sector))).unwrap_or(usize::MAX)
        };
        let bytes = self.bytes.borrow();
        let (from, until) = (at(first).min(bytes.len()), at(first.saturating_add(count)).min(bytes.len()));
        let mut read = bytes[from..until].to_vec();
        read.resize(at(count), 0);
        Ok(read)
    }
}

/// What rtnetlink answers.
fn netlink(bytes: &[u8]) {
    // The request that is answered is named by the first message.
    let sequence = bytes.get(8..12).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
    let mut answer = NetworkAnswer::default();
    let _ = answer.take(bytes, sequence);
    assert!((answer.links.len() + answer.addresses.len()) * 24 <= bytes.len(), "more than was said");
    assert!(answer.links.iter().all(|link| !link.name.is_empty() && !link.name.contains('\0')));
    for address in &answer.addresses {
        assert!(address.prefix <= if address.ip.is_ipv4() { 32 } else { 128 });
    }
    answer.is_whole();
}

/// What a guest asks of its host half, and what that answers: each message behind its length in one byte.
pub fn callback(bytes: &[u8]) {
    const OPEN_CALLS: u32 = 4;
    let bounds =
        CallbackBounds { host_instance_id: String::new(), open_calls: OPEN_CALLS, request_bytes: 64 };
    let from_guest = messages::<CallbackFromGuest>(bytes);
    let numbers: Vec<_> = from_guest.iter().map(|message| message.number).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let answered = runtime.block_on(async {
        let mut answered = Vec::new();
        let (give, mut taken) = tokio::sync::oneshot::channel();
        let calls = futures_util::stream::iter(from_guest.into_iter().map(Ok));
        let serving = callback::serve(bounds.clone(), Silent, async |messages| {
            let _ = give.send(messages);
            Ok(calls)
        });
        let _ = serving.await;
        let mut messages = taken.try_recv().unwrap();
        while let Some(message) = messages.next().await {
            if let Some(FromHost::Answer(answer)) = message.message {
                answered.push(answer.number);
            }
        }
        answered
    });
    assert!(answered.iter().all(|number| numbers.contains(number)), "an answer to no call");
    // The other way.
    let answers = messages::<CallbackFromHost>(bytes);
    runtime.block_on(async {
        let (mut caller, mut calls) =
            callback::open(&bounds, futures_util::stream::iter(answers.into_iter().map(Ok)));
        let request = http::Request::new(tonic::body::Body::empty());
        let call = tower_service::Service::call(&mut caller, request);
        let ending = async { while let Some(Ok(_)) = calls.next().await {} };
        tokio::join!(async { drop(call.await) }, ending);
    });
}

/// Answers nothing that makes sense, at once.
#[derive(Clone)]
struct Silent;

impl tower_service::Service<http::Request<tonic::body::Body>> for Silent {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<tonic::body::Body>) -> Self::Future {
        std::future::ready(Ok(http::Response::new(tonic::body::Body::empty())))
    }
}

/// Those of a kind.
fn messages<M: prost::Message + Default>(mut bytes: &[u8]) -> Vec<M> {
    let mut found = Vec::new();
    while let Some((length, rest)) = bytes.split_first() {
        let (message, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        found.extend(M::decode(message));
        bytes = rest;
    }
    found
}
