//! What must hold for any bytes from the other side: shared by the fuzz targets and the test of their corpus.

use guestlet::qga::request::Request;
use guestlet::wire::qga::{Decoder, Frame};

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
