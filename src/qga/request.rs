//! Requests: the name of a command, its arguments, and an id.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::qga::arguments::{Arguments, Text};
use crate::qga::error::Error;

/// Request whose parts are still JSON text: only the command knows the types of its arguments.
#[derive(Debug, Default)]
pub struct Request<'a> {
    execute: Option<&'a RawValue>,
    arguments: Option<&'a RawValue>,
    id: Option<&'a RawValue>,
    unknown: Option<String>,
}

impl<'a> Request<'a> {
    /// Parses one message. Errors in its parts are left to [`Request::call`], so that the answer can carry the id.
    ///
    /// # Errors
    /// If it is not a JSON object, or a member occurs twice.
    pub fn parse(message: &'a [u8]) -> Result<Self, Error> {
        serde_json::from_slice(message)
            .map_err(|error| Error::generic(format!("invalid request: {}", without_place(&error))))
    }

    /// Returns the id, which is sent back unchanged, whatever its type. An id with half of a surrogate pair is left
    /// out, because it cannot be encoded.
    pub fn id(&self) -> Option<&'a str> {
        self.id.map(RawValue::get).filter(|id| !has_lone_surrogate(id))
    }

    /// Returns the name of the command and its arguments.
    ///
    /// # Errors
    /// If the command is missing, or a member is unknown or has the wrong type.
    pub fn call(&self) -> Result<(Cow<'a, str>, Arguments<'a>), Error> {
        if self.id.is_some() && self.id().is_none() {
            return Err(Error::generic("invalid request: half of a surrogate pair in \"id\""));
        }
        if let Some(member) = &self.unknown {
            return Err(Error::generic(format!("invalid request: unexpected member {member:?}")));
        }
        let Some(execute) = self.execute else {
            return Err(Error::generic("invalid request: the member \"execute\" is missing"));
        };
        let Ok(Text(name)) = serde_json::from_str(execute.get()) else {
            return Err(Error::generic("invalid request: \"execute\" must be a string"));
        };
        if self.arguments.is_some_and(|arguments| !arguments.get().starts_with('{')) {
            return Err(Error::generic("invalid request: \"arguments\" must be an object"));
        }
        Ok((name, Arguments::new(self.arguments.map(RawValue::get))))
    }
}

/// Returns whether an escape `\uXXXX` in this JSON text is one half of a surrogate pair without the other.
fn has_lone_surrogate(json: &str) -> bool {
    let mut rest = json.as_bytes();
    let unit = |bytes: &[u8]| match bytes {
        [b'\\', b'u', a, b, c, d, ..] => {
            std::str::from_utf8(&[*a, *b, *c, *d]).ok().and_then(|hex| u16::from_str_radix(hex, 16).ok())
        }
        _ => None,
    };
    // Backslashes occur in strings only, and each begins an escape or belongs to the one before.
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        rest = &rest[at..];
        let length = match unit(rest) {
            None => 2,
            Some(0xd800..0xdc00) if matches!(rest.get(6..).and_then(unit), Some(0xdc00..0xe000)) => 12,
            Some(0xd800..0xe000) => return true,
            Some(_) => 6,
        };
        rest = rest.get(length..).unwrap_or_default();
    }
    false
}

/// Returns the message without line and column, which are useless to a client that builds its requests with a
/// library.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem).to_owned()
}

impl<'de> Deserialize<'de> for Request<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Request<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object with the member \"execute\"")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut request = Request::default();
                while let Some(Text(name)) = map.next_key()? {
                    let place = match &*name {
                        "execute" => &mut request.execute,
                        "arguments" => &mut request.arguments,
                        "id" => &mut request.id,
                        other => {
                            request.unknown.get_or_insert_with(|| other.chars().take(64).collect());
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    if place.replace(map.next_value()?).is_some() {
                        return Err(serde::de::Error::custom(format_args!("{name:?} is given twice")));
                    }
                }
                Ok(request)
            }
        }

        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_a_surrogate_pair_is_no_id() {
        let whole = [
            r#""a""#,
            r#""\ud83d\ude00""#,
            r#""\\ud800""#,
            r#"[1,{"\uD83D\uDE00":"\n"}]"#,
            r#""\u00e4""#,
            "7",
        ];
        let halves = [
            r#""\ud800""#,
            r#""\uDFFF""#,
            r#""\ud800\ud800""#,
            r#""\ude00\ud83d""#,
            r#"{"\ud800":1}"#,
            r#"["\\\udc00"]"#,
        ];
        for (ids, good) in [(&whole, true), (&halves, false)] {
            for id in ids {
                let message = format!(r#"{{"execute":"guest-ping","id":{id}}}"#);
                let request = Request::parse(message.as_bytes()).unwrap();
                assert_eq!((request.call().is_ok(), request.id()), (good, good.then_some(*id)), "{id}");
            }
        }
    }
}
