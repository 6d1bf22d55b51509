//! Service `guestlet.v1.Exec`: programs that a host half runs for users. A call is attached to one program,
//! which continues to run without the call.

mod conversation;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::guest::exec::state::{Away, Ended};
use crate::guest::exec::{self, Attached, Task};
use crate::guest::{Guest, freeze};
use crate::policy::audit::{Noted, Record};
use crate::policy::{Asked, Asker, Decision, Detail, Role};
use crate::rpc::guard::Gate;
use crate::rpc::guest::may_work;
use crate::sys::error_chain;
use crate::sys::terminal::Size;
use crate::transport::opening;
use crate::wire::exec::EXIT_CODE;
use crate::wire::proto::v1;
use crate::wire::proto::v1::exec_server::{self, ExecServer};
use crate::wire::proto::v1::to_program::Message;
use conversation::Conversation;

/// Bytes of one request: arguments and variables, and what is around each of many short ones.
const MAX_REQUEST: usize = 2 * exec::MAX_ARGUMENTS;
/// Default time in seconds for which a program waits for a client.
const USUAL_WAIT: u32 = 30;
const USUAL_KEEP: u32 = 600;
const LONGEST_WAIT: u32 = 86_400;
/// The verbs in audit records.
const RUN: &str = "RunProgram";
/// Command whose settings in `[qga]` apply to programs as well: if it is forbidden, so are they.
const AS_COMMAND: &str = "guest-exec";

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    gate: Gate,
    stopping: CancellationToken,
}

