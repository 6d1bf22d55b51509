//! QGA framing: a stream of JSON values without a reliable separator.
//!
//! The decoder finds the end of each value; callers interpret it. It behaves like QEMU's own parser:
//!
//! * values follow each other with any white space, or none, between them;
//! * strings may be in single quotes, and `\'` is an escape in both kinds of quotes;
//! * a byte that is not allowed at its position is one error, and so is a byte 0xFF anywhere; after an error
//!   everything up to the next control character or structural character is skipped, so that one malformed
//!   message does not affect the next;
//! * a value larger than [`MAX_MESSAGE`] or nested deeper than [`MAX_DEPTH`] is an error, and decoding continues.
//!
//! ```text
//!          '{' '['                 quote                   '\'
//! Between ────────▶ Inside ◀──────────────────▶ String ◀────────▶ Escape
//!    ▲  ▲             │ balanced: a message        │
//!    │  └─────────────┘                            │
//!    └──structural or control── Recovery ◀─────────┴── a byte that cannot stand here
//! ```

use std::borrow::Cow;

/// The largest message in bytes (QEMU's JSON parser: 64 MiB of tokens).
pub const MAX_MESSAGE: usize = 64 << 20;
/// The deepest nesting of objects and arrays (QEMU's JSON parser).
pub const MAX_DEPTH: usize = 1024;
/// Capacity that an empty buffer may keep, in bytes.
const KEEP: usize = 64 * 1024;

/// Result of the decoder.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// One object or array with balanced brackets, as JSON text with double quotes; not yet parsed.
    Message(Cow<'a, [u8]>),
    /// Bytes that are not a valid message.
    Malformed(Malformed),
}

/// Reason why bytes were discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A byte that is not part of any JSON token at its place.
    #[error("invalid JSON: unexpected byte 0x{0:02x}")]
    Stray(u8),
    /// A closing bracket that nothing opened.
    #[error("invalid JSON: {0:?} closes nothing that is open")]
    Unbalanced(char),
    /// A scalar where a command belongs.
    #[error("a command must be a JSON object")]
    NotAnObject,
    /// Nesting beyond [`MAX_DEPTH`].
    #[error("invalid JSON: nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// Message larger than [`MAX_MESSAGE`].
    #[error("the message is larger than {} MiB", MAX_MESSAGE >> 20)]
    TooLarge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Between,
    /// Inside a number or keyword outside of any object or array.
    Scalar,
    Inside,
    String {
        quote: u8,
    },
    Escape {
        quote: u8,
    },
    Recovery,
}

