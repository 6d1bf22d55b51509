//! One call of a command: what it is given, and who asks.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::policy::Asker;
use crate::policy::audit::{Noted, Record};
use crate::qga::arguments::Arguments;
use crate::qga::error::Error;
use crate::qga::owners::Kind;
use crate::qga::policy::Check;
use crate::qga::reply::{self, Line};
use crate::qga::room::Share;
use crate::qga::table::{Class, Command, Run};
use crate::qga::{Context, recorded};

/// Bytes that a host half may have of a file or an output in one answer: of more than so many, in base64, it takes none.
const OVER_A_SESSION: usize = 96 << 10;

/// One call of a command.
#[derive(Debug)]
pub struct Call<'a> {
    /// The machine, and what else the commands share.
    pub context: &'a Context,
    /// What the command is given.
    pub arguments: Arguments<'a>,
    /// Who asks, as the log names it.
    peer: &'a str,
    asker: &'a Asker,
    begun: Instant,
    /// What it turns out to be about; most calls are about nothing.
    noted: OnceLock<Arc<Noted>>,
}

impl<'a> Call<'a> {
    /// A call by `peer`, which is one of those that are `asker`.
    pub fn new(context: &'a Context, arguments: Arguments<'a>, peer: &'a str, asker: &'a Asker) -> Self {
        Self { context, arguments, peer, asker, begun: Instant::now(), noted: OnceLock::new() }
    }

    /// Who asks, as the log names it.
    pub fn peer(&self) -> &'a str {
        self.peer
    }

    /// Who asks, as the rules know it.
    pub fn asker(&self) -> &'a Asker {
        self.asker
    }

    /// The number that this call makes is the asker's alone.
    pub fn gives(&self, kind: Kind, number: i64) {
        self.context.owners.give(kind, number, self.asker);
    }

    /// Whether the number is the asker's.
    pub fn owns(&self, kind: Kind, number: i64) -> bool {
        self.context.owners.has(kind, number, self.asker)
    }

    /// The share of an answer that has so many bytes of a file or an output, and takes `held` bytes of memory until it is sent
    /// if they are more than `small`.
    ///
    /// # Errors
    /// If it is too large for a session, or others take too much.
    pub fn answer(&self, bytes: usize, small: usize, held: usize) -> Result<Share, Error> {
        match self.asker {
            Asker::Host(_) if bytes > OVER_A_SESSION => Err(Error::generic(format!(
                "over a session an answer has at most {} KiB of a file or an output, and this one {bytes} bytes; nothing is lost",
                OVER_A_SESSION >> 10
            ))),
            Asker::Qga if bytes > small => self.context.room.answer(held),
            _ => Ok(Share::default()),
        }
    }

    /// Says for the audit line what the call is about, such as the path of a program; never a secret. Said as
    /// soon as the arguments are read, so that it is in the line of a call that fails, too.
    pub fn concerns(&self, subject: impl Into<String>) {
        // Once is enough: a call is about one thing.
        let _ = self.noted().subject.set(subject.into());
    }

    /// Asks whether what this call of `verb` turns out to be about may be done.
    pub fn check(&self, verb: &'static str) -> Check {
        self.context.policy.check(verb, self.noted(), self.asker)
    }

    fn noted(&self) -> &Arc<Noted> {
        self.noted.get_or_init(Arc::default)
    }

    /// Carries out `command`, and makes the line that answers it; an empty one if none does.
    pub async fn carry_out(&self, command: &'static Command, id: Option<&str>) -> Line {
        let watch = self.watch(command);
        let outcome = match command.run {
            Run::Now(run) => run(self),
            Run::Later(run) => run(self).await,
        };
        watch.ended(outcome.as_ref().err());
        let answered = command.success_response || outcome.is_err();
        if answered { reply::line(outcome, id) } else { Line::default() }
    }

    /// Watches over the call of `command` from its beginning: it leaves its line in the log however it ends.
    pub fn watch(&self, command: &'static Command) -> Watch<'_> {
        Watch { call: self, command, ended: false }
    }

    /// Writes down how the call ended.
    fn log(&self, command: &Command, failure: Option<&Error>) {
        let (context, peer, name) = (self.context, self.peer, command.name);
        let role = command.needs();
        let would_deny = context.policy.would_deny(command, self.asker);
        let is_new = || {
            command.class != Class::Protocol
                && context.audit.is_new(&self.asker.who(), self.asker.caller(), role)
        };
        if !command.audited && would_deny.is_none() && !is_new() {
            match failure {
                None => tracing::debug!("{peer}: {name}"),
                Some(error) => tracing::debug!("{peer}: {name}: {}", error.desc),
            }
            return;
        }
        let noted = self.noted();
        if let Some(why) = would_deny {
            let _ = noted.would_deny.set(why);
        }
        context.audit.record(&Record {
            id: self.asker.id(),
            who: self.asker.who(),
            caller: recorded(peer, self.asker),
            role,
            verb: name,
            noted,
            result: failure.map_or("done", |error| &error.desc),
            took: self.begun.elapsed(),
        });
    }
}

/// A call that has not ended. When this is dropped before, as it is when the agent ends or a host half gives up, the log says so.
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
            let unknown =
                Error::generic("not known: it was under way when the agent stopped or the host half gave up");
            self.call.log(self.command, Some(&unknown));
        }
    }
}
