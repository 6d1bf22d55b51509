//! QMP, QEMU's machine protocol, as a client needs it: one JSON object on each line.
//!
//! [`Lines`] cuts bytes into lines and [`Message::parse`] makes a line a message. Only the members that this
//! program uses are taken; QEMU may add others at any time.

use serde::{Deserialize, Serialize};

/// The longest line that is accepted, in bytes. The longest answer to what is asked here is the list of all block
/// nodes: some hundred bytes for each, and up to four nodes for each disk.
pub const MAX_LINE: usize = 4 * 1024 * 1024;

/// A line was longer than [`MAX_LINE`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a line is longer than {MAX_LINE} bytes")]
pub struct TooLong;

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct Lines {
    pending: Vec<u8>,
    /// Bytes of `pending` that are known to have no newline.
    searched: usize,
}

impl Lines {
    /// Adds bytes as they were read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next whole line, without its end; empty lines are left out.
    ///
    /// # Errors
    /// If it is too long. The stream cannot be used further.
    pub fn next_line(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        loop {
            let Some(end) = self.pending[self.searched..].iter().position(|byte| *byte == b'\n') else {
                self.searched = self.pending.len();
                return if self.pending.len() > MAX_LINE { Err(TooLong) } else { Ok(None) };
            };
            let end = self.searched + end;
            let mut line: Vec<u8> = self.pending.drain(..=end).collect();
            self.searched = 0;
            line.truncate(line.trim_ascii_end().len());
            if line.len() > MAX_LINE {
                return Err(TooLong);
            }
            if !line.is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

/// Message from QEMU.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first line of every connection.
    Greeting,
    /// Success of a command.
    Return {
        /// The number given with the command.
        id: Option<u64>,
        /// Value that the command returned.
        value: serde_json::Value,
    },
    /// Failure of a command.
    Error {
        /// The number given with the command.
        id: Option<u64>,
        /// Error class, such as `CommandNotFound`.
        class: String,
        /// Description of the error.
        description: String,
    },
    /// Event that QEMU reports.
    Event {
        /// Event name, such as `RESET`.
        name: String,
        /// Data of the event; null if it has none.
        data: serde_json::Value,
    },
}

/// A line is not a message of QMP.
#[derive(Debug, thiserror::Error)]
pub enum MalformedLine {
    /// Line that is not a JSON object, or has a member of the wrong type.
    #[error("a line is not a QMP message")]
    Json(#[from] serde_json::Error),
    /// Object without any of the members that identify the type of a message.
    #[error("a line is neither greeting, return, error nor event")]
    Kind,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "QMP")]
    greeting: Option<serde::de::IgnoredAny>,
    #[serde(rename = "return", default, deserialize_with = "present")]
    value: Option<serde_json::Value>,
    error: Option<RawError>,
    event: Option<String>,
    #[serde(default)]
    data: serde_json::Value,
    id: Option<u64>,
}

#[derive(Deserialize)]
struct RawError {
    class: String,
    desc: String,
}

/// Tells `"return": null` from no `return` at all.
fn present<'de, D: serde::Deserializer<'de>>(input: D) -> Result<Option<serde_json::Value>, D::Error> {
    serde_json::Value::deserialize(input).map(Some)
}

impl Message {
    /// Parses a line into a message.
    ///
    /// # Errors
    /// If the line is malformed.
    pub fn parse(line: &[u8]) -> Result<Self, MalformedLine> {
        let raw: Raw = serde_json::from_slice(line)?;
        let id = raw.id;
        match raw {
            Raw { event: Some(name), data, .. } => Ok(Self::Event { name, data }),
            Raw { value: Some(value), .. } => Ok(Self::Return { id, value }),
            Raw { error: Some(error), .. } => {
                Ok(Self::Error { id, class: error.class, description: error.desc })
            }
            Raw { greeting: Some(_), .. } => Ok(Self::Greeting),
            _ => Err(MalformedLine::Kind),
        }
    }
}

/// The line that runs a command with these arguments, an object; null for none.
pub fn command(name: &str, arguments: &serde_json::Value, id: u64) -> Vec<u8> {
    #[derive(Serialize)]
    struct Command<'a> {
        execute: &'a str,
        #[serde(skip_serializing_if = "serde_json::Value::is_null")]
        arguments: &'a serde_json::Value,
        id: u64,
    }
    let mut line = serde_json::to_vec(&Command { execute: name, arguments, id }).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages() {
        let greeting = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}"#;
        let reset =
            r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESET", "data": {"guest": true}}"#;
        let cases = [
            (greeting, Message::Greeting),
            (r#"{"return": {}, "id": 4}"#, Message::Return { id: Some(4), value: serde_json::json!({}) }),
            (r#"{"return": null}"#, Message::Return { id: None, value: serde_json::Value::Null }),
            (
                r#"{"error": {"class": "CommandNotFound", "desc": "no"}, "id": 1}"#,
                Message::Error { id: Some(1), class: "CommandNotFound".into(), description: "no".into() },
            ),
            (reset, Message::Event { name: "RESET".into(), data: serde_json::json!({"guest": true}) }),
            (r#"{"event": "STOP"}"#, Message::Event { name: "STOP".into(), data: serde_json::Value::Null }),
        ];
        for (line, expected) in cases {
            assert_eq!(Message::parse(line.as_bytes()).unwrap(), expected, "{line}");
        }
        for line in
            ["", "{}", "[]", "7", r#"{"event": 7}"#, r#"{"error": "no"}"#, "{\"return\": {}", "\u{7f}"]
        {
            assert!(Message::parse(line.as_bytes()).is_err(), "{line}");
        }
    }

    #[test]
    fn a_command_is_one_line() {
        let line = |arguments| String::from_utf8(command("do", &arguments, 2)).unwrap();
        assert_eq!(line(serde_json::Value::Null), "{\"execute\":\"do\",\"id\":2}\n");
        let expected = "{\"execute\":\"do\",\"arguments\":{\"a\":\"\\n\"},\"id\":2}\n";
        assert_eq!(line(serde_json::json!({ "a": "\n" })), expected);
    }

    #[test]
    fn a_line_without_end_is_refused_once_it_is_too_long() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; MAX_LINE]);
        assert_eq!(lines.next_line(), Ok(None));
        lines.push(b"xx");
        assert_eq!(lines.next_line(), Err(TooLong));
    }

    proptest! {
        #[test]
        fn lines_come_out_however_the_bytes_were_cut(
            lines in proptest::collection::vec("[a-z{}:\" ]{0,40}[a-z}]", 0..10),
            cuts in proptest::collection::vec(1_usize..20, 1..20),
        ) {
            let bytes: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\r\n\n").into_bytes()).collect();
            let (mut reader, mut found, mut rest) = (Lines::default(), Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                reader.push(now);
                while let Some(line) = reader.next_line().unwrap() {
                    found.push(String::from_utf8(line).unwrap());
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(found, lines);
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            let mut lines = Lines::default();
            lines.push(&bytes);
            while let Ok(Some(line)) = lines.next_line() {
                drop(Message::parse(&line));
            }
        }
    }
}
