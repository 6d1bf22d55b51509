//! YAML documents as plain values, without a schema: <https://yaml.org/spec/1.2.2/>.
//!
//! The parser is a library's. The values built here from its events are all that a kubeconfig needs, with a tenth
//! of the code that deserialising YAML into types would add to the program.

use granit_parser::{Event, Options, Parser, ScalarStyle, ScanError};

/// Plain scalars that stand for null, if they are not quoted.
const NULL: [&str; 5] = ["", "~", "null", "Null", "NULL"];

/// Value in a YAML document.
#[derive(Debug, PartialEq, Eq)]
pub enum Yaml {
    /// An empty value, or `null`.
    Null,
    /// A scalar, as it is written.
    Text(String),
    /// A sequence of values.
    List(Vec<Self>),
    /// A mapping, with its keys in the order in which they are written.
    Map(Vec<(String, Self)>),
}

/// Reason why a document cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not valid YAML.
    #[error("{0}")]
    Wrong(#[from] ScanError),
    /// The text has an alias, which refers to a value elsewhere.
    #[error("it has an alias for another value, which is not supported")]
    Alias,
    /// The text has no value, or several documents.
    #[error("it is empty, or has several documents")]
    Documents,
    /// A mapping has a list or a mapping as a key.
    #[error("a key in it is not a string")]
    Key,
}

/// Unfinished list or mapping, with the key whose value comes next.
struct Open {
    value: Yaml,
    key: Option<String>,
}

impl Yaml {
    /// Parses one document. Lists and mappings may be nested at most 255 levels deep.
    ///
    /// # Errors
    /// If the text is empty, has several documents or aliases, or is malformed.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut options = Options::default();
        options.set_emit_comments(false);
        let mut parser = Parser::new_from_str_with_options(text, options);
        let mut open: Vec<Open> = Vec::new();
        let mut whole = None;
        while let Some(event) = parser.next_event() {
            let value = match event?.0 {
                Event::Scalar(text, ScalarStyle::Plain, ..) if NULL.contains(&text.as_ref()) => Self::Null,
                Event::Scalar(text, ..) => Self::Text(text.into_owned()),
                Event::SequenceStart(..) => {
                    open.push(Open { value: Self::List(Vec::new()), key: None });
                    continue;
                }
                Event::MappingStart(..) => {
                    open.push(Open { value: Self::Map(Vec::new()), key: None });
                    continue;
                }
                Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                    Some(open) => open.value,
                    None => continue,
                },
                Event::Alias(_) => return Err(Error::Alias),
                _ => continue,
            };
            match open.last_mut() {
                Some(open) => open.take(value)?,
                None if whole.is_some() => return Err(Error::Documents),
                None => whole = Some(value),
            }
        }
        whole.ok_or(Error::Documents)
    }

    /// Returns the value of a key; none if this is not a mapping, or has no such key.
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Map(entries) = self else { return None };
        entries.iter().find_map(|(key, value)| (key == name).then_some(value))
    }

    /// Returns the text of a scalar; none for a list or a mapping.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// Returns the values of a list; empty if this is not a list.
    pub fn list(&self) -> &[Self] {
        if let Self::List(values) = self { values } else { &[] }
    }
}

impl Open {
    fn take(&mut self, value: Yaml) -> Result<(), Error> {
        match (&mut self.value, self.key.take(), value) {
            (Yaml::Map(entries), Some(key), value) => entries.push((key, value)),
            (Yaml::Map(_), None, Yaml::Text(key)) => self.key = Some(key),
            (Yaml::Map(_), None, _) => return Err(Error::Key),
            (Yaml::List(values), _, value) => values.push(value),
            (Yaml::Text(_) | Yaml::Null, ..) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values() {
        let text = "# a comment\na: [1, 'two', {three: \"3\\n\"}]\nb:\n  - x: |\n      lines\n      of it\n  -\nc: {}\nd: null\ne: 'null'\n";
        let read = Yaml::parse(text).unwrap();
        let list = read.get("a").unwrap().list();
        assert_eq!((list[0].text(), list[1].text()), (Some("1"), Some("two")));
        assert_eq!(list[2].get("three").and_then(Yaml::text), Some("3\n"));
        let other = read.get("b").unwrap().list();
        assert_eq!(other[0].get("x").and_then(Yaml::text), Some("lines\nof it\n"));
        assert_eq!(other[1], Yaml::Null);
        assert_eq!(read.get("c"), Some(&Yaml::Map(Vec::new())));
        assert_eq!((read.get("d"), read.get("e").and_then(Yaml::text)), (Some(&Yaml::Null), Some("null")));
        assert_eq!((read.get("f"), read.text(), read.list().len()), (None, None, 0));
    }

    #[test]
    fn what_is_refused() {
        for (text, expected) in [
            ("", "it is empty"),
            ("--- a\n--- b\n", "it is empty"),
            ("a: &x 1\nb: *x\n", "alias"),
            ("[a]: b", "not a string"),
            ("a: [1", ""),
            ("\u{0}", ""),
            (&"[".repeat(100_000), ""),
            (&"- ".repeat(100_000), ""),
        ] {
            let error = Yaml::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_will_do(text in "[-a:\\[\\]{}&*!|>'\" \n#~?,]{0,60}", any: String) {
            let _ = Yaml::parse(&text);
            let _ = Yaml::parse(&any);
        }
    }
}
