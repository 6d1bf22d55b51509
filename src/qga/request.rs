//! A request: which command, with what, under which id.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::qga::arguments::{Arguments, Text};
use crate::qga::error::Error;

/// A request with its parts still as text: only the command knows what its arguments mean.
#[derive(Debug, Default)]
pub struct Request<'a> {
    execute: Option<&'a RawValue>,
    arguments: Option<&'a RawValue>,
    id: Option<&'a RawValue>,
    unknown: Option<String>,
}

impl<'a> Request<'a> {
    /// Parses one message. What is wrong with its parts is said by [`Request::call`], so that an error can
    /// carry the id.
    ///
    /// # Errors
    /// If it is no JSON object, or a member occurs twice.
    pub fn parse(message: &'a [u8]) -> Result<Self, Error> {
        serde_json::from_slice(message)
            .map_err(|error| Error::generic(format!("invalid request: {}", without_place(&error))))
    }

    /// To be returned as it came, whatever it is.
    pub fn id(&self) -> Option<&'a str> {
        self.id.map(RawValue::get)
    }

    /// The command's name and its arguments.
    ///
    /// # Errors
    /// If there is no command, or anything else than a command.
    pub fn call(&self) -> Result<(Cow<'a, str>, Arguments<'a>), Error> {
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

/// The problem without its line and column, which mean nothing to whoever made the request by a library.
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
