//! Cleaning of texts from guests for tables and logs: bounded in length, and without terminal control characters.

use std::collections::HashMap;
use std::fmt::Write as _;

use prost_types::Timestamp;

use crate::sys::error_chain;
use crate::wire::messages::{event_kinds, messages};
use crate::wire::proto::v1::{self, event::Kind};

/// Longest text that is taken from a guest, in characters.
pub const MAX_TEXT: usize = 256;
/// Longest explanation that is kept, in characters.
const MAX_WORDS: usize = 4096;
/// Longest line of a log, in characters.
const MAX_LINE: usize = 1 << 16;
/// Most labels of a Node or a topology.
const MAX_LABELS: usize = 256;
/// Most entries of a list whose length no setting limits, such as partitions, taints or capabilities.
const MAX_LISTED: usize = 64;
/// The year 10000 in seconds since 1970: later times cannot be written as RFC 3339 has it.
const YEAR_10000: i64 = 253_402_300_800;

/// Replaces invisible characters, and cuts a text that is too long.
pub fn clean(text: &str) -> String {
    clean_to(text, MAX_TEXT)
}

/// Cleans an explanation, which may be longer, because it may list everything that is in the way.
pub fn clean_words(text: &str) -> String {
    clean_to(text, MAX_WORDS)
}

/// Cleans lines of a log: line feeds are kept, and tabs become spaces.
pub fn clean_lines(text: &str) -> String {
    let line = |line: &str| clean_to(&line.replace('\t', " "), MAX_LINE);
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn clean_to(text: &str, most: usize) -> String {
    let mut cleaned: String =
        text.chars().take(most).map(|one| if is_hidden(one) { '\u{fffd}' } else { one }).collect();
    if text.chars().nth(most).is_some() {
        cleaned.push('…');
    }
    // The text may be kept for long, so it should not hold unused memory.
    cleaned.shrink_to_fit();
    cleaned
}

/// Cleans a line of JSON from a guest, without its line end. Invisible characters in strings are written as JSON
/// escapes. Returns `None` if the line is not JSON. The byte 0xFF, with which QGA begins some answers, is removed.
pub fn clean_json(line: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(line.strip_prefix(b"\xff").unwrap_or(line)).ok()?;
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
    let mut cleaned = String::with_capacity(text.len());
    for one in text.trim_end().chars() {
        match one {
            // These occur only between tokens, because JSON does not allow them in strings.
            '\n' | '\r' | '\t' => cleaned.push(' '),
            one if is_hidden(one) => {
                for unit in one.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(cleaned, "\\u{unit:04x}");
                }
            }
            one => cleaned.push(one),
        }
    }
    Some(cleaned)
}

/// Returns whether a character is a control character, or reorders or hides the text around it.
fn is_hidden(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Cleans the information that a guest gives about itself.
pub fn clean_info(mut info: v1::GuestInfo) -> v1::GuestInfo {
    info.clean();
    info.dmi_uuid = info.dmi_uuid.to_lowercase();
    info
}

/// Cleans an event of a guest in place. Lists without a configured limit are cut to the length that is displayed.
pub fn clean_event(event: &mut v1::Event) {
    event.time = event.time.filter(can_be_written);
    let Some(kind) = &mut event.kind else { return };
    kind.clean();
    if let Kind::AgentReady(v1::AgentReady { state: Some(state), .. }) = kind
        && let Some(freeze) = &mut state.freeze
    {
        freeze.since = freeze.since.filter(can_be_written);
        // A time that cannot be written still means that the freeze has ended.
        freeze.ended =
            freeze.ended.map(|ended| if can_be_written(&ended) { ended } else { Timestamp::default() });
    }
}

/// Returns whether a time from a guest can be written in the format of RFC 3339.
pub fn can_be_written(time: &Timestamp) -> bool {
    (0..YEAR_10000).contains(&time.seconds) && (0..1_000_000_000).contains(&time.nanos)
}

/// Cleans a text in place; most texts need no change.
fn tidy(text: &mut String) {
    let is_short = text.len() <= MAX_TEXT || text.chars().nth(MAX_TEXT).is_none();
    if is_short && !text.chars().any(is_hidden) {
        text.shrink_to_fit();
    } else {
        *text = clean(text);
    }
}

fn tidy_all<'t>(texts: impl IntoIterator<Item = &'t mut String>) {
    texts.into_iter().for_each(tidy);
}

