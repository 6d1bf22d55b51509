//! The text of an answer, built once in the buffer that is written to the client.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::qga::error::Error;

/// What a command returns, already as JSON text, without its closing bracket.
#[derive(Debug)]
pub struct Reply(Vec<u8>);

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
        Self(b"{\"return\":{}".to_vec())
    }

    /// A reply after a byte 0xFF, by which a client finds the beginning of an answer in a stream that may
    /// hold leftovers.
    ///
    /// # Errors
    /// As [`Reply::value`].
    pub fn delimited<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        Self::after(vec![0xff], value)
    }

    fn after<T: Serialize + ?Sized>(mut text: Vec<u8>, value: &T) -> Result<Self, Error> {
        text.extend_from_slice(b"{\"return\":");
        serde_json::to_writer(&mut text, value)
            .map_err(|error| Error::generic(format!("the result cannot be written as JSON: {error}")))?;
        Ok(Self(text))
    }
}

/// The line that answers a request with this id.
pub fn line(outcome: Result<Reply, Error>, id: Option<&RawValue>) -> Vec<u8> {
    let mut text = match outcome {
        Ok(Reply(text)) => text,
        Err(error) => {
            let mut text = b"{\"error\":".to_vec();
            // A struct of a name and a string always serialises.
            let _ = serde_json::to_writer(&mut text, &error);
            text
        }
    };
    if let Some(id) = id {
        text.extend_from_slice(b",\"id\":");
        // Line breaks can only be white space between tokens: an answer is one line.
        text.extend(id.get().bytes().filter(|byte| !byte.is_ascii_control()));
    }
    text.extend_from_slice(b"}\n");
    text
}
