//! Local side of a client: results of writing, input, and signals. An error here ends the client but leaves
//! the program running.

use std::io;
use std::pin::pin;
use std::time::Instant;

use super::super::local::{self, Heard, Outputs, PART, Signals, Written};
use super::super::replay::Replay;
use super::{Client, FAILED, LOST, Parts, SIGPIPE};
use crate::ctl::Error;
use crate::wire::proto::v1::to_program::Message;
use crate::wire::proto::v1::{ProgramData, ProgramTaken};

const SIGHUP: u32 = 1;
const SIGINT: u32 = 2;
const SIGUSR1: u32 = 10;
const SIGUSR2: u32 = 12;
const SIGTERM: u32 = 15;
/// Ctrl-C on a terminal that passes on each key.
const INTERRUPT: u8 = 3;

impl Client {
    /// Runs `work` while the program is not connected. Signals are for guestctl meanwhile, and input is kept.
    pub(super) async fn unless_interrupted<T>(
        &mut self,
        signals: &mut Signals,
        work: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                heard = signals.next() => self.hear(heard, &drop)?,
                part = next_part(&mut self.input), if self.ended.is_none() => self.read(part, &drop)?,
                () = until(self.outage.tell_at()) => self.tell(),
                done = &mut work => return Ok(done),
            }
        }
    }

    pub(super) fn has_written(
        &mut self,
        first: Written,
        outputs: &mut Outputs,
        say: &impl Fn(Message),
    ) -> Result<(), Error> {
        let mut next = Some(first);
        while let Some(written) = next {
            match written {
                Written::Up(which, before) => self.written[which] = before,
                Written::NoReader if !self.has_no_reader => {
                    self.has_no_reader = true;
                    if self.is_attached {
                        say(Message::Signal(SIGPIPE));
                    }
                }
                Written::NoReader => {}
                // Output that was not written is not acknowledged, so another client that attaches receives it.
                Written::Failed(which, error) => {
                    let what = ["standard output", "standard error"][which];
                    return Err(self.fail(&format!("cannot write {what}: {error}")));
                }
            }
            next = outputs.written.try_recv().ok();
        }
        say(self.acknowledgement());
        Ok(())
    }

    /// Acknowledges all output that was written here: the agent need not keep it.
    pub(super) fn acknowledgement(&self) -> Message {
        let [output, errors] = self.written;
        Message::Taken(ProgramTaken { output, errors })
    }

    /// Handles a part of the input. It is sent if the program is attached, otherwise later.
    pub(super) fn read(&mut self, part: io::Result<Vec<u8>>, say: &impl Fn(Message)) -> Result<(), Error> {
        let data = part.map_err(|error| self.fail(&format!("cannot read standard input: {error}")))?;
        if self.raw.is_some() && self.outage.is_told() && data.contains(&INTERRUPT) {
            return Err(self.leave(SIGINT));
        }
        let Some((replay, _)) = &mut self.input else { return Ok(()) };
        let message = if data.is_empty() {
            Message::EndOfInput(replay.ended())
        } else {
            Message::Input(ProgramData { offset: replay.read(&data), data })
        };
        if self.is_attached {
            say(message);
        }
        Ok(())
    }

    pub(super) fn hear(&mut self, heard: Heard, say: &impl Fn(Message)) -> Result<(), Error> {
        let is_terminal = self.started.as_ref().is_some_and(|started| started.has_terminal);
        let has_program = self.is_attached && self.ended.is_none();
        match heard {
            // The size is sent again with each attachment.
            Heard::Resized => {
                if let Some(size) = local::size().filter(|_| is_terminal && has_program) {
                    say(Message::Resize(size));
                }
            }
            // A client that has lost its terminal is of no further use.
            Heard::Signal(number @ (SIGHUP | SIGTERM)) if is_terminal => return Err(self.leave(number)),
            Heard::Signal(number) if has_program => say(Message::Signal(number)),
            // These signals are for the program only.
            Heard::Signal(number @ (SIGUSR1 | SIGUSR2)) if self.started.is_some() => {
                if !self.signals.contains(&number) {
                    self.signals.push(number);
                }
            }
            // There is no program to forward them to.
            Heard::Signal(number) => return Err(self.leave(number)),
        }
        Ok(())
    }

    /// Informs the user that there is no connection, and what can be done.
    pub(super) fn tell(&mut self) {
        let is_raw = self.raw.is_some();
        let why = self.outage.tell();
        let words = format!("{why}; reconnecting to the program {} (Ctrl-C ends guestctl)", self.id);
        local::say(&words, is_raw);
    }

    /// Returns the error for a signal that ends this client, and not the program.
    fn leave(&mut self, signal: u32) -> Error {
        self.raw = None;
        if self.started.is_some() {
            local::say(&self.left(), false);
            return Error::Ended(LOST);
        }
        if self.start.is_some() && self.was_sent {
            let words =
                "it is not known whether the program was started; guestctl ps lists the programs that run in";
            local::say(&format!("{words} {}", self.name), false);
        }
        Error::Ended(128u8.saturating_add(u8::try_from(signal).unwrap_or_default()))
    }

    /// Returns the error for a failure on this side, which ends the client and not the program.
    fn fail(&mut self, words: &str) -> Error {
        self.raw = None;
        local::say(&format!("{words}; {}", self.left()), false);
        Error::Ended(FAILED)
    }

    /// Describes how to find the program after the client has ended.
    fn left(&self) -> String {
        let (id, name) = (&self.id, &self.name);
        if self.ended.is_some() {
            return format!(
                "the program has ended, and guestctl attach {name} {id} shows the rest of its output"
            );
        }
        let has_more_input = self.input.as_ref().is_some_and(|(replay, _)| !replay.has_ended());
        let how = if has_more_input { "attach -i" } else { "attach" };
        format!("the program waits in the guest; guestctl {how} {name} {id} attaches to it again")
    }
}

/// Waits for the next part of the input, once there is room for it.
pub(super) async fn next_part(input: &mut Option<(Replay, Parts)>) -> io::Result<Vec<u8>> {
    match input {
        Some((replay, parts)) if replay.room() >= PART => {
            let part = parts.recv().await;
            part.unwrap_or_else(|| Err(io::Error::other("nothing reads it any more")))
        }
        _ => std::future::pending().await,
    }
}

/// Completes at this time; never without one.
pub(super) async fn until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}
