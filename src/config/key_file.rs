//! Reader and writer of key files, the format of /etc/qemu/qemu-ga.conf.
//!
//! The rules are `GLib`'s (<https://docs.gtk.org/glib/struct.KeyFile.html>), as qemu-ga applies them: groups in
//! brackets, `key=value` lines, comments that begin with `#`; a key that comes again replaces the one before.
//! Pure: bytes in, entries out.

use std::borrow::Cow;

/// Line of the form `key=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Group that the line is in.
    pub group: &'a str,
    /// Key, without white space after it.
    pub key: &'a str,
    /// Value as written, with escapes, without white space before and after it.
    pub value: &'a str,
    /// Number of the line, from 1.
    pub line: usize,
}

/// Syntax error on a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Number of the line, from 1.
    pub line: usize,
    /// Description of the error, for the user.
    pub text: String,
}

/// Returns all entries of a file, in their order.
///
/// # Errors
/// The first line that is not a group, `key=value`, a comment or empty; that comes before the first group; or that
/// is not UTF-8.
pub fn parse(bytes: &[u8]) -> Result<Vec<Entry<'_>>, Problem> {
    let mut entries = Vec::new();
    let mut group = None;
    for (count, bytes) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = count + 1;
        let wrong = |text: String| Problem { line, text };
        let text =
            std::str::from_utf8(bytes).map_err(|_| wrong("the line is not UTF-8".to_owned()))?.trim_ascii();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if let Some(rest) = text.strip_prefix('[') {
            match rest.strip_suffix(']') {
                Some(name) if !name.is_empty() && !name.contains(['[', ']']) => group = Some(name),
                _ => return Err(wrong(format!("{text:?} is not a group's name; write it like [general]"))),
            }
            continue;
        }
        let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(wrong(format!("{text:?} is not one of key=value, [group] and # comment")));
        };
        let Some(group) = group else {
            return Err(wrong(format!("{text:?} is before the first group; write [general] above it")));
        };
        entries.push(Entry { group, key: key.trim_ascii_end(), value: value.trim_ascii_start(), line });
    }
    Ok(entries)
}

/// Unescapes a value: `\s`, `\n`, `\t`, `\r` and `\\` stand for a space, a line feed, a tab, a carriage return and
/// a backslash.
///
/// # Errors
/// If a backslash is followed by another character, or by none.
pub fn string(value: &str) -> Result<String, String> {
    let mut text = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        text.push(match character {
            '\\' => match characters.next() {
                Some('s') => ' ',
                Some('n') => '\n',
                Some('t') => '\t',
                Some('r') => '\r',
                Some('\\') => '\\',
                _ => {
                    return Err(format!(
                        "{value:?} has a backslash that begins none of \\s \\n \\t \\r \\\\"
                    ));
                }
            },
            other => other,
        });
    }
    Ok(text)
}

/// Parses a boolean value.
///
/// # Errors
/// A message for the user, if the value is not one of true, false, 1, 0.
pub fn boolean(value: &str) -> Result<bool, String> {
    match value {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        other => Err(format!("{other:?} is not one of true, false, 1, 0")),
    }
}