impl Service {
    /// Runs programs in this guest, as far as the rules of `gate` let it, until `stopping`.
    pub fn new(guest: Guest, gate: Gate, stopping: CancellationToken) -> Self {
        Self { guest, gate, stopping }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> ExecServer<Self> {
        ExecServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

/// Reason why no program was started, to be converted to a status.
enum Refusal {
    Denied(String),
    Frozen(String),
    Error(exec::Error),
}

impl From<exec::Error> for Refusal {
    fn from(error: exec::Error) -> Self {
        Self::Error(error)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        use exec::Error;

        let error = match refusal {
            Refusal::Denied(words) => return Self::permission_denied(words),
            Refusal::Frozen(words) => return Self::failed_precondition(words),
            Refusal::Error(error) => error,
        };
        let words = error_chain::words(&error);
        match error {
            Error::TooMany | Error::TooManyOfOne | Error::TooManyKnown | Error::TooMuchKept { .. } => {
                Self::resource_exhausted(words)
            }
            Error::Exists(_) => Self::already_exists(words),
            Error::User { .. } | Error::System(_) => Self::internal(words),
            Error::Directory { .. } | Error::NoRunuser => Self::failed_precondition(words),
            Error::Program { source, .. } => {
                let is_missing = source.kind() == std::io::ErrorKind::NotFound;
                let mut status = Self::new(Code::FailedPrecondition, words);
                let code = if is_missing { "127" } else { "126" };
                status.metadata_mut().insert(EXIT_CODE, tonic::metadata::MetadataValue::from_static(code));
                status
            }
            Error::Identifier(_)
            | Error::Nothing
            | Error::TooLong(_)
            | Error::Nul(_)
            | Error::Variable(_)
            | Error::TerminalKind(_)
            | Error::LoginProgram(_)
            | Error::LoginShell
            | Error::UnknownUser(_) => Self::invalid_argument(words),
        }
    }
}

/// Returns the owner of the programs that this caller starts. A caller's name contains no line breaks, so the
/// text is unique.
fn owner(asker: &Asker) -> String {
    format!("{}\n{}", asker.who(), asker.caller())
}

fn asker<T>(request: &Request<T>) -> Result<Asker, Status> {
    let asker = request.extensions().get::<Asker>().cloned();
    asker.ok_or_else(|| Status::internal("the caller is not known"))
}

fn unknown(id: &str) -> Status {
    Status::not_found(format!("there is no program {id:?} of this caller; guestctl ps lists them"))
}

fn size(size: Option<v1::TerminalSize>) -> Size {
    let size = size.unwrap_or_default();
    let cells = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
    Size { rows: cells(size.rows), columns: cells(size.columns) }
}

fn bytes(bytes: Vec<u8>) -> OsString {
    OsString::from_vec(bytes)
}

fn away(start: &v1::StartProgram) -> Result<Away, Status> {
    use v1::OnDisconnect::{Detach, Keep, Kill, Unspecified};

    if start.wait_seconds > LONGEST_WAIT {
        return Err(Status::invalid_argument(format!("wait_seconds is more than {LONGEST_WAIT}")));
    }
    let usual = match (start.on_disconnect(), &start.terminal) {
        (Detach, _) => return Ok(Away::GoesOn),
        (Kill, _) | (Unspecified, Some(_)) => USUAL_WAIT,
        (Keep, _) | (Unspecified, None) => USUAL_KEEP,
    };
    let seconds = if start.wait_seconds == 0 { usual } else { start.wait_seconds };
    Ok(Away::Ends(Duration::from_secs(seconds.into())))
}

fn task(start: v1::StartProgram, owner: String) -> Result<Task, Status> {
    let away = away(&start)?;
    if start.login.is_some() && !start.arguments.is_empty() {
        return Err(Status::invalid_argument(
            "arguments and login exclude each other; pass the arguments in StartProgram.login",
        ));
    }
    let variables = start.environment.into_iter();
    let is_login = start.login.is_some();
    let arguments = start.login.map_or(start.arguments, |login| login.arguments);
    Ok(Task {
        id: start.id,
        owner,
        command: arguments.into_iter().map(bytes).collect(),
        environment: variables.map(|one| (bytes(one.name), bytes(one.value))).collect(),
        directory: Some(start.directory)
            .filter(|path| !path.is_empty())
            .map(|path| PathBuf::from(bytes(path))),
        terminal: start.terminal.map(|terminal| (terminal.kind, size(terminal.size))),
        has_input: start.has_input,
        limit: (start.timeout_seconds > 0).then(|| Duration::from_secs(start.timeout_seconds.into())),
        away,
        on_end: None,
        is_login,
    })
}

impl Service {
    /// Starts a program on behalf of the caller.
    async fn start(
        &self,
        start: v1::StartProgram,
        asker: &Asker,
        noted: &Arc<Noted>,
    ) -> Result<Attached, Status> {
        is_thawed(&self.guest)?;
        may_work()?;
        let user = start.user.clone();
        let mut task = task(start, owner(asker))?;
        let program = task.command.first().map(|program| program.to_string_lossy().into_owned());
        let program = program.unwrap_or_else(|| "a login shell".to_owned());
        let account = exec::account(&user).await;
        let name = account.as_ref().map_or(user.as_str(), |account| account.name.as_str());
        let how = if task.is_login { " (login)" } else { "" };
        let _ = noted.subject.set(format!("{program} as {name}{how}"));
        let account = account.map_err(Refusal::from)?;
        let check = Check {
            gate: self.gate.clone(),
            asker: asker.clone(),
            noted: Arc::clone(noted),
            user: account.name.clone(),
            environment: !task.environment.is_empty(),
            directory: task.directory.is_some(),
            is_login: task.is_login,
            guest: self.guest.clone(),
        };
        task.on_end = Some(self.end_record(asker, noted));
        let started = self.guest.programs.start(
            &self.guest.root,
            account,
            task,
            Some(move |path: &Path| check.program(path)),
        );
        Ok(started.await.inspect_err(|refusal: &Refusal| {
            if let Refusal::Denied(words) = refusal {
                let _ = noted.denied.set(words.clone());
            }
        })?)
    }

    /// Writes down how a program ended.
    fn end_record(&self, asker: &Asker, noted: &Arc<Noted>) -> Box<dyn FnOnce(&Ended) + Send> {
        let (gate, asker, begun) = (self.gate.clone(), asker.clone(), Instant::now());
        let noted = Arc::clone(noted);
        Box::new(move |ended| {
            gate.audit().record(&Record {
                id: asker.id(),
                who: asker.who(),
                caller: asker.caller(),
                role: Role::Exec,
                verb: RUN,
                noted: &noted,
                result: &format!("the program ended: {}", words(ended)),
                took: begun.elapsed(),
            });
        })
    }
}

/// Describes how a program ended, for display.
fn words(ended: &Ended) -> String {
    match &ended.status {
        Ok(status) => status.to_string(),
        Err(error) => format!("how is not known: {error}"),
    }
}

/// Check of one program against the rules.
struct Check {
    gate: Gate,
    asker: Asker,
    noted: Arc<Noted>,
    user: String,
    environment: bool,
    directory: bool,
    is_login: bool,
    guest: Guest,
}

/// Refuses while file systems are frozen: a program might hang, and hold what the freeze waits for.
fn is_thawed(guest: &Guest) -> Result<(), Refusal> {
    if matches!(guest.freezer.status(), freeze::Status::Thawed { .. }) {
        return Ok(());
    }
    let held = guest.freezer.held();
    Err(Refusal::Frozen(format!("no program can be started while file systems are frozen: {held}")))
}

impl Check {
    /// Checks whether the caller may run the program at this path, in which all links are resolved.
    fn program(&self, path: &Path) -> Result<(), Refusal> {
        let Self { gate, asker, noted, user, environment, directory, is_login, guest } = self;
        let denied = |why: &dyn std::fmt::Display| {
            let shell = "; with --login the login shell must be allowed, which can run any program";
            Refusal::Denied(format!("{why}{}", if *is_login { shell } else { "" }))
        };
        let _ = noted.path.set(path.display().to_string());
        let detail = Detail::Program { path, environment: *environment, directory: *directory, user };
        let asked = Asked { detail, ..Asked::new(asker.who(), asker.caller(), RUN, Role::Exec) };
        let rules = gate.rules();
        if let Some(bound) = rules.bounds.forbid(&Asked { verb: AS_COMMAND, ..asked }) {
            return Err(denied(&bound));
        }
        match rules.granted(&asked) {
            Decision::Allowed(_) => {}
            Decision::WouldDeny(why) => drop(noted.would_deny.set(why.to_string())),
            Decision::Denied(why) => return Err(denied(&why)),
        }
        // Checked again, because the steps before this may have taken long.
        is_thawed(guest)
    }
}

#[tonic::async_trait]
impl exec_server::Exec for Service {
    type RunProgramStream = Pin<Box<dyn Stream<Item = Result<v1::FromProgram, Status>> + Send>>;

    async fn run_program(
        &self,
        request: Request<Streaming<v1::ToProgram>>,
    ) -> Result<Response<Self::RunProgramStream>, Status> {
        let asker = asker(&request)?;
        let noted = request.extensions().get::<Arc<Noted>>().cloned().unwrap_or_default();
        let mut requests = request.into_inner();
        let first = opening::first(&mut requests).await?;
        let attached = match first.and_then(|first| first.message) {
            Some(Message::Start(start)) => self.start(start, &asker, &noted).await?,
            Some(Message::Attach(attach)) => {
                let _ = noted.subject.set(format!("attach to {}", attach.id));
                let found = self.guest.programs.find(&owner(&asker), &attach.id).await;
                let program = found.ok_or_else(|| unknown(&attach.id))?;
                program.attach([attach.output_from, attach.errors_from])
            }
            _ => return Err(Status::invalid_argument("the first message must be start or attach")),
        };
        let conversation = Conversation::new(requests, attached, self.stopping.clone());
        Ok(Response::new(Box::pin(conversation.into_stream())))
    }

    async fn list_programs(
        &self,
        request: Request<v1::ListProgramsRequest>,
    ) -> Result<Response<v1::ListProgramsResponse>, Status> {
        let own = self.guest.programs.list(Some(&owner(&asker(&request)?)));
        let programs = own.into_iter().map(program);
        Ok(Response::new(v1::ListProgramsResponse { programs: programs.collect() }))
    }

    async fn signal_program(
        &self,
        request: Request<v1::SignalProgramRequest>,
    ) -> Result<Response<v1::SignalProgramResponse>, Status> {
        let owner = owner(&asker(&request)?);
        crate::rpc::guard::concerns(&request, || request.get_ref().id.clone());
        let v1::SignalProgramRequest { id, signal, .. } = request.into_inner();
        let program = self.guest.programs.find(&owner, &id).await.ok_or_else(|| unknown(&id))?;
        if signal == 0 {
            program.end();
        } else {
            send(&program, signal)?;
        }
        Ok(Response::new(v1::SignalProgramResponse {}))
    }
}

/// Converts the state of a program to a message.
pub(super) fn program(one: exec::Standing) -> v1::Program {
    v1::Program {
        id: one.id,
        process_id: one.process_id,
        user: one.user,
        command: one.command,
        started: Some(one.started.into()),
        has_terminal: one.has_terminal,
        is_attached: one.is_attached,
        ended: one.ended.as_ref().map(conversation::ended),
    }
}

/// Sends a signal, by its number.
fn send(program: &exec::Program, signal: u32) -> Result<(), Status> {
    let number = i32::try_from(signal).ok().and_then(|number| Signal::try_from(number).ok());
    let signal = number.ok_or_else(|| Status::invalid_argument(format!("unknown signal {signal}")))?;
    program.signal(signal).map_err(|error| Status::internal(format!("cannot send the signal: {error}")))
}
