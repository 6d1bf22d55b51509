//! Arguments of one call, taken one by one, so that an error names the argument.
//!
//! No part of a refused value gets into the error: it may be a password, and as large as a message. To add a type:
//! implement [`Value`] for it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::qga::error::{Error, quoted};

/// Maximum number of members of one `arguments` object; no command has as many.
const MAX_MEMBERS: usize = 32;
/// Maximum number of elements of a list, unless their type sets a lower one.
const MAX_ELEMENTS: usize = 65_536;
/// Maximum number of arguments and variables of a program: more than any kernel accepts, whose limit is 6 MiB,
/// with 9 bytes for each of the shortest.
const MAX_WORDS: usize = 1 << 20;

/// Arguments of one call, not parsed yet.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a>(Option<&'a str>);

impl<'a> Arguments<'a> {
    /// Wraps the `arguments` member of a request, which must be an object if it is given.
    pub fn new(object: Option<&'a str>) -> Self {
        Self(object)
    }

    /// Returns the JSON text of the object, if the request has one.
    pub fn text(self) -> Option<&'a str> {
        self.0
    }

    /// Checks that there are no arguments, for a command that takes none.
    ///
    /// # Errors
    /// If there are any.
    pub fn none(self) -> Result<(), Error> {
        self.read(|_| Ok(()))
    }

    /// Lets `take` have the arguments that it knows.
    ///
    /// # Errors
    /// If one is missing, of the wrong type, given twice, or not taken by `take`; the error names it.
    pub fn read<T>(self, take: impl FnOnce(&mut Members<'a>) -> Result<T, Error>) -> Result<T, Error> {
        let mut members = match self.0 {
            None => Members(Vec::new()),
            Some(object) => serde_json::from_str(object).map_err(|error| invalid(&error))?,
        };
        let taken = take(&mut members)?;
        match members.0.first() {
            None => Ok(taken),
            Some((name, _)) => Err(Error::unexpected(name)),
        }
    }
}

fn invalid(error: &serde_json::Error) -> Error {
    let text = error.to_string();
    // Leave out line and column, which are useless to a client that builds its requests with a library.
    let problem = text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem);
    Error::generic(format!("invalid arguments: {problem}"))
}

/// Members of an object that have not been taken yet.
#[derive(Debug)]
pub struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Members<'a> {
    /// Takes a required argument.
    ///
    /// # Errors
    /// If it is missing, or has the wrong type.
    pub fn required<T: Value<'a>>(&mut self, name: &str) -> Result<T, Error> {
        self.optional(name)?.ok_or_else(|| Error::argument(&quoted(name), "is missing"))
    }

    /// Takes an optional argument.
    ///
    /// # Errors
    /// If it has the wrong type.
    pub fn optional<T: Value<'a>>(&mut self, name: &str) -> Result<Option<T>, Error> {
        let Some(place) = self.0.iter().position(|(known, _)| known == name) else { return Ok(None) };
        let (_, value) = self.0.swap_remove(place);
        match T::read(value) {
            Ok(value) => Ok(Some(value)),
            Err(Refused { element: Some(element), expected }) => {
                Err(Error::argument(&format!("\"{name}[{element}]\""), &format!("must be {expected}")))
            }
            Err(Refused { element: None, expected }) => {
                Err(Error::argument(&quoted(name), &format!("must be {expected}")))
            }
        }
    }
}

/// Type of an argument.
pub trait Value<'a>: Sized {
    /// Maximum number of such values in a list.
    const MOST: usize = MAX_ELEMENTS;

    /// Reads the value.
    ///
    /// # Errors
    /// If the value has another type or is out of range; the error says what it should be.
    fn read(value: &'a RawValue) -> Result<Self, Refused>;
}

/// Error: the value is not what was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Index of the element, if the value is a list.
    pub element: Option<usize>,
    /// Description of an acceptable value, to follow "must be", such as "a string".
    pub expected: Cow<'static, str>,
}

impl Refused {
    /// Creates the error for a value that should have been this.
    pub fn expected(words: impl Into<Cow<'static, str>>) -> Self {
        Self { element: None, expected: words.into() }
    }
}

impl Value<'_> for bool {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        value.get().parse().map_err(|_| Refused::expected("true or false"))
    }
}

impl Value<'_> for i64 {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        // Parsed as an integer, because no QAPI type accepts what JSON alone would: 1.0 and 1e3 are no integers.
        value.get().parse().map_err(|_| Refused::expected("an integer of 64 bits"))
    }
}

impl<'a> Value<'a> for Cow<'a, str> {
    fn read(value: &'a RawValue) -> Result<Self, Refused> {
        let text = match serde_json::from_str(value.get()) {
            Ok(Text(text)) if value.get().starts_with('"') => text,
            _ => return Err(Refused::expected("a string")),
        };
        if text.contains('\0') {
            return Err(Refused::expected("a string without NUL characters"));
        }
        Ok(text)
    }
}

impl Value<'_> for String {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        Cow::read(value).map(Cow::into_owned)
    }
}

/// Word of a program's command line.
#[derive(Debug)]
pub struct Word(pub String);

impl Value<'_> for Word {
    const MOST: usize = MAX_WORDS;

    fn read(value: &RawValue) -> Result<Self, Refused> {
        String::read(value).map(Self)
    }
}