/// Escapes a text so that it can be written as a value: the inverse of [`string`].
pub fn quote(text: &str) -> Cow<'_, str> {
    let inner = text.trim_matches([' ', '\t']);
    if inner.len() == text.len() && !text.contains(['\n', '\r', '\\']) {
        return Cow::Borrowed(text);
    }
    // Unescaped white space at both ends would be trimmed when the value is read.
    let start = text.len() - text.trim_start_matches([' ', '\t']).len();
    let end = start + inner.len();
    let mut value = String::with_capacity(text.len() + 2);
    for (at, character) in text.char_indices() {
        let outside = at < start || at >= end;
        match character {
            ' ' if outside => value.push_str("\\s"),
            '\t' if outside => value.push_str("\\t"),
            '\n' => value.push_str("\\n"),
            '\r' => value.push_str("\\r"),
            '\\' => value.push_str("\\\\"),
            other => value.push(other),
        }
    }
    Cow::Owned(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(text: &str) -> Vec<(&str, &str, &str, usize)> {
        let entries = parse(text.as_bytes()).unwrap();
        entries.into_iter().map(|entry| (entry.group, entry.key, entry.value, entry.line)).collect()
    }

    #[test]
    fn what_glib_takes_is_taken() {
        type Found = (&'static str, &'static str, &'static str, usize);
        let cases: &[(&str, &[Found])] = &[
            ("", &[]),
            ("\n  \n# comment\n", &[]),
            ("[general]\nverbose=true", &[("general", "verbose", "true", 2)]),
            ("[general]\r\nverbose=true\r\n", &[("general", "verbose", "true", 2)]),
            (" [general]\n\tverbose =  a b \n", &[("general", "verbose", "a b", 2)]),
            ("[a]\nx=1\n[b]\nx=2\n[a]\nx=3", &[("a", "x", "1", 2), ("b", "x", "2", 4), ("a", "x", "3", 6)]),
            ("[general]\npath=\n", &[("general", "path", "", 2)]),
            ("[general]\npath=a=b#c\n", &[("general", "path", "a=b#c", 2)]),
            ("[general]\n;path=x\n", &[("general", ";path", "x", 2)]),
        ];
        for (text, expected) in cases {
            assert_eq!(all(text), *expected, "{text:?}");
        }
    }

    #[test]
    fn what_glib_refuses_is_refused_with_its_line() {
        let cases: &[(&[u8], usize, &str)] = &[
            (b"verbose=true\n[general]\n", 1, "before the first group"),
            (b"[general\nverbose=true\n", 1, "not a group's name"),
            (b"[]\n", 1, "not a group's name"),
            (b"[general]\n\nverbose\n", 3, "not one of key=value"),
            (b"[general]\n=x\n", 2, "not one of key=value"),
            (b"[general]\npath=\xff\n", 2, "not UTF-8"),
            (b"\xef\xbb\xbf[general]\n", 1, "not one of key=value"),
        ];
        for (text, line, expected) in cases {
            let problem = parse(text).unwrap_err();
            assert_eq!(problem.line, *line, "{}", String::from_utf8_lossy(text));
            assert!(problem.text.contains(expected), "{}", problem.text);
        }
    }

    #[test]
    fn values() {
        assert_eq!(string("a\\sb\\tc\\n\\r\\\\").unwrap(), "a b\tc\n\r\\");
        assert!(string("a\\qb").is_err());
        assert!(string("a\\").is_err());
        for (text, expected) in [("true", Ok(true)), ("1", Ok(true)), ("0", Ok(false)), ("false", Ok(false))]
        {
            assert_eq!(boolean(text), expected);
        }
        assert!(boolean("TRUE").is_err());
        assert_eq!(quote("  a b\t"), "\\s\\sa b\\t");
    }

    proptest! {
        #[test]
        fn any_bytes_give_entries_or_a_problem(bytes: Vec<u8>) {
            match parse(&bytes) {
                Ok(entries) => for entry in entries {
                    prop_assert!(!entry.group.is_empty() && !entry.key.is_empty());
                    let _ = string(entry.value);
                },
                Err(problem) => prop_assert!(problem.line >= 1),
            }
        }

        #[test]
        fn lines_of_the_format_never_panic(text in "(\\[[a-z\\]]{0,3}\\]?|[a-z;#\\[]{0,3} ?=? ?[a-z\\\\ ]{0,4})(\r?\n(\\[[a-z]{1,3}\\]|[a-z]{1,3}=[a-z\\\\ ]{0,4})){0,4}") {
            let _ = parse(text.as_bytes());
        }

        #[test]
        fn what_is_written_is_read_back(text in "[ -~\t\n\ré]*") {
            let file = format!("[general]\npath={}\n", quote(&text));
            let entries = parse(file.as_bytes()).unwrap();
            prop_assert_eq!(string(entries[0].value).unwrap(), text);
        }
    }
}
