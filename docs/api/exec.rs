//! Runs a program in the guest of a VM: its output and its exit code are this program's own. A connection that breaks is a pause:
//! another one goes on at the byte at which the one before has ended.
//!
//! `exec SOCKET VM PROGRAM [ARGUMENT…]`

#![allow(clippy::print_stderr, reason = "where it says what is wrong")]

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use guestlet::transport::http2::{self, ORIGIN};
use guestlet::wire::proto::v1::exec_client::ExecClient;
use guestlet::wire::proto::v1::from_program::Message as Told;
use guestlet::wire::proto::v1::program_ended::How;
use guestlet::wire::proto::v1::to_program::Message;
use guestlet::wire::proto::v1::{
    AttachProgram, ForgetProgram, ProgramData, ProgramEnded, ProgramTaken, StartProgram, ToProgram,
};
use http::Uri;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status};

/// How long it is tried to connect again. The program waits for 10 minutes unless `StartProgram.wait_seconds` says otherwise.
const PATIENCE: Duration = Duration::from_secs(60);
const SAID_BY_GUEST: &str = "guestlet-said-by-guest";
const EXIT_CODE: &str = "guestlet-exit-code";

/// A program in a guest, and what of its output was written here.
struct Program {
    start: StartProgram,
    was_asked_for: bool,
    /// The numbers of the bytes that come next.
    output: u64,
    errors: u64,
}

/// How a call is over.
enum Over {
    Ended(ProgramEnded),
    Refused(Status),
    Lost(String),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let (Some(socket), Some(vm)) = (words.next(), words.next()) else {
        return Err("exec SOCKET VM PROGRAM [ARGUMENT...]".into());
    };
    let start = StartProgram {
        name: vm.to_string_lossy().into_owned(),
        // No other program of this user in this guest may have it.
        id: format!("{:x}{:08x}", std::process::id(), nanoseconds()),
        arguments: words.map(OsString::into_vec).collect(),
        ..StartProgram::default()
    };
    let mut program = Program { start, was_asked_for: false, output: 0, errors: 0 };
    let mut lost_since = None;
    loop {
        let before = (program.output, program.errors);
        let why = match program.call(&socket).await? {
            Over::Ended(ended) => return Ok(exit_code(&ended)),
            Over::Refused(status) => {
                let code = status.metadata().get(EXIT_CODE).and_then(|code| code.to_str().ok()?.parse().ok());
                eprintln!("exec: {}", status.message());
                return Ok(ExitCode::from(code.unwrap_or(125)));
            }
            Over::Lost(why) => why,
        };
        if before != (program.output, program.errors) {
            lost_since = None;
        }
        if lost_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            eprintln!("exec: lost the program {}: {why}", program.start.id);
            return Ok(ExitCode::from(255));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

impl Program {
    /// One connection, with one call on it.
    async fn call(&mut self, socket: &OsStr) -> io::Result<Over> {
        let connected = async { http2::connect(UnixStream::connect(socket).await.ok()?).await.ok() };
        let Some((client, mut connection)) = connected.await else {
            return Ok(Over::Lost("guestlet-host does not answer".to_owned()));
        };
        let exec = ExecClient::with_origin(client, Uri::from_static(ORIGIN));
        tokio::select! {
            biased;
            over = self.converse(exec) => over,
            _ = connection.ended() => Ok(Over::Lost("guestlet-host has closed the connection".to_owned())),
        }
    }

    async fn converse(&mut self, mut exec: ExecClient<http2::Client>) -> io::Result<Over> {
        let (requests, all) = mpsc::unbounded_channel();
        // Whether it arrives is seen by what is answered.
        let say = |message| drop(requests.send(ToProgram { message: Some(message) }));
        let is_first = !self.was_asked_for;
        say(self.opening());
        // No deadline: a program may run for as long as it likes.
        let mut answers = match exec.run_program(UnboundedReceiverStream::new(all)).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return Ok(over(status, is_first)),
        };
        loop {
            match answers.message().await {
                Ok(Some(answer)) => match answer.message {
                    Some(Told::Output(data)) => self.output = write(io::stdout(), &data)?,
                    Some(Told::Errors(data)) => self.errors = write(io::stderr(), &data)?,
                    Some(Told::Ended(ended)) => {
                        say(Message::Forget(ForgetProgram {}));
                        // The guest ends the call when it has heard that.
                        let _ = tokio::time::timeout(Duration::from_secs(2), answers.message()).await;
                        return Ok(Over::Ended(ended));
                    }
                    _ => continue,
                },
                Ok(None) => return Ok(Over::Lost("the call has ended".to_owned())),
                Err(status) => return Ok(over(status, false)),
            }
            // The guest keeps what was not taken, and lets the program wait when that is too much.
            say(Message::Taken(ProgramTaken { output: self.output, errors: self.errors }));
        }
    }

    /// The first message of a call: it is started once, and attached to from then on.
    fn opening(&mut self) -> Message {
        if std::mem::replace(&mut self.was_asked_for, true) {
            return Message::Attach(AttachProgram {
                name: self.start.name.clone(),
                id: self.start.id.clone(),
                output_from: Some(self.output),
                errors_from: Some(self.errors),
            });
        }
        Message::Start(self.start.clone())
    }
}

/// Of a call that has failed: a connection that breaks is a pause, and so is, after that, a guestlet-host that has only just
/// started or a guest that is not back yet. What the guest says itself is final.
fn over(status: Status, is_first: bool) -> Over {
    let may_pass = match status.code() {
        Code::FailedPrecondition | Code::NotFound => !is_first,
        // What the client itself says of a connection that broke.
        Code::Unavailable | Code::Cancelled | Code::Unknown => true,
        _ => false,
    };
    if may_pass && !status.metadata().contains_key(SAID_BY_GUEST) {
        return Over::Lost(status.message().to_owned());
    }
    Over::Refused(status)
}

/// Writes what has come; returns the number of the byte after it.
fn write(mut stream: impl Write, data: &ProgramData) -> io::Result<u64> {
    stream.write_all(&data.data)?;
    stream.flush()?;
    Ok(data.offset + u64::try_from(data.data.len()).unwrap_or(u64::MAX))
}

/// As a shell says it.
fn exit_code(ended: &ProgramEnded) -> ExitCode {
    let code = match &ended.how {
        Some(How::ExitCode(code)) => *code,
        Some(How::Signal(signal)) => 128 + signal,
        Some(How::Unknown(_)) | None => 125,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

fn nanoseconds() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().subsec_nanos()
}
