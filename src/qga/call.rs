//! One call of a command: its arguments and its caller.

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

/// Maximum number of bytes of a file or an output in one answer to a host half: it refuses a larger answer, in
/// base64.
const OVER_A_SESSION: usize = 96 << 10;

/// Call of a command.
#[derive(Debug)]
pub struct Call<'a> {
    /// Guest, and the state that all commands share.
    pub context: &'a Context,
    /// Arguments of the call.
    pub arguments: Arguments<'a>,
    /// Name of the client for the log.
    peer: &'a str,
    asker: &'a Asker,
    begun: Instant,
    /// Details for the audit log, such as the path of a program; most calls have none.
    noted: OnceLock<Arc<Noted>>,
}

impl<'a> Call<'a> {
    /// Creates a call by the client `peer`, which belongs to the callers that the rules know as `asker`.
    pub fn new(context: &'a Context, arguments: Arguments<'a>, peer: &'a str, asker: &'a Asker) -> Self {
        Self { context, arguments, peer, asker, begun: Instant::now(), noted: OnceLock::new() }
    }

    /// Returns the name of the client for the log.
    pub fn peer(&self) -> &'a str {
        self.peer
    }

    /// Returns the caller as the rules know it.
    pub fn asker(&self) -> &'a Asker {
        self.asker
    }

    /// Makes the caller the owner of a handle or PID that this call has created.
    pub fn gives(&self, kind: Kind, number: i64) {
        self.context.owners.give(kind, number, self.asker);
    }

    /// Returns whether the handle or PID belongs to the caller.
    pub fn owns(&self, kind: Kind, number: i64) -> bool {
        self.context.owners.has(kind, number, self.asker)
    }

    /// Reserves memory for an answer with `bytes` bytes of a file or an output. An answer with more than `small` takes
    /// `held` bytes until it is sent.
    ///
    /// # Errors
    /// If it is too large for a session, or the answers of others take too much.
    pub fn answer(&self, bytes: usize, small: usize, held: usize) -> Result<Share, Error> {
        match self.asker {
            Asker::Host(_) if bytes > OVER_A_SESSION => Err(Error::generic(format!(
                "over a session, an answer carries at most {} KiB of a file or of output, and this one \
                 has {bytes} bytes; nothing is lost",
                OVER_A_SESSION >> 10
            ))),
            Asker::Qga if bytes > small => self.context.room.answer(held),
            _ => Ok(Share::default()),
        }
    }

    /// Records the subject of the call for the audit line, such as the path of a program; never a secret. Called as
    /// soon as the arguments are read, so that the line of a call that fails has the subject as well.
    pub fn concerns(&self, subject: impl Into<String>) {
        // Only the first subject is recorded: a call has one.
        let _ = self.noted().subject.set(subject.into());
    }

    /// Returns a check of whether the details of this call of `verb` are allowed.
    pub fn check(&self, verb: &'static str) -> Check {
        self.context.policy.check(verb, self.noted(), self.asker)
    }

    fn noted(&self) -> &Arc<Noted> {
        self.noted.get_or_init(Arc::default)
    }

    /// Carries out `command`, and returns the line that answers it; an empty one if it has no answer.
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

    /// Begins to watch the call of `command`, so that its line gets into the log however it ends.
    pub fn watch(&self, command: &'static Command) -> Watch<'_> {
        Watch { call: self, command, ended: false }
    }

    /// Logs how the call ended.
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

/// Call that has not ended. If this is dropped before `ended`, as when the agent ends or a host half gives up, the
/// log says so.
#[derive(Debug)]
pub struct Watch<'c> {
    call: &'c Call<'c>,
    command: &'static Command,
    ended: bool,
}

impl Watch<'_> {
    /// Logs how the call ended.
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
