//! Patterns of names, in which `*` stands for any number of characters.

use std::fmt;
use std::str::FromStr;

use crate::text::wildcard;

/// Maximum length of a pattern in bytes, which is that of a DNS name.
const LONGEST: usize = 253;

/// Name, or a pattern for several names such as `web-*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

/// Reason why a text is not a valid pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPattern {
    /// The text is empty, so it would match nothing.
    #[error("is empty; write \"*\" for all")]
    Empty,
    /// The text is longer than any name.
    #[error("has more than {LONGEST} bytes")]
    Long,
    /// The text has a special character of a regular expression or of a shell glob.
    #[error("has the character {0:?}, which is not allowed in patterns; * matches any number of characters")]
    Character(char),
}

impl Pattern {
    /// Returns whether the pattern matches the whole of this name.
    pub fn matches(&self, name: &str) -> bool {
        wildcard::matches(&self.0, name)
    }
}

impl FromStr for Pattern {
    type Err = NoPattern;

    fn from_str(text: &str) -> Result<Self, NoPattern> {
        let is_strange =
            |one: &char| one.is_control() || one.is_whitespace() || "?[]{}()|^$+\\/!\"'`".contains(*one);
        match text.chars().find(is_strange) {
            _ if text.is_empty() => Err(NoPattern::Empty),
            _ if text.len() > LONGEST => Err(NoPattern::Long),
            Some(strange) => Err(NoPattern::Character(strange)),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_star_stands_for_any_number_of_characters() {
        let cases = [
            ("web-1", "web-1", true),
            ("web-1", "web-12", false),
            ("web-*", "web-", true),
            ("web-*", "web-1", true),
            ("web-*", "my-web-1", false),
            ("*", "", true),
            ("*", "anything", true),
            ("*-db", "a-db", true),
            ("*-db", "a-db-1", false),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "acb", false),
            ("**", "x", true),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(pattern.parse::<Pattern>().unwrap().matches(name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        let refused = |text: &str| text.parse::<Pattern>().unwrap_err();
        assert_eq!(refused(""), NoPattern::Empty);
        assert_eq!(refused(&"a".repeat(254)), NoPattern::Long);
        for (text, strange) in
            [("web-[0-9]", '['), ("web-?", '?'), ("a b", ' '), ("web.+", '+'), ("a\n", '\n')]
        {
            assert_eq!(refused(text), NoPattern::Character(strange), "{text}");
        }
    }

    /// Reference implementation: tries every possible length for every star.
    fn slowly(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|at| slowly(rest, &name[at..])),
            Some((one, rest)) => name.first() == Some(one) && slowly(rest, &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn it_matches_what_trying_every_place_matches(pattern in "[ab*]{1,8}", name in "[ab]{0,10}") {
            let expected = slowly(pattern.as_bytes(), name.as_bytes());
            prop_assert_eq!(pattern.parse::<Pattern>().unwrap().matches(&name), expected);
        }

        #[test]
        fn a_name_is_a_pattern_that_matches_itself_alone(name in "[a-z0-9.-]{1,20}", other in "[a-z0-9.-]{0,20}") {
            let pattern: Pattern = name.parse().unwrap();
            prop_assert!(pattern.matches(&name));
            prop_assert_eq!(pattern.matches(&other), name == other);
        }
    }
}
