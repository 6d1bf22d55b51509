//! Programs in a guest: `guestctl exec`, `attach`, `ps` and `kill`.
//!
//! ```text
//! stdin ──thread──▶ ┐                                    ┌──▶ thread ──▶ stdout, stderr
//! signals, size ──▶ ├─ Client ◀──stream──▶ guestlet-host ┤
//! local terminal ─▶ ┘    │ lost: dial again, attach      └──▶ exit code
//! ```
//!
//! `client` holds what outlives a connection, `ctl::outage` decides how long there may be none, and `local`
//! is the local end: terminal, signals and standard streams.

mod client;
mod list;
pub(super) mod local;
mod replay;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::time::Duration;

use super::Error;
use super::client::answer;
use super::door::Door;
use super::print::Printer;
use crate::wire::proto::v1::{
    self, OnDisconnect, ProgramLogin, ProgramTerminal, ProgramVariable, SignalProgramRequest, StartProgram,
    TerminalSize,
};

/// Limit of the bytes of arguments and variables.
const MAX_ARGUMENTS: usize = 256 << 10;
/// TERM if the environment does not set it.
const USUAL_TERMINAL: &str = "xterm";

/// What becomes of a program whose client is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Disconnect {
    /// Hang it up, and kill it after 10 s, if no client comes back within 30 s
    Kill,
    /// Have it wait for a client for 10 minutes, and end it then
    Keep,
}

/// Program to run.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct Run {
    /// Path or name of the program, and its arguments.
    pub command: Vec<OsString>,
    /// User that runs it; `None` for root.
    pub user: Option<String>,
    /// Environment variables, as `NAME=VALUE`.
    pub environment: Vec<OsString>,
    /// Working directory.
    pub directory: Option<OsString>,
    /// True to run it in a session opened by PAM; without a command, the session runs the login shell.
    pub is_login: bool,
    /// True to give it a terminal.
    pub has_terminal: bool,
    /// True to connect its standard input.
    pub has_input: bool,
    /// Time limit of the program.
    pub limit: Option<Duration>,
    /// True to leave it running without a client.
    pub detach: bool,
    /// Fate of the program when its client has disconnected.
    pub on_disconnect: Option<Disconnect>,
    /// Time for which it waits for a client.
    pub wait: Option<Duration>,
}

/// Operation on programs.
#[derive(Debug, Clone)]
pub enum Action {
    /// Run a program.
    Run(Box<Run>),
    /// Attach to a program.
    Attach {
        /// Identifier of the program.
        id: String,
        /// True to send it standard input.
        has_input: bool,
        /// True to require that it has a terminal.
        has_terminal: bool,
    },
    /// List the programs.
    List,
    /// Send a signal to a program, or end it.
    Kill {
        /// Identifier of the program.
        id: String,
        /// Number of the signal; 0 ends the program.
        signal: u32,
    },
}

/// Carries out an operation with the daemon behind this door, which is connected again as often as necessary.
///
/// # Errors
/// Fails if the operation fails; with [`Error::Ended`] and the exit code of the program.
pub async fn run(door: &Door, printer: &mut Printer, name: String, action: Action) -> Result<(), Error> {
    match action {
        Action::Run(run) => {
            let is_detached = run.detach;
            let start = start(&name, *run)?;
            let wait = Duration::from_secs(match (start.wait_seconds, start.on_disconnect()) {
                (0, OnDisconnect::Keep) => 600,
                (0, _) => 30,
                (seconds, _) => seconds.into(),
            });
            client::Client::start(door.clone(), name, start, wait).run(printer, is_detached).await
        }
        Action::Attach { id, has_input, has_terminal } => {
            client::Client::attach(door.clone(), name, id, has_input, has_terminal).run(printer, false).await
        }
        Action::List => door.with(async |daemon| list::run(&daemon, printer, name).await).await,
        Action::Kill { id, signal } => {
            let request = SignalProgramRequest { name: name.clone(), id, signal };
            door.with(async |daemon| answer(daemon.exec().signal_program(request), &name).await.map(drop))
                .await
        }
    }
}

