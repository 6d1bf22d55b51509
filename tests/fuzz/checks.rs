//! What must hold for any bytes from the other side: shared by the fuzz targets and the test of their corpus.

#[path = "dispatch.rs"]
pub mod dispatch;

use guestlet::config::{environment_file, key_file};
use guestlet::guest::disks::location::locate;
use guestlet::qga::request::Request;
use guestlet::sys::rtnetlink::message::Answer as NetworkAnswer;
use guestlet::sys::{
    block, disk_serial, diskstats, mountinfo, os_release, udev, uevents, vital_product_data,
};
use guestlet::wire::hybrid::{Answer, MAX_ANSWER};
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