/// Cuts a list, and frees the memory of the rest.
fn cut<T>(list: &mut Vec<T>, most: usize) {
    list.truncate(most);
    list.shrink_to_fit();
}

fn tidy_list(list: &mut Vec<String>, most: usize) {
    cut(list, most);
    tidy_all(list);
}

fn clean_labels(labels: &mut HashMap<String, String>) {
    let all = std::mem::take(labels).into_iter().take(MAX_LABELS);
    *labels = all.map(|(key, value)| (clean(&key), clean(&value))).collect();
}

/// Message of a guest that can be cleaned.
trait Clean {
    /// Cleans the message in place.
    fn clean(&mut self);
}

/// Cleans a field. Lists with a configured limit are not cut, because longer ones are not even decoded.
macro_rules! clean {
    ($field:expr, text, $list:ident) => {
        tidy(&mut $field)
    };
    ($field:expr, texts, None) => {
        tidy_list(&mut $field, MAX_LISTED)
    };
    ($field:expr, texts, $list:ident) => {
        tidy_all(&mut $field)
    };
    ($field:expr, map, $list:ident) => {
        clean_labels(&mut $field)
    };
    ($field:expr, many, None) => {{
        cut(&mut $field, MAX_LISTED);
        $field.iter_mut().for_each(|one| one.clean());
    }};
    ($field:expr, $one_or_many:ident, $list:ident) => {
        $field.iter_mut().for_each(|one| one.clean())
    };
}

macro_rules! of_messages {
    ($($message:ident { $($field:ident: $kind:ident ($inner:ident, $list:ident) = $number:literal;)* })*) => {
        $(impl Clean for v1::$message {
            fn clean(&mut self) {
                $(clean!(self.$field, $kind, $list);)*
            }
        })*
    };
}

messages!(of_messages);

macro_rules! of_events {
    ($($message:ident $name:literal = $number:literal;)*) => {
        impl Clean for Kind {
            fn clean(&mut self) {
                match self {
                    $(Self::$message(event) => event.clean(),)*
                }
            }
        }
    };
}

event_kinds!(of_events);

/// Joins an error and its sources into one cleaned line.
pub fn chain(error: &dyn std::error::Error) -> String {
    clean(&error_chain::words(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts() {
        assert_eq!(clean("Debian GNU/Linux 12 – ünïcödé 漢字"), "Debian GNU/Linux 12 – ünïcödé 漢字");
        assert_eq!(
            clean("a\u{1b}[2Jb\n\t\r\0\u{9b}"),
            "a\u{fffd}[2Jb\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}"
        );
        assert_eq!(clean("x\u{202e}y"), "x\u{fffd}y");
        assert_eq!(clean(&"ü".repeat(256)), "ü".repeat(256));
        assert_eq!(clean(&"ü".repeat(257)), "ü".repeat(256) + "…");
    }

    #[test]
    fn times_that_cannot_be_written_are_dropped() {
        for (seconds, can_be) in [(1_700_000_000, true), (i64::MAX, false), (-1, false)] {
            let time = Some(Timestamp { seconds, nanos: 5 });
            let mut event = v1::Event { time, ..v1::Event::default() };
            clean_event(&mut event);
            assert_eq!(event.time.is_some(), can_be, "{seconds}");
        }
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left(text: String) {
            let cleaned = clean(&text);
            prop_assert!(cleaned.chars().count() <= MAX_TEXT + 1);
            prop_assert!(!cleaned.chars().any(is_hidden));
            let mut tidied = text;
            tidy(&mut tidied);
            prop_assert_eq!(tidied, cleaned);
        }
    }
}
