//! A request: which command, with what, under which id.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use crate::qga::error::Error;

/// A request with its parts still as text: only the command knows what its arguments mean.
#[derive(Debug, Default)]
pub struct Request<'a> {
    execute: Option<&'a RawValue>,
    arguments: Option<&'a RawValue>,
    /// Returned as it came, whatever it is.
    pub id: Option<&'a RawValue>,
    unknown: Option<String>,
}

/// The arguments of one call.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a>(Option<&'a RawValue>);

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
        Ok((name, Arguments(self.arguments)))
    }
}

impl Arguments<'_> {
    /// The arguments as the command wants them.
    ///
    /// # Errors
    /// If one is missing, unknown, given twice or of the wrong type; the error names it.
    pub fn parse<T: DeserializeOwned>(self) -> Result<T, Error> {
        serde_json::from_str(self.0.map_or("{}", RawValue::get))
            .map_err(|error| Error::generic(format!("invalid arguments: {}", without_place(&error))))
    }

    /// For a command that takes no arguments.
    ///
    /// # Errors
    /// If there are any.
    pub fn none(self) -> Result<(), Error> {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Nothing {}
        match self.0 {
            None => Ok(()),
            Some(_) => self.parse::<Nothing>().map(drop),
        }
    }
}

/// For a field that is an integer of 64 bits. Unlike serde's own, its error does not hold a text that a client
/// gave instead, which may be as large as a message.
///
/// # Errors
/// If it is anything else.
pub fn integer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    struct Integer;

    impl Visitor<'_> for Integer {
        type Value = i64;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an integer of 64 bits")
        }

        fn visit_i64<E>(self, value: i64) -> Result<i64, E> {
            Ok(value)
        }

        fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<i64, E> {
            i64::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
        }

        fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<i64, E> {
            Err(E::invalid_type(Unexpected::Other("string"), &self))
        }
    }

    // Not `deserialize_i64`: by that serde_json makes the error itself, with the whole text in it.
    deserializer.deserialize_any(Integer)
}

/// The problem without its line and column, which mean nothing to whoever made the request by a library.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem).to_owned()
}

/// A string, borrowed where it has no escapes.
#[derive(serde::Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

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