/// Splits a byte stream into messages. Feed it through [`Decoder::input`], then drain [`Decoder::next`].
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Offset of the current message.
    start: usize,
    /// The next byte to look at.
    at: usize,
    state: State,
    braces: usize,
    brackets: usize,
    /// The current message has something that only QEMU's JSON allows.
    dialect: bool,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder at the beginning of a stream.
    pub fn new() -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            at: 0,
            state: State::Between,
            braces: 0,
            brackets: 0,
            dialect: false,
        }
    }

    /// Gives a large buffer back, if nothing is in it.
    pub fn shrink(&mut self) {
        if self.input().is_empty() && self.buffer.capacity() > KEEP {
            self.buffer = Vec::new();
        }
    }

    /// The buffer to append bytes to; what was returned is dropped from it here.
    pub fn input(&mut self) -> &mut Vec<u8> {
        if self.start == self.buffer.len() {
            self.buffer.clear();
        } else {
            self.buffer.drain(..self.start);
        }
        self.at -= self.start;
        self.start = 0;
        &mut self.buffer
    }

    /// Bytes of a message that has begun and not ended.
    pub fn partial_length(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Discards an incomplete message, including the part that has not arrived yet.
    pub fn drop_partial(&mut self) {
        self.at = self.buffer.len();
        self.begin_anew(State::Recovery);
    }

    /// Returns whether a message is incomplete.
    pub fn is_partial(&self) -> bool {
        !matches!(self.state, State::Between | State::Recovery)
    }

    /// The next message or error among the bytes at hand; `None` when more bytes are needed.
    #[allow(clippy::should_implement_trait, reason = "a lending iterator")]
    pub fn next(&mut self) -> Option<Frame<'_>> {
        while let Some(&byte) = self.buffer.get(self.at) {
            match self.state {
                State::Between => {
                    self.start = self.at;
                    match byte {
                        b' ' | b'\t' | b'\n' | b'\r' => self.start += 1,
                        b'{' | b'[' => {
                            self.state = State::Inside;
                            continue;
                        }
                        b'"' | b'\'' => self.state = State::String { quote: byte },
                        b'a'..=b'z' | b'0'..=b'9' | b'-' => self.state = State::Scalar,
                        b'}' | b']' | b',' | b':' => {
                            return Some(self.reject(Malformed::Unbalanced(byte.into())));
                        }
                        _ => return Some(self.reject(Malformed::Stray(byte))),
                    }
                }
                State::Scalar => match byte {
                    byte if is_scalar(byte) => {}
                    _ => {
                        // The byte after it belongs to what follows.
                        self.at -= 1;
                        return Some(self.reject(Malformed::NotAnObject));
                    }
                },
                State::Inside => match byte {
                    b'{' => self.braces += 1,
                    b'[' => self.brackets += 1,
                    b'}' | b']' => {
                        let open = if byte == b'}' { &mut self.braces } else { &mut self.brackets };
                        let Some(left) = open.checked_sub(1) else {
                            return Some(self.reject(Malformed::Unbalanced(byte.into())));
                        };
                        *open = left;
                        if self.braces + self.brackets == 0 {
                            return Some(self.accept());
                        }
                    }
                    b'"' => self.state = State::String { quote: byte },
                    b'\'' => {
                        self.dialect = true;
                        self.state = State::String { quote: byte };
                    }
                    b' ' | b'\t' | b'\n' | b'\r' | b',' | b':' => {}
                    byte if is_scalar(byte) => {}
                    _ => return Some(self.reject(Malformed::Stray(byte))),
                },
                State::String { quote } => {
                    self.at += plain_prefix(&self.buffer[self.at..], quote);
                    match self.buffer.get(self.at) {
                        None => break,
                        Some(b'\\') => self.state = State::Escape { quote },
                        Some(&end) if end == quote => {
                            self.state = State::Inside;
                            if self.braces + self.brackets == 0 {
                                return Some(self.reject(Malformed::NotAnObject));
                            }
                        }
                        Some(&stray) => return Some(self.reject(Malformed::Stray(stray))),
                    }
                }
                State::Escape { quote } => match byte {
                    b'\'' => {
                        self.dialect = true;
                        self.state = State::String { quote };
                    }
                    0x20..=0xfd => self.state = State::String { quote },
                    _ => return Some(self.reject(Malformed::Stray(byte))),
                },
                State::Recovery => {
                    self.start = self.at;
                    match byte {
                        b'\t' => self.start += 1,
                        b'{' | b'}' | b'[' | b']' | b',' | b':' | 0..0x20 | 0xfe.. => {
                            self.state = State::Between;
                            continue;
                        }
                        _ => self.start += 1,
                    }
                }
            }
            self.at += 1;
            if self.braces + self.brackets > MAX_DEPTH {
                self.at -= 1;
                return Some(self.restart(Malformed::TooDeep, State::Between));
            }
            if self.at - self.start > MAX_MESSAGE {
                self.at -= 1;
                return Some(self.restart(Malformed::TooLarge, State::Recovery));
            }
        }
        if self.at - self.start > MAX_MESSAGE {
            self.at -= 1;
            return Some(self.restart(Malformed::TooLarge, State::Recovery));
        }
        None
    }

    fn accept(&mut self) -> Frame<'_> {
        let start = self.start;
        self.at += 1;
        self.start = self.at;
        self.state = State::Between;
        let text = &self.buffer[start..self.at];
        if std::mem::take(&mut self.dialect) {
            Frame::Message(Cow::Owned(to_standard(text)))
        } else {
            Frame::Message(Cow::Borrowed(text))
        }
    }

    /// Throws away the current message with the byte at hand.
    fn reject(&mut self, why: Malformed) -> Frame<'_> {
        let state = match why {
            Malformed::Stray(_) => State::Recovery,
            _ => State::Between,
        };
        self.restart(why, state)
    }

    fn restart(&mut self, why: Malformed, state: State) -> Frame<'_> {
        self.at += 1;
        self.begin_anew(state);
        Frame::Malformed(why)
    }

    fn begin_anew(&mut self, state: State) {
        self.start = self.at;
        self.state = state;
        self.braces = 0;
        self.brackets = 0;
        self.dialect = false;
    }
}

/// Returns whether a byte can be part of a number or a keyword.
fn is_scalar(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'+' | b'.' | b'E')
}