impl<'a, T: Value<'a>> Value<'a> for Vec<T> {
    fn read(value: &'a RawValue) -> Result<Self, Refused> {
        // Kept separately, because the error of the parser is only text.
        let mut wrong = None;
        let list = List { elements: Vec::new(), wrong: &mut wrong };
        let read = list.deserialize(&mut serde_json::Deserializer::from_str(value.get()));
        match (wrong, read) {
            (Some(refused), _) => Err(refused),
            (None, Ok(elements)) => Ok(elements),
            (None, Err(_)) => Err(Refused::expected(format!("a list of at most {} elements", T::MOST))),
        }
    }
}

/// Object inside the arguments.
impl<'a> Value<'a> for Members<'a> {
    fn read(value: &'a RawValue) -> Result<Self, Refused> {
        serde_json::from_str(value.get()).map_err(|_| Refused::expected("an object"))
    }
}

impl Members<'_> {
    /// Checks that all members were taken.
    ///
    /// # Errors
    /// If one was not; the error names it.
    pub fn finish(&self, argument: &str) -> Result<(), Error> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(Error::unexpected(&format!("{argument}.{name}"))),
        }
    }
}

/// Reader of a list that reads its elements one by one, and stops at the maximum number.
struct List<'w, T> {
    elements: Vec<T>,
    wrong: &'w mut Option<Refused>,
}

impl<'de, T: Value<'de>> DeserializeSeed<'de> for List<'_, T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Value<'de>> Visitor<'de> for List<'_, T> {
    type Value = Vec<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Vec<T>, A::Error> {
        use serde::de::Error as _;

        while let Some(element) = list.next_element::<&RawValue>()? {
            if self.elements.len() == T::MOST {
                return Err(A::Error::custom("too many elements"));
            }
            match T::read(element) {
                Ok(read) => self.elements.push(read),
                Err(refused) => {
                    *self.wrong = Some(Refused { element: Some(self.elements.len()), ..refused });
                    return Err(A::Error::custom("an element is refused"));
                }
            }
        }
        Ok(self.elements)
    }
}

/// A string, borrowed where it has no escapes.
#[derive(serde::Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Members<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                use serde::de::Error as _;

                let mut members: Vec<(Cow<'de, str>, &'de RawValue)> = Vec::new();
                while let Some(Text(name)) = map.next_key()? {
                    if members.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format_args!("{} is given twice", quoted(&name))));
                    }
                    if members.len() == MAX_MEMBERS {
                        return Err(A::Error::custom(format_args!("more than {MAX_MEMBERS} members")));
                    }
                    members.push((name, map.next_value()?));
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T>(text: &str, take: impl FnOnce(&mut Members<'_>) -> Result<T, Error>) -> Result<T, String> {
        Arguments::new(Some(text)).read(take).map_err(|error| error.desc)
    }

    #[test]
    fn every_error_names_the_argument_and_nothing_of_its_value() {
        let integer = |text: &str| read(text, |members| members.required::<i64>("count")).unwrap_err();
        let must = "invalid arguments: \"count\" must be an integer of 64 bits";
        for wrong in ["\"secret\"", "1.0", "1e3", "9223372036854775808", "null", "[1]", "true"] {
            assert_eq!(integer(&format!("{{\"count\":{wrong}}}")), must, "{wrong}");
        }
        assert_eq!(integer("{}"), "invalid arguments: \"count\" is missing");
        assert_eq!(integer("{\"count\":1,\"more\":2}"), "Parameter 'more' is unexpected");
        assert_eq!(integer("{\"count\":1,\"count\":2}"), "invalid arguments: \"count\" is given twice");
        let string = |text: &str| read(text, |members| members.required::<String>("path")).unwrap_err();
        assert_eq!(string("{\"path\":1}"), "invalid arguments: \"path\" must be a string");
        let nul = string("{\"path\":\"a\\u0000\"}");
        assert_eq!(nul, "invalid arguments: \"path\" must be a string without NUL characters");
        let list = |text: &str| read(text, |members| members.required::<Vec<String>>("arg")).unwrap_err();
        assert_eq!(list("{\"arg\":[\"a\",5]}"), "invalid arguments: \"arg[1]\" must be a string");
        assert_eq!(
            list("{\"arg\":\"a\"}"),
            "invalid arguments: \"arg\" must be a list of at most 65536 elements"
        );
        let many = format!("{{\"arg\":[{}\"\"]}}", "\"\",".repeat(MAX_ELEMENTS));
        assert!(list(&many).ends_with("must be a list of at most 65536 elements"));
    }

    #[test]
    fn values_are_read() {
        let text = r#"{"n":-9223372036854775808,"b":true,"s":"a\"b","l":["x"],"o":{"k":1}}"#;
        read(text, |members| {
            assert_eq!(members.required::<i64>("n")?, i64::MIN);
            assert!(members.required::<bool>("b")?);
            assert_eq!(members.required::<Cow<'_, str>>("s")?, "a\"b");
            assert_eq!(members.required::<Vec<String>>("l")?, ["x"]);
            let mut object = members.required::<Members<'_>>("o")?;
            assert_eq!(object.finish("o").unwrap_err().desc, "Parameter 'o.k' is unexpected");
            assert_eq!(object.required::<i64>("k")?, 1);
            assert_eq!(members.optional::<bool>("absent")?, None);
            Ok(())
        })
        .unwrap();
    }
}
