//! Problems with a database, described for people.

use std::fmt;

/// Maximum length of the text in bytes.
const MOST: usize = 512;

/// Description of a failure with the message of the database or the system: one line of bounded length, without
/// control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem(String);

impl Problem {
    /// Creates a problem from text that may come from an untrusted source.
    pub fn new(words: impl fmt::Display) -> Self {
        Self(bounded(&words.to_string(), MOST))
    }

    /// Returns the problem with the operation that failed before it.
    #[must_use]
    pub fn while_doing(self, what: &str) -> Self {
        Self::new(format_args!("{what}: {}", self.0))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Returns the beginning of an untrusted text: at most `most` bytes, with control characters escaped.
pub fn bounded(text: &str, most: usize) -> String {
    let mut kept = String::new();
    for character in text.trim().chars() {
        let before = kept.len();
        if character.is_control() || is_invisible(character) {
            kept.extend(character.escape_default());
        } else {
            kept.push(character);
        }
        if kept.len() > most {
            kept.truncate(before);
            break;
        }
    }
    kept
}

/// Returns whether the character is invisible and may change how others are shown.
fn is_invisible(character: char) -> bool {
    matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_others_say_is_one_line() {
        assert_eq!(bounded(" a\nb\u{1b}[0m\u{202e} ", 100), "a\\nb\\u{1b}[0m\\u{202e}");
        assert_eq!(bounded("ééé", 5), "éé");
        assert_eq!(bounded("ab\n", 3), "ab");
    }

    proptest! {
        #[test]
        fn it_is_bounded(text: String, most in 0usize..64) {
            let kept = bounded(&text, most);
            prop_assert!(kept.len() <= most && !kept.chars().any(char::is_control));
        }
    }
}
