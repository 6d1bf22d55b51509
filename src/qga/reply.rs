//! Text of an answer, built once in the buffer that is written to the client, or produced in parts while it is
//! written.

use std::fmt;
use std::pin::Pin;

use futures_util::Stream;
use serde::Serialize;

use crate::qga::error::Error;

/// Rest of a reply. The stream must end in bounded time, whatever it waits for: nothing else can be sent to the
/// client before.
pub type Parts = Pin<Box<dyn Stream<Item = Vec<u8>> + Send>>;

/// Result of a command as JSON text, without its closing bracket.
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
    /// Creates a reply with this value.
    ///
    /// # Errors
    /// If the value cannot be encoded as JSON, such as a map with keys that are not strings.
    pub fn value<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        Self::after(Vec::with_capacity(128), value)
    }

    /// Creates the reply of a command without a result: an empty object, which means success.
    pub fn empty() -> Self {
        Self::whole(b"{\"return\":{}".to_vec())
    }

    /// Creates a reply after a byte 0xFF, with which a client finds the beginning of an answer in a stream that may
    /// contain old answers.
    ///
    /// # Errors
    /// The errors of [`Reply::value`].
    pub fn delimited<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        Self::after(vec![0xff], value)
    }

    /// Creates a reply whose value is the JSON text that `pieces` form together.
    pub fn of(pieces: &[&[u8]]) -> Self {
        let mut text = Vec::with_capacity(64 + pieces.iter().map(|piece| piece.len()).sum::<usize>());
        text.extend_from_slice(b"{\"return\":");
        for piece in pieces {
            text.extend_from_slice(piece);
        }
        Self::whole(text)
    }

    /// Creates a reply that is too large to be in memory at once: `pieces` form the beginning of the JSON text of the
    /// result, and the rest comes in `parts` while the client reads. The caller makes sure that the whole is valid
    /// JSON.
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

/// Line that answers a request; empty if there is no answer.
#[derive(Default)]
pub struct Line {
    /// Beginning of the line; the whole line if there are no parts.
    pub text: Vec<u8>,
    /// Parts that follow, and the text after them.
    pub rest: Option<(Parts, Vec<u8>)>,
}

/// Builds the line that answers a request with this id.
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
