//! Commands that run programs.

use std::borrow::Cow;
use std::iter;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::guest::processes::{Capture, Ended, Kept, Sending, State, Task};
use crate::policy::Role;
use crate::qga::arguments::{Refused, Value, Word};
use crate::qga::base64::{Base64, encode};
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::owners::Kind;
use crate::qga::reply::Reply;
use crate::qga::room::Share;
use crate::qga::table::{Class, Command, Outcome, Pending, Run};

/// Bytes of output that are encoded at once; a multiple of three, so that the parts in base64 can be joined.
const PART: usize = 192 * 1024;

const EXEC: Command = Command { since: "2.5", class: Class::Exec, ..Command::USUAL };

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-exec",
        role: Some(Role::Exec),
        arguments: "path, arg? (list), env? (list of NAME=VALUE, the whole environment), input-data? (base64), \
                    capture-output? (true, false, `none`, `stdout`, `stderr`, `separated` or `merged`)",
        returns: "pid",
        audited: true,
        summary: "Runs a program, looked for in the agent's PATH if its path has no `/`. The log names the program, \
                  not its arguments.",
        differences: "An entry of env without `=` is an error. The program gets `/` as its working \
                      directory, a process group of its own, the umask 022 and no variable that the service \
                      manager has for the agent alone. Where the settings limit programs, env is refused, \
                      because variables can make a program run others. At most 256 programs run at the same \
                      time.",
        run: Run::Later(exec),
        ..EXEC
    },
    Command {
        name: "guest-exec-status",
        role: Some(Role::Exec),
        arguments: "pid",
        returns: "exited, exitcode?, signal?, out-data?, err-data?, out-truncated?, err-truncated?",
        summary: "Returns whether a program of guest-exec has ended, how, and its output. A program that has ended is reported once, and then forgotten.",
        differences: "As with qemu-ga, the end is reported only when the outputs are closed as well, which a \
                      process that the program has started may hold open; but at the latest 10 s after the \
                      end (`qga.exec.output-deadline`), where qemu-ga waits forever. What comes later is \
                      dropped. 16 MiB of each output are kept, 64 MiB of all; results that no client \
                      requests are dropped after 10 minutes, or when 1024 newer ones wait. `out-truncated` \
                      and `err-truncated` are true when something is missing, or may be. Where clients do \
                      not read their large answers, one of more than 192 KiB is refused until they do, and \
                      its result is kept.",
        run: Run::Now(exec_status),
        ..EXEC
    },
];

#[derive(Serialize)]
struct Started {
    pid: u32,
}

/// Implements `guest-exec`.
pub fn exec<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (path, task) = call.arguments.read(|arguments| {
            let path = arguments.required::<String>("path")?;
            call.concerns(&*path);
            let environment = arguments.optional::<Vec<Variable>>("env")?;
            let words = arguments.optional::<Vec<Word>>("arg")?.unwrap_or_default();
            let task = Task {
                program: path.clone(),
                arguments: words.into_iter().map(|Word(word)| word).collect(),
                environment: environment.map(|list| list.into_iter().map(|Variable(pair)| pair).collect()),
                input: arguments.optional("input-data")?.map(|Base64(bytes)| bytes),
                capture: arguments.optional("capture-output")?.unwrap_or_default(),
            };
            Ok((path, task))
        })?;
        if path.is_empty() {
            return Err(Error::argument("\"path\"", "must not be empty"));
        }
        let guest = &call.context.guest;
        let environment = task.environment.as_ref().is_some_and(|variables| !variables.is_empty());
        let check = call.context.policy.looks_at_programs().then(|| call.check("guest-exec"));
        let may = check.map(|check| move |path: &Path| check.program(path, environment));
        let pid = guest.processes.start(&guest.root, task, may).await?;
        call.gives(Kind::Program, pid.into());
        Reply::value(&Started { pid })
    })
}

/// Implements `guest-exec-status`.
pub fn exec_status(call: &Call<'_>) -> Outcome {
    let pid = call.arguments.read(|arguments| arguments.required::<i64>("pid"))?;
    let guest = &call.context.guest;
    let unknown = || {
        let problem = "belongs to no program that guest-exec has started, or its end was already reported";
        Error::argument("\"pid\"", problem)
    };
    if !call.owns(Kind::Program, pid) {
        return Err(unknown());
    }
    let size = guest.processes.size(pid);
    // Reserved before the result is taken, which makes the table forget it.
    let share = call.answer(size, PART, size)?;
    match guest.processes.state(pid) {
        None => Err(unknown()),
        Some((State::Running, _)) => Ok(Reply::of(&[b"{\"exited\":false}"])),
        Some((State::Finished(ended), sending)) => Ok(finished(ended, (sending, share))),
    }
}

/// Builds the answer; `held` is dropped once it was sent.
fn finished(ended: Ended, held: (Sending, Share)) -> Reply {
    let Ended { status, outputs: [output, errors] } = ended;
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!(",\"exitcode\":{code}"),
        (None, Some(signal)) => format!(",\"signal\":{signal}"),
        (None, None) => String::new(),
    };
    let begin = format!("{{\"exited\":true{how}");
    let size = output.bytes.len() + errors.bytes.len();
    let rest = member("out", output).chain(member("err", errors)).chain(iter::once(b"}".to_vec()));
    if size <= PART {
        Reply::of(&[begin.as_bytes(), &rest.flatten().collect::<Vec<_>>()])
    } else {
        let sent = stream::once(async move {
            drop(held);
            Vec::new()
        });
        Reply::in_parts(&[begin.as_bytes()], Box::pin(stream::iter(rest).chain(sent)))
    }
}

/// Returns the JSON members of an output piece by piece; none for an empty output that is complete.
fn member(name: &'static str, kept: Kept) -> impl Iterator<Item = Vec<u8>> + Send {
    let Kept { bytes, truncated } = kept;
    let there = !bytes.is_empty() || truncated;
    let text = move |text: String| there.then(|| text.into_bytes()).into_iter();
    let begin = text(format!(",\"{name}-data\":\""));
    let end = text(format!("\",\"{name}-truncated\":{truncated}"));
    let pieces = (0..bytes.len()).step_by(PART);
    let pieces = pieces.map(move |start| encode(&bytes[start..bytes.len().min(start + PART)]));
    begin.chain(pieces).chain(end)
}

/// Entry of an environment, `NAME=VALUE`.
struct Variable((String, String));

impl Value<'_> for Variable {
    const MOST: usize = Word::MOST;

    fn read(value: &RawValue) -> Result<Self, Refused> {
        let entry = <Cow<'_, str>>::read(value)?;
        match entry.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self((name.to_owned(), value.to_owned()))),
            _ => Err(Refused::expected("of the form NAME=VALUE")),
        }
    }
}

impl Value<'_> for Capture {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        match value.get() {
            "false" | "\"none\"" => Ok(Self::None),
            "true" | "\"separated\"" => Ok(Self::Separated),
            "\"stdout\"" => Ok(Self::Output),
            "\"stderr\"" => Ok(Self::Errors),
            "\"merged\"" => Ok(Self::Merged),
            _ => Err(Refused::expected("true, false, or one of none, stdout, stderr, separated, merged")),
        }
    }
}
