//! The text of an answer, built once in the buffer that is written to the client, or made in parts while it is
//! written.

use std::fmt;
use std::pin::Pin;

use futures_util::Stream;
use serde::Serialize;

use crate::qga::error::Error;

/// The rest of a reply. The stream ends in bounded time, whatever it waits for: nothing else can be said to the
/// client before it has.
pub type Parts = Pin<Box<dyn Stream<Item = Vec<u8>> + Send>>;

/// What a command returns, already as JSON text, without its closing bracket.
pub struct Reply {
    text: Vec<u8>,
    parts: Option<Parts>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Reply");
        debug.field("text", &String::from_utf8_lossy(&self.text)).finish_non_exhaustive()
    }
}

impl Reply {
    /// A reply with this value.
    ///
    /// # Errors
    /// If the value is none that JSON has, such as a map with keys that are not strings.
    pub fn value<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        Self::after(Vec::with_capacity(128), value)
    }

    /// The empty object, which says that a command without a result succeeded.
    pub fn empty() -> Self {
        Self::whole(b"{\"return\":{}".to_vec())
    }

    /// A reply after a byte 0xFF, by which a client finds the beginning of an answer in a stream that may
    /// hold leftovers.
    ///
    /// # Errors
    /// As [`Reply::value`].
    pub fn delimited<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        Self::after(vec![0xff], value)
    }

    /// A reply whose value is the JSON text that `pieces` make together.
    pub fn of(pieces: &[&[u8]]) -> Self {
        let mut text = Vec::with_capacity(64 + pieces.iter().map(|piece| piece.len()).sum::<usize>());
        text.extend_from_slice(b"{\"return\":");
        for piece in pieces {
            text.extend_from_slice(piece);
        }
        Self::whole(text)
    }

    /// A reply too large to be held at once: `pieces` are the JSON text of the result as far as it is known, and
    /// the rest comes in `parts` while the client reads. Whoever makes them sees to it that the whole is JSON.
    pub fn in_parts(pieces: &[&[u8]], parts: Parts) -> Self {
        Self { parts: Some(parts), ..Self::of(pieces) }
    }

    fn whole(text: Vec<u8>) -> Self {
        Self { text, parts: None }
    }

    fn after<T: Serialize + ?Sized>(mut text: Vec<u8>, value: &T) -> Result<Self, Error> {
        text.extend_from_slice(b"{\"return\":");
        serde_json::to_writer(&mut text, value)
            .map_err(|error| Error::generic(format!("the result cannot be encoded as JSON: {error}")))?;
        Ok(Self::whole(text))
    }
}

/// The line that answers a request; empty where none does.
#[derive(Default)]
pub struct Line {
    /// Its beginning; all of it where there are no parts.
    pub text: Vec<u8>,
    /// What follows, and what is written at the end.
    pub rest: Option<(Parts, Vec<u8>)>,
}

/// The line that answers a request with this id.
pub fn line(outcome: Result<Reply, Error>, id: Option<&str>) -> Line {
    let Reply { mut text, parts } = outcome.unwrap_or_else(|error| {
        let mut text = b"{\"error\":".to_vec();
        // A struct of a name and a string always serialises.
        let _ = serde_json::to_writer(&mut text, &error);
        Reply::whole(text)
    });
    match parts {
        None => {
            end(&mut text, id);
            Line { text, rest: None }
        }
        Some(parts) => {
            let mut last = Vec::new();
            end(&mut last, id);
            Line { text, rest: Some((parts, last)) }
        }
    }
}

fn end(text: &mut Vec<u8>, id: Option<&str>) {
    if let Some(id) = id {
        text.extend_from_slice(b",\"id\":");
        // Line breaks can only be white space between tokens: an answer is one line.
        text.extend(id.bytes().filter(|byte| !byte.is_ascii_control()));
    }
    text.extend_from_slice(b"}\n");
}
