//! Output: the only place that writes to standard output, and warnings to standard error.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;

use serde::Serialize;
use tokio::io::Interest;
use tokio::net::unix::pipe;

use crate::text::colours::Colours;

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Tables for people.
    Table,
    /// JSON for programs.
    Json,
    /// YAML, for programs and for people who prefer it.
    Yaml,
}

/// Writer of the output in one format.
#[derive(Debug)]
pub struct Printer {
    format: Format,
}

impl Printer {
    /// Creates a printer for `format`.
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    /// Returns whether the output is for programs.
    pub fn is_for_programs(&self) -> bool {
        self.format != Format::Table
    }

    /// Returns whether the output for people has colours.
    pub fn colours(&self) -> Colours {
        Colours::on(&io::stdout())
    }

    /// Writes `value` as indented JSON or as YAML, or the lines that `table` returns.
    ///
    /// # Errors
    /// The errors of write(2).
    pub fn value<T: Serialize>(&mut self, value: &T, table: impl FnOnce() -> String) -> io::Result<()> {
        let text = match self.format {
            Format::Table => table(),
            Format::Json => serde_json::to_string_pretty(value)? + "\n",
            Format::Yaml => yaml(value)?,
        };
        write(&text)
    }

    /// Writes a remark for people; it is left out for programs.
    ///
    /// # Errors
    /// The errors of write(2).
    pub fn remark(&mut self, words: &str) -> io::Result<()> {
        match self.format {
            Format::Table => write(&format!("{words}\n")),
            Format::Json | Format::Yaml => Ok(()),
        }
    }

    /// Writes `text` unchanged, for people and programs alike.
    ///
    /// # Errors
    /// The errors of write(2).
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        write(text)
    }

    /// Completes when the reader of standard output has closed it, as `head` does after enough lines. A verb that
    /// waits for something to write would not notice otherwise. Never completes where this cannot be detected, as
    /// with a file.
    pub async fn unread() {
        let out = io::stdout().as_fd().try_clone_to_owned();
        // Nothing is written through this descriptor, so it may be a pipe in blocking mode.
        let gone = async { pipe::Sender::from_owned_fd_unchecked(out?)?.ready(Interest::ERROR).await };
        if gone.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Writes a note to standard error, in every format.
    pub fn note(&mut self, words: &str) {
        // Without standard error there is no way to report a failure.
        drop(writeln!(io::stderr().lock(), "guestctl: {words}"));
    }

    /// Writes a warning to standard error, in every format.
    pub fn warn(&mut self, words: &str) {
        // Without standard error there is no way to report a failure.
        drop(writeln!(io::stderr().lock(), "guestctl: warning: {words}"));
    }

    /// Writes `value` as one of many: JSON on one line, a YAML document, or the text that `words` returns.
    ///
    /// # Errors
    /// The errors of write(2).
    pub fn line<T: Serialize>(&mut self, value: &T, words: impl FnOnce() -> String) -> io::Result<()> {
        let text = match self.format {
            Format::Table => words() + "\n",
            Format::Json => serde_json::to_string(value)? + "\n",
            Format::Yaml => format!("---\n{}", yaml(value)?),
        };
        write(&text)
    }
}

/// Formats YAML with a final newline. Strings such as `yes` and `1:30`, which some parsers take for other
/// types, are quoted.
fn yaml<T: Serialize>(value: &T) -> io::Result<String> {
    // Long texts stay on one line each, as in JSON.
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let text = serde_saphyr::to_string_with_options(value, options).map_err(io::Error::other)?;
    Ok(if text.ends_with('\n') { text } else { text + "\n" })
}

/// Writes a text at once and as a whole, so that a reader sees an event when it happens.
fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn yaml_says_what_json_says() {
        let value = json!([{ "name": "web-1", "ready": null, "count": 2, "ratio": 0.5, "empty": [], "nested": { "a": "yes" } }]);
        let text = yaml(&value).unwrap();
        assert!(text.contains("name: web-1\n") && text.contains("a: \"yes\"\n"), "{text}");
        assert_eq!(serde_saphyr::from_str::<Value>(&text).unwrap(), value);
    }

    proptest! {
        /// Names and reasons come from guests and hypervisors, and may contain anything.
        #[test]
        fn any_text_stays_one_value(text in any::<String>(), other in "[-?:,\\[\\]{}#&*!|>'\"%@`~ \n\ta-z0-9.]{0,12}") {
            let value = json!({ "one": text, "two": [other.clone()], other: true });
            prop_assert_eq!(serde_saphyr::from_str::<Value>(&yaml(&value).unwrap()).unwrap(), value);
        }
    }
}
