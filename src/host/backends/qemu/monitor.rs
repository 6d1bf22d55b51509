//! Monitor of one VM's QMP socket: keeps reconnecting, and reports power changes and resets.
//!
//! ```text
//!            ┌─ refused, vanished, end of file: off ─┐
//!            ▼                                       │
//!  start ──▶ wait ──▶ connect ──▶ greeting ──▶ qmp_capabilities ──▶ query-status ──▶ events ──┐
//!            ▲                                       │                                        │
//!            └── any other failure: unknown ─────────┴────────────────────────────────────────┘
//! ```
//!
//! A VM is reported as off only on proof, because that ends its session: QEMU has ended, or has left its
//! socket. A socket that cannot be used for another reason, or has never existed, says nothing about the VM.
//!
//! QEMU serves one client at a time, so other parts run their commands through this connection too: see
//! [`link`](super::link).

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::super::super::text;
use super::super::Change;
use super::link::{Inbox, Notice, Pending, Standing};
use super::power::{Meaning, is_suspended, of_event, of_status};
use crate::sys::process_end::Process;
use crate::wire::proto::v1::PowerState;
use crate::wire::qmp::{self, Lines, Message};

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Timeout of an answer from QEMU.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// Reason why a conversation with QEMU ended.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("QEMU is not running")]
    Absent(#[source] io::Error),
    #[error("the QMP socket has not appeared yet")]
    NeverSeen(#[source] io::Error),
    #[error("the QMP socket is busy: another client is waiting for it")]
    Taken(#[source] io::Error),
    #[error("the QMP socket cannot be used")]
    Unusable(#[source] io::Error),
    #[error("QEMU has ended")]
    Ended,
    #[error("QEMU closed its QMP socket before reporting the VM's state")]
    Closed,
    #[error("the connection to QEMU broke")]
    Broken(#[source] io::Error),
    #[error("QEMU does not answer; its QMP socket may have another client")]
    Silent,
    #[error(transparent)]
    TooLong(#[from] qmp::TooLong),
    #[error(transparent)]
    Malformed(#[from] qmp::MalformedLine),
    #[error("QEMU refused a command: {class}: {description}")]
    Refused { class: String, description: String },
    #[error("QEMU returned something other than its status")]
    Status(#[source] serde_json::Error),
    #[error("nobody wants to know")]
    Unwanted,
}

impl Error {
    /// Classifies a failure to connect; `seen` says whether the socket existed before.
    fn of_connect(error: io::Error, seen: bool) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Absent(error),
            io::ErrorKind::NotFound if seen => Self::Absent(error),
            io::ErrorKind::NotFound => Self::NeverSeen(error),
            io::ErrorKind::WouldBlock => Self::Taken(error),
            _ => Self::Unusable(error),
        }
    }

    /// Reports whether this proves that the socket exists or has existed.
    fn shows_socket(&self) -> bool {
        !matches!(self, Self::NeverSeen(_) | Self::Unusable(_))
    }

    /// Returns the state of the connection that results.
    fn standing(&self) -> Standing {
        match self {
            Self::Absent(_) | Self::NeverSeen(_) | Self::Ended => Standing::Absent,
            error => Standing::Silent(text::chain(error)),
        }
    }

    /// Returns the power state that follows.
    fn power(&self) -> PowerState {
        match self {
            Self::Absent(_) | Self::Ended => PowerState::Off,
            _ => PowerState::Unspecified,
        }
    }
}

/// Watches the VM `name` through the socket at `path` until the receiver of changes is dropped; runs the
/// commands from `inbox`.
pub async fn run(name: String, path: PathBuf, changes: mpsc::Sender<Change>, mut inbox: Inbox) {
    let mut teller =
        Teller { name, changes, told: (PowerState::Unspecified, String::new()), is_suspended: false };
    let mut wait = FIRST_WAIT;
    let mut seen = false;
    let mut problem = Problem::default();
    loop {
        let Err(error) = watch(&path, seen, &mut problem, &mut teller, &mut inbox).await;
        inbox.disconnected(error.standing());
        if matches!(error, Error::Unwanted) {
            return;
        }
        seen |= error.shows_socket();
        if matches!(error, Error::Ended) {
            wait = FIRST_WAIT;
        }
        let told = if error.power() == PowerState::Off {
            if teller.told.0 != PowerState::Off {
                tracing::debug!(vm = teller.name, "{error}");
            }
            problem = Problem::default();
            teller.power(PowerState::Off).await
        } else {
            problem.log(&teller.name, &path, &error);
            teller.problem(format!("{}: {}", path.display(), text::chain(&error))).await
        };
        if told.is_err() {
            return;
        }
        let unreachable = match error.power() {
            PowerState::Off => format!("the VM is off: {}", text::chain(&error)),
            _ => format!("{}: {}", path.display(), text::chain(&error)),
        };
        inbox.refuse_for(wait.mul_f64(0.5 + fastrand::f64() / 2.0), &unreachable).await;
        wait = (wait * 2).min(LAST_WAIT);
    }
}

/// Kind of the last problem that was logged; `None` while there is none.
#[derive(Debug, Default)]
struct Problem(Option<std::mem::Discriminant<Error>>);

impl Problem {
    /// Reports whether the problem differs in kind from the last one that was logged.
    fn is_new(&mut self, error: &Error) -> bool {
        let kind = std::mem::discriminant(error);
        self.0.replace(kind) != Some(kind)
    }

    fn log(&mut self, vm: &str, path: &Path, error: &Error) {
        if self.is_new(error) {
            let error: &dyn std::error::Error = error;
            tracing::warn!(vm, path = %path.display(), error, "QEMU does not report whether the VM is running");
        }
    }
}

/// Sends changes, and suppresses repetitions.
struct Teller {
    name: String,
    changes: mpsc::Sender<Change>,
    told: (PowerState, String),
    /// True if the guest's suspension to memory has been reported, and no other state since.
    is_suspended: bool,
}

impl Teller {
    /// Reports the power state that QEMU has shown.
    async fn power(&mut self, power: PowerState) -> Result<(), Error> {
        self.view(power, String::new()).await
    }

    /// Reports that QEMU does not show the power state, with the reason.
    async fn problem(&mut self, problem: String) -> Result<(), Error> {
        self.view(PowerState::Unspecified, problem).await
    }

    async fn view(&mut self, power: PowerState, problem: String) -> Result<(), Error> {
        let view = (power, problem);
        if view == self.told {
            return Ok(());
        }
        self.is_suspended &= view.0 == PowerState::Paused;
        self.told.clone_from(&view);
        let (power, problem) = view;
        self.send(Change::Power { name: self.name.clone(), power, problem }).await
    }

    async fn event(&mut self, name: &str) -> Result<(), Error> {
        match of_event(self.told.0, name) {
            Meaning::Power(power) => self.power(power).await,
            Meaning::Suspended => self.suspended().await,
            Meaning::SuspendedToDisk => {
                self.send(Change::Suspended { name: self.name.clone(), to_disk: true }).await
            }
            Meaning::Reset => self.send(Change::Reset { name: self.name.clone() }).await,
            Meaning::Nothing => Ok(()),
        }
    }

    /// Reports that the guest has suspended itself to memory.
    async fn suspended(&mut self) -> Result<(), Error> {
        self.power(PowerState::Paused).await?;
        if std::mem::replace(&mut self.is_suspended, true) {
            return Ok(());
        }
        self.send(Change::Suspended { name: self.name.clone(), to_disk: false }).await
    }

    async fn send(&self, change: Change) -> Result<(), Error> {
        self.changes.send(change).await.map_err(|_| Error::Unwanted)
    }
}

async fn watch(
    path: &Path,
    seen: bool,
    problem: &mut Problem,
    teller: &mut Teller,
    inbox: &mut Inbox,
) -> Result<std::convert::Infallible, Error> {
    #[derive(Deserialize)]
    struct Status {
        status: String,
    }
    let stream = UnixStream::connect(path).await.map_err(|error| Error::of_connect(error, seen))?;
    let credentials = stream.peer_cred().ok();
    // Get the handle before QEMU sends anything, so that it refers to the process that does.
    let process = credentials.and_then(|user| user.pid()).and_then(|number| Process::of(number).ok());
    let mut socket = Socket { stream, lines: Lines::default() };
    let greeting = async {
        while socket.message().await? != Message::Greeting {}
        Ok(())
    };
    soon(greeting).await?;
    soon(socket.execute("qmp_capabilities", 1, teller)).await?;
    let status = soon(socket.execute("query-status", 2, teller)).await?;
    let status: Status = serde_json::from_value(status).map_err(Error::Status)?;
    teller.power(of_status(&status.status)).await?;
    if is_suspended(&status.status) {
        teller.suspended().await?;
    }
    *problem = Problem::default();
    // Dropping this drops the senders of unanswered calls, which lets the callers know that the connection is
    // lost.
    let mut pending = Pending::default();
    inbox.connected(credentials, process);
    loop {
        tokio::select! {
            message = socket.message() => match message {
                Ok(Message::Event { name, data }) => {
                    inbox.tell(Notice::of_event(&name, &data));
                    teller.event(&name).await?;
                }
                Ok(message) => pending.answer(message),
                Err(Error::Closed) => return Err(Error::Ended),
                Err(error) => return Err(error),
            },
            Some(call) = inbox.next() => {
                let line = pending.add(call);
                soon(async { socket.stream.write_all(&line).await.map_err(Error::Broken) }).await?;
            }
        }
    }
}

async fn soon<T>(answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(ANSWER_DEADLINE, answer).await.unwrap_or(Err(Error::Silent))
}

struct Socket {
    stream: UnixStream,
    lines: Lines,
}

impl Socket {
    async fn message(&mut self) -> Result<Message, Error> {
        loop {
            if let Some(line) = self.lines.next_line()? {
                return Ok(Message::parse(&line)?);
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer).await {
                Ok(0) => return Err(Error::Closed),
                Err(error) => return Err(Error::Broken(error)),
                Ok(length) => self.lines.push(&buffer[..length]),
            }
        }
    }

    /// Runs a command, and reports the events that arrive before its answer.
    async fn execute(
        &mut self,
        name: &str,
        id: u64,
        teller: &mut Teller,
    ) -> Result<serde_json::Value, Error> {
        self.stream
            .write_all(&qmp::command(name, &serde_json::Value::Null, id))
            .await
            .map_err(Error::Broken)?;
        loop {
            match self.message().await? {
                Message::Return { id: Some(found), value } if found == id => return Ok(value),
                Message::Error { class, description, .. } => {
                    return Err(Error::Refused { class, description });
                }
                Message::Event { name, .. } => teller.event(&name).await?,
                Message::Return { .. } | Message::Greeting => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::net::UnixListener;

    use super::super::super::super::half::Half;
    use super::super::link;
    use crate::supervise::Scope;
    use std::sync::Arc;

    const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";

    /// Accepts one client like QEMU, up to its `query-status`, which is answered with `status`.
    async fn qemu(listener: &UnixListener, status: &str) -> BufReader<UnixStream> {
        let mut client = BufReader::new(listener.accept().await.unwrap().0);
        client.get_mut().write_all(GREETING).await.unwrap();
        for answer in ["{}".to_owned(), format!("{{\"status\": \"{status}\"}}")] {
            let mut line = String::new();
            client.read_line(&mut line).await.unwrap();
            let command: serde_json::Value = serde_json::from_str(&line).unwrap();
            let answer = format!("{{\"return\": {answer}, \"id\": {}}}\r\n", command["id"]);
            client.get_mut().write_all(answer.as_bytes()).await.unwrap();
        }
        client
    }

    async fn say(client: &mut BufReader<UnixStream>, event: &str) {
        let line = format!("{{\"event\": \"{event}\", \"timestamp\": {{\"seconds\": 1}}}}\r\n");
        client.get_mut().write_all(line.as_bytes()).await.unwrap();
    }

    fn power(power: PowerState) -> Change {
        Change::Power { name: "a".into(), power, problem: String::new() }
    }

    /// Returns the next change, which must be a problem.
    async fn problem(told: &mut mpsc::Receiver<Change>) -> String {
        match told.recv().await.unwrap() {
            Change::Power { power: PowerState::Unspecified, problem, .. } if !problem.is_empty() => problem,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn changes_are_told_once_and_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let (changes, mut told) = mpsc::channel(16);
        let scope = Scope::new();
        let listener = UnixListener::bind(&path).unwrap();
        scope.children().spawn(run(
            "a".into(),
            path.clone(),
            changes,
            link::new(Arc::new(Half::new("host".into()))).1,
        ));
        let mut client = qemu(&listener, "running").await;
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Running));
        let events =
            "POWERDOWN RESUME STOP STOP RESUME RESET RESET STOP SUSPEND SUSPEND WAKEUP SUSPEND_DISK SHUTDOWN";
        for event in events.split(' ') {
            say(&mut client, event).await;
        }
        let suspended = |to_disk| Change::Suspended { name: "a".into(), to_disk };
        let expected = [
            power(PowerState::Paused),
            power(PowerState::Running),
            Change::Reset { name: "a".into() },
            Change::Reset { name: "a".into() },
            power(PowerState::Paused),
            suspended(false),
            power(PowerState::Running),
            suspended(true),
            power(PowerState::Off),
        ];
        for change in expected {
            assert_eq!(told.recv().await.unwrap(), change);
        }
        drop(client);

        let mut client = qemu(&listener, "paused").await;
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Paused), "another QEMU");
        client.get_mut().write_all(b"garbage\n").await.unwrap();
        let words = problem(&mut told).await;
        assert!(words.starts_with(path.to_str().unwrap()) && words.contains("not a QMP message"), "{words}");
        let client = qemu(&listener, "suspended").await;
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Paused));
        assert_eq!(told.recv().await.unwrap(), suspended(false), "it was so before anybody looked");
        drop(client);
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Off));
        drop(qemu(&listener, "running").await);
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Running));
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Off), "end of file");
    }

    #[test]
    fn only_a_socket_that_qemu_has_left_means_off() {
        use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied, WouldBlock};
        let cases = [
            (ConnectionRefused, false, PowerState::Off),
            (NotFound, true, PowerState::Off),
            (NotFound, false, PowerState::Unspecified),
            (WouldBlock, true, PowerState::Unspecified),
            (PermissionDenied, true, PowerState::Unspecified),
        ];
        for (kind, seen, expected) in cases {
            let error = Error::of_connect(kind.into(), seen);
            assert_eq!(error.power(), expected, "{kind:?}, seen before: {seen}");
        }
    }

    #[test]
    fn a_problem_is_new_once() {
        let never = || Error::NeverSeen(io::ErrorKind::NotFound.into());
        let mut problem = Problem::default();
        assert!(problem.is_new(&never()));
        assert!(!problem.is_new(&never()));
        assert!(problem.is_new(&Error::Silent));
    }

    #[tokio::test]
    async fn a_socket_that_others_hold_says_nothing_of_the_vm() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let (changes, mut told) = mpsc::channel(16);
        let scope = Scope::new();
        scope.children().spawn(run(
            "a".into(),
            path.clone(),
            changes,
            link::new(Arc::new(Half::new("host".into()))).1,
        ));
        let quiet = Duration::from_millis(300);
        assert!(problem(&mut told).await.contains("has not appeared yet"));
        assert!(tokio::time::timeout(quiet, told.recv()).await.is_err(), "it is told once");

        // A backlog of 0 admits one client; the next one finds it full (EAGAIN).
        let listener = crowded(&path);
        let other = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(problem(&mut told).await.contains("the QMP socket is busy"));
        drop((listener, other));
        assert_eq!(told.recv().await.unwrap(), power(PowerState::Off), "nobody serves it");
        std::fs::remove_file(&path).unwrap();
        assert!(tokio::time::timeout(quiet, told.recv()).await.is_err(), "off as before");
    }

    fn crowded(path: &Path) -> std::os::fd::OwnedFd {
        use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
        use std::os::fd::AsRawFd as _;
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        listen(&socket, Backlog::new(0).unwrap()).unwrap();
        socket
    }
}
