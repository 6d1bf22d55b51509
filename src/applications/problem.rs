//! What is wrong with a database, in words for people.

use std::fmt;

/// The longest text, in bytes.
const MOST: usize = 512;

/// What failed, and what the database or the system said: bounded, in one line, without control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem(String);

impl Problem {
    /// Of words that may be anybody's.
    pub fn new(words: impl fmt::Display) -> Self {
        Self(bounded(&words.to_string(), MOST))
    }

    /// The same, with what was being done before it.
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

/// The beginning of a text that somebody else wrote: at most so many bytes, with control characters escaped.
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

/// Characters that change how the others are shown.
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