/// Returns the length of the prefix of `bytes` without special bytes, in a string that ends with `quote`.
fn plain_prefix(bytes: &[u8], quote: u8) -> usize {
    const BLOCK: usize = 32;
    let special = |byte: u8| byte < 0x20 || byte == quote || byte == b'\\' || byte >= 0xfe;
    // A file's contents are one string of megabytes: words at a time, and no look at which byte it is.
    let blocks = bytes.chunks_exact(BLOCK);
    let plain = blocks.take_while(|block| {
        !block.chunks_exact(8).fold(false, |found, word| found | has_special(word, quote))
    });
    let length = plain.count() * BLOCK;
    length + bytes[length..].iter().position(|byte| special(*byte)).unwrap_or(bytes.len() - length)
}

/// Returns whether one of eight bytes is special: a control character, the quote, a backslash, or 0xFE or
/// above. The test is done on the whole word. The highest bit of each byte in `(x - n) & !x` is set if that
/// byte of x is less than n, for n up to 0x80. A borrow can set further bits only next to a byte for which
/// this holds, so the result for the word is right.
fn has_special(bytes: &[u8], quote: u8) -> bool {
    const EACH: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = EACH << 7;
    let word = bytes.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    let less = |x: u64, n: u8| x.wrapping_sub(EACH * u64::from(n)) & !x;
    let control = less(word, 0x20);
    let quoted = less(word ^ (EACH * u64::from(quote)), 1);
    let escaped = less(word ^ (EACH * u64::from(b'\\')), 1);
    let impossible = less(!word, 2);
    (control | quoted | escaped | impossible) & HIGH != 0
}