/// Builds the request that starts a program.
fn start(name: &str, run: Run) -> Result<StartProgram, Error> {
    let mut environment = Vec::new();
    for variable in run.environment {
        let bytes = variable.into_vec();
        let Some(at) = bytes.iter().position(|byte| *byte == b'=').filter(|at| *at > 0) else {
            let words = String::from_utf8_lossy(&bytes).into_owned();
            return Err(Error::Program(format!("--env {words:?} is not NAME=VALUE")));
        };
        environment.push(ProgramVariable { name: bytes[..at].to_vec(), value: bytes[at + 1..].to_vec() });
    }
    let arguments: Vec<_> = run.command.into_iter().map(OsString::into_vec).collect();
    let variables = environment.iter().map(|one| one.name.len() + one.value.len() + 2);
    let length: usize = arguments.iter().map(|one| one.len() + 1).chain(variables).sum();
    if length > MAX_ARGUMENTS {
        return Err(Error::Program(format!(
            "the arguments and variables have {length} bytes; at most {MAX_ARGUMENTS} are allowed: pass \
             long data on standard input"
        )));
    }
    let on_disconnect = match (run.detach, run.on_disconnect, run.has_terminal) {
        (true, ..) => OnDisconnect::Detach,
        (_, Some(Disconnect::Kill), _) | (_, None, true) => OnDisconnect::Kill,
        (_, Some(Disconnect::Keep), _) | (_, None, false) => OnDisconnect::Keep,
    };
    let seconds = |span: Option<Duration>| {
        span.map_or(0, |span| u32::try_from(span.as_secs().max(1)).unwrap_or(u32::MAX))
    };
    let kind = std::env::var("TERM").ok().filter(|kind| !kind.is_empty());
    let terminal = run.has_terminal.then(|| ProgramTerminal {
        kind: kind.unwrap_or_else(|| USUAL_TERMINAL.to_owned()),
        size: Some(local::size().unwrap_or(TerminalSize { rows: 24, columns: 80 })),
    });
    // The arguments stay empty, so that an older agent or host half, which ignores `login`, refuses the request.
    let (arguments, login) =
        if run.is_login { (Vec::new(), Some(ProgramLogin { arguments })) } else { (arguments, None) };
    Ok(StartProgram {
        name: name.to_owned(),
        id: identifier()?,
        arguments,
        login,
        environment,
        directory: run.directory.unwrap_or_default().into_vec(),
        user: run.user.unwrap_or_default(),
        terminal,
        has_input: run.has_input && !run.detach,
        timeout_seconds: seconds(run.limit),
        on_disconnect: on_disconnect.into(),
        wait_seconds: seconds(run.wait),
    })
}

/// Returns a new identifier.
fn identifier() -> Result<String, Error> {
    use std::fmt::Write as _;

    let mut bytes = [0; 6];
    local::random(&mut bytes).map_err(|error| Error::Read("/dev/urandom".to_owned(), error))?;
    let mut text = String::new();
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

/// Returns the exit code of this process for the end of a program, and a message if there is something to
/// explain.
fn exit_code(ended: &v1::ProgramEnded) -> (u8, Option<String>) {
    use v1::program_ended::How;

    let timed_out =
        ended.timed_out.then(|| "the program was terminated: it ran longer than --timeout allows".to_owned());
    match &ended.how {
        Some(How::ExitCode(code)) => (u8::try_from(code & 0xff).unwrap_or(u8::MAX), timed_out),
        Some(How::Signal(signal)) => {
            (128u8.wrapping_add(u8::try_from(signal & 0x7f).unwrap_or(0)), timed_out)
        }
        Some(How::Unknown(why)) => {
            (client::FAILED, Some(format!("it is not known how the program ended: {why}")))
        }
        None => (client::FAILED, Some("the guest does not report how the program ended".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::v1::program_ended::How;

    fn run(environment: &[&str]) -> Run {
        Run {
            command: vec!["true".into()],
            user: None,
            environment: environment.iter().map(Into::into).collect(),
            directory: None,
            is_login: false,
            has_terminal: false,
            has_input: true,
            limit: Some(Duration::from_millis(1)),
            detach: false,
            on_disconnect: None,
            wait: None,
        }
    }

    #[test]
    fn a_request_says_what_was_typed() {
        let request = start("web-1", run(&["A=b=c", "B="])).unwrap();
        assert_eq!(
            (request.environment[0].name.as_slice(), request.environment[0].value.as_slice()),
            (&b"A"[..], &b"b=c"[..])
        );
        assert_eq!((request.timeout_seconds, request.on_disconnect()), (1, OnDisconnect::Keep));
        assert!(request.id.len() == 12 && request.terminal.is_none());
        for wrong in ["A", "=b", ""] {
            assert!(start("web-1", run(&[wrong])).is_err(), "{wrong:?}");
        }
        let long = Run { command: vec!["x".repeat(2 << 20).into()], ..run(&[]) };
        let error = start("web-1", long).unwrap_err().to_string();
        assert!(error.contains("2097153 bytes; at most 262144"), "{error}");
        let detached = start("web-1", Run { detach: true, has_terminal: true, ..run(&[]) }).unwrap();
        assert_eq!((detached.on_disconnect(), detached.has_input), (OnDisconnect::Detach, false));
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let code = |how| exit_code(&v1::ProgramEnded { how: Some(how), ..v1::ProgramEnded::default() }).0;
        assert_eq!(code(How::ExitCode(3)), 3);
        assert_eq!(code(How::ExitCode(255)), 255);
        assert_eq!(code(How::Signal(9)), 137);
        assert_eq!(code(How::Unknown(String::new())), 125);
    }
}
