//! One call of a command: what it is given, and who asks.

use std::sync::OnceLock;

use crate::qga::Context;
use crate::qga::arguments::Arguments;
use crate::qga::error::Error;
use crate::qga::table::Command;

/// One call of a command.
#[derive(Debug)]
pub struct Call<'a> {
    /// The machine, and what else the commands share.
    pub context: &'a Context,
    /// What the command is given.
    pub arguments: Arguments<'a>,
    /// Who asks, as the log names it.
    peer: &'a str,
    subject: OnceLock<String>,
}

impl<'a> Call<'a> {
    /// A call by `peer`.
    pub fn new(context: &'a Context, arguments: Arguments<'a>, peer: &'a str) -> Self {
        Self { context, arguments, peer, subject: OnceLock::new() }
    }

    /// Who asks, as the log names it.
    pub fn peer(&self) -> &'a str {
        self.peer
    }

    /// Says for the audit line what the call is about, such as the path of a program; never a secret. Said as
    /// soon as the arguments are read, so that it is in the line of a call that fails, too.
    pub fn concerns(&self, subject: impl Into<String>) {
        // Once is enough: a call is about one thing.
        let _ = self.subject.set(subject.into());
    }

    /// Watches over the call of `command` from its beginning: it leaves its line in the log however it ends.
    pub fn watch(&self, command: &'static Command) -> Watch<'_> {
        Watch { call: self, command, ended: false }
    }

    /// Writes down how the call ended.
    fn log(&self, command: &Command, failure: Option<&Error>) {
        let peer = self.peer;
        let name = command.name;
        if command.audited {
            let subject =
                self.subject.get().map(|subject| format!(" ({})", printable(subject))).unwrap_or_default();
            match failure {
                None => tracing::info!("audit: {peer}: {name}{subject}: done"),
                Some(error) => tracing::info!("audit: {peer}: {name}{subject}: {}", printable(&error.desc)),
            }
        } else {
            match failure {
                None => tracing::debug!("{peer}: {name}"),
                Some(error) => tracing::debug!("{peer}: {name}: {}", error.desc),
            }
        }
    }
}

/// A call that has not ended. When this is dropped before, as it is when the agent ends, the log says so.
#[derive(Debug)]
pub struct Watch<'c> {
    call: &'c Call<'c>,
    command: &'static Command,
    ended: bool,
}

impl Watch<'_> {
    /// Writes down how the call ended.
    pub fn ended(mut self, failure: Option<&Error>) {
        self.ended = true;
        self.call.log(self.command, failure);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let unknown = Error::generic("not known: it was under way when the agent ended");
            self.call.log(self.command, Some(&unknown));
        }
    }
}

/// A line of the log stays one line, and of a bounded length, whatever a client says.
fn printable(words: &str) -> String {
    let mut text = String::new();
    for character in words.chars().take(256) {
        if character.is_control() { text.extend(character.escape_default()) } else { text.push(character) }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_words_cannot_begin_a_line_of_the_log() {
        assert_eq!(printable("/bin/ls\naudit: root: fine"), "/bin/ls\\naudit: root: fine");
        assert_eq!(printable(&"x".repeat(1000)).len(), 256);
    }
}