/// Rewrites QEMU's dialect (balanced, as the decoder found it) to standard JSON.
fn to_standard(text: &[u8]) -> Vec<u8> {
    let mut standard = Vec::with_capacity(text.len() + 16);
    let mut bytes = text.iter().copied();
    let mut open = None;
    while let Some(byte) = bytes.next() {
        match (open, byte) {
            (None, b'"' | b'\'') => {
                open = Some(byte);
                standard.push(b'"');
            }
            (Some(quote), byte) if byte == quote => {
                open = None;
                standard.push(b'"');
            }
            (Some(_), b'"') => standard.extend_from_slice(b"\\\""),
            (Some(_), b'\\') => match bytes.next() {
                Some(b'\'') => standard.push(b'\''),
                Some(escaped) => standard.extend_from_slice(&[b'\\', escaped]),
                None => standard.push(b'\\'),
            },
            (_, byte) => standard.push(byte),
        }
    }
    standard
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes `input`, fed in pieces of `step` bytes, and returns all frames: messages as text, errors by their
    /// description.
    fn decode(input: &[u8], step: usize) -> Vec<Decoded> {
        let mut decoder = Decoder::new();
        let mut frames = Vec::new();
        for piece in input.chunks(step.max(1)) {
            decoder.input().extend_from_slice(piece);
            while let Some(frame) = decoder.next() {
                frames.push(match frame {
                    Frame::Message(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
                    Frame::Malformed(why) => Err(why),
                });
            }
        }
        frames
    }

    type Decoded = Result<String, Malformed>;

    #[allow(clippy::unnecessary_wraps)]
    fn ok(text: &str) -> Decoded {
        Ok(text.to_owned())
    }

    #[test]
    fn frames() {
        use Malformed::{NotAnObject, Stray, Unbalanced};
        let ping = r#"{"execute":"guest-ping"}"#;
        let cases: Vec<(&str, Vec<u8>, Vec<Decoded>)> = vec![
            ("one", ping.into(), vec![ok(ping)]),
            ("no separator", [ping, ping].concat().into(), vec![ok(ping), ok(ping)]),
            ("white space", format!(" \r\n\t{ping}\n\n").into(), vec![ok(ping)]),
            ("single quotes", b"{'execute':'guest-ping'}".into(), vec![ok(ping)]),
            (
                "quotes in quotes",
                br#"{'a"b':"c'd", 'e\'f': "g\'h"}"#.into(),
                vec![ok(r#"{"a\"b":"c'd", "e'f": "g'h"}"#)],
            ),
            ("brackets in strings", br#"{"a":"}]\"}"}"#.into(), vec![ok(r#"{"a":"}]\"}"}"#)]),
            ("the reset byte", [b"\xff", ping.as_bytes()].concat(), vec![Err(Stray(0xff)), ok(ping)]),
            (
                "the reset byte within a message",
                [br#"{"execute":"gu"#, &b"\xff"[..], ping.as_bytes()].concat(),
                vec![Err(Stray(0xff)), ok(ping)],
            ),
            (
                "a line that is not JSON",
                format!("GET / HTTP\n{ping}").into(),
                vec![Err(Stray(b'G')), ok(ping)],
            ),
            ("a keyword", format!("abc {ping}").into(), vec![Err(NotAnObject), ok(ping)]),
            ("a number", format!("1.5{ping}").into(), vec![Err(NotAnObject), ok(ping)]),
            ("a string", format!("\"x\"{ping}").into(), vec![Err(NotAnObject), ok(ping)]),
            (
                "a string over a line's end",
                format!("{{\"x\n{ping}").into(),
                vec![Err(Stray(b'\n')), ok(ping)],
            ),
            (
                "closed too often",
                format!("}}]{ping}").into(),
                vec![Err(Unbalanced('}')), Err(Unbalanced(']')), ok(ping)],
            ),
            ("crossed brackets", format!("{{]{ping}").into(), vec![Err(Unbalanced(']')), ok(ping)]),
            ("an array", b"[1,[2]]".into(), vec![ok("[1,[2]]")]),
            ("nothing yet", br#"{"execute":"#.into(), vec![]),
        ];
        for (name, input, expected) in cases {
            for step in [1, 2, 3, input.len()] {
                assert_eq!(decode(&input, step), expected, "{name}, in pieces of {step}");
            }
        }
    }

    #[test]
    fn too_deep_is_one_error_and_the_stream_goes_on() {
        let input = ["[".repeat(MAX_DEPTH + 1).as_str(), "\n{}"].concat();
        assert_eq!(decode(input.as_bytes(), 4096), [Err(Malformed::TooDeep), ok("{}")]);
        let deepest = ["[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH)].concat();
        assert_eq!(decode(deepest.as_bytes(), 4096), [ok(&deepest)]);
    }

    #[test]
    fn too_large_is_one_error_and_memory_stays_bounded() {
        let mut decoder = Decoder::new();
        decoder.input().extend_from_slice(b"{\"a\":\"");
        let block = vec![b'x'; 1 << 20];
        let mut errors = 0;
        for _ in 0..200 {
            decoder.input().extend_from_slice(&block);
            while let Some(frame) = decoder.next() {
                assert_eq!(frame, Frame::Malformed(Malformed::TooLarge));
                errors += 1;
            }
            assert!(decoder.buffer.capacity() <= 2 * MAX_MESSAGE + block.len());
        }
        assert_eq!(errors, 1);
        decoder.input().extend_from_slice(b"\"}\n{}");
        let mut last = None;
        while let Some(frame) = decoder.next() {
            last = Some(matches!(frame, Frame::Message(_)));
        }
        assert_eq!(last, Some(true));
    }

    #[test]
    fn a_large_buffer_is_given_back() {
        let mut decoder = Decoder::new();
        let message = format!("{{\"a\":\"{}\"}}", "x".repeat(1 << 20));
        decoder.input().extend_from_slice(message.as_bytes());
        assert!(matches!(decoder.next(), Some(Frame::Message(_))));
        decoder.shrink();
        assert!(decoder.input().capacity() <= KEEP);
    }

    proptest! {
        #[test]
        fn words_are_looked_at_as_their_bytes_are(bytes: [u8; 8], quote in proptest::sample::select(&b"\"'"[..])) {
            let special = |byte: &u8| *byte < 0x20 || *byte == quote || *byte == b'\\' || *byte >= 0xfe;
            prop_assert_eq!(has_special(&bytes, quote), bytes.iter().any(special));
        }

        #[test]
        fn how_bytes_are_cut_into_reads_changes_nothing(
            input in proptest::collection::vec(
                prop_oneof![
                    4 => proptest::sample::select(&b"{}[]\"'\\,: \naE1-"[..]),
                    1 => any::<u8>(),
                ], 0..200),
            step in 1usize..17,
        ) {
            prop_assert_eq!(decode(&input, step), decode(&input, input.len()));
        }

        #[test]
        fn any_json_object_comes_out_as_it_went_in(text in "\\PC{0,40}", number: i64, before in "[ \r\n\t]{0,3}") {
            let value = serde_json::json!({ "execute": text, "arguments": { text.clone(): [number, null, true] } });
            let wire = format!("{before}{value}");
            prop_assert_eq!(decode(wire.as_bytes(), 7), vec![Ok(value.to_string())]);
        }

        #[test]
        fn after_any_garbage_the_reset_byte_and_a_line_end_make_the_stream_clean(
            garbage in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut input = garbage;
            input.extend_from_slice(b"\xff\n{\"a\":1}");
            let frames = decode(&input, 5);
            prop_assert_eq!(frames.last(), Some(&ok("{\"a\":1}")));
        }
    }
}
