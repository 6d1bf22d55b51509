//! The way of others through the one connection to a VM's QMP socket, which its [`monitor`](super::monitor) owns.
//!
//! ```text
//!  hotplug ──Link::call──▶ Inbox ──▶ monitor ──▶ QEMU
//!      ▲ ▲                             │ │
//!      │ └────── answer ◀── Pending ◀──┘ │
//!      └──────── Notice ◀────────────────┘
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::net::unix::UCred;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::super::super::half::Half;
use super::super::super::metrics::operations::Outcome;
use super::failed::Failed;
use crate::sys::process_end::Process;
use crate::wire::qmp::{self, Message};

/// Commands that wait for the connection.
const INBOX: usize = 64;
/// Notices that somebody may be behind; who loses some looks anew.
const NOTICES: usize = 256;
/// How long a command may take. The longest is a resize, which may have to write.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// How long a question may take, which changes nothing.
const QUESTION_DEADLINE: Duration = Duration::from_secs(10);
/// The first number of a command; lower ones are the monitor's own.
const FIRST_ID: u64 = 1000;

/// Why a command brought no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no connection; the words say why.
    #[error("QEMU cannot be asked: {0}")]
    Unreachable(String),
    /// The connection ended meanwhile. Whether the command was carried out is unknown.
    #[error("the connection to QEMU ended meanwhile; repeat the command")]
    Lost,
    /// QEMU took too long. Whether the command was carried out is unknown.
    #[error("QEMU has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// QEMU did not do it.
    #[error("QEMU refused: {description}")]
    Refused {
        /// Such as `DeviceNotFound`.
        class: String,
        /// In words.
        description: String,
    },
}

/// What happened on a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Commands are run from now on. Events before this may have been missed.
    Connected,
    /// Commands are not run any more.
    Disconnected,
    /// A device with this identifier is gone.
    DeviceDeleted(String),
    /// The guest refused to let go of the device with this identifier.
    UnplugRefused(String),
    /// A disk could not be read or written.
    Failed(Failed),
    /// The VM runs again, or another guest begins in it: what has failed is tried again, or forgotten.
    BeginsAnew,
}

impl Notice {
    /// What an event means to those who plug and unplug; nothing for most.
    pub fn of_event(name: &str, data: &Value) -> Option<Self> {
        let device = || data["device"].as_str().map(str::to_owned);
        match name {
            "DEVICE_DELETED" => device().map(Self::DeviceDeleted),
            "DEVICE_UNPLUG_GUEST_ERROR" => device().map(Self::UnplugRefused),
            "BLOCK_IO_ERROR" => Failed::of_event(data).map(Self::Failed),
            "RESUME" | "RESET" | "SHUTDOWN" => Some(Self::BeginsAnew),
            _ => None,
        }
    }
}

/// Whether QEMU can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has tried yet.
    Untried,
    /// It answers.
    Connected,
    /// Nobody listens at its socket, or there is none.
    Absent,
    /// Somebody is there, and does not answer; in words.
    Silent(String),
}

/// The owner that files for QEMU should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A command on its way.
#[derive(Debug)]
pub struct Call {
    command: &'static str,
    arguments: Value,
    answer: oneshot::Sender<Result<Value, CallError>>,
}

/// Runs commands, for everybody but the monitor.
#[derive(Debug, Clone)]
pub struct Link {
    calls: mpsc::Sender<Call>,
    notices: broadcast::Sender<Notice>,
    peer: watch::Receiver<Option<UCred>>,
    standing: watch::Receiver<Standing>,
    process: watch::Receiver<Option<Arc<Process>>>,
    half: Arc<Half>,
    /// How long a question may take.
    patience: Duration,
}

/// The monitor's end.
#[derive(Debug)]
pub struct Inbox {
    calls: mpsc::Receiver<Call>,
    notices: broadcast::Sender<Notice>,
    peer: watch::Sender<Option<UCred>>,
    standing: watch::Sender<Standing>,
    process: watch::Sender<Option<Arc<Process>>>,
}

/// Both ends; what is asked is counted by `half`.
pub fn new(half: Arc<Half>) -> (Link, Inbox) {
    let (sender, calls) = mpsc::channel(INBOX);
    let notices = broadcast::Sender::new(NOTICES);
    let (peer, followed) = watch::channel(None);
    let (standing, seen) = watch::channel(Standing::Untried);
    let (process, known) = watch::channel(None);
    (
        Link {
            calls: sender,
            notices: notices.clone(),
            peer: followed,
            standing: seen,
            process: known,
            half,
            patience: QUESTION_DEADLINE,
        },
        Inbox { calls, notices, peer, standing, process },
    )
}

impl Link {
    /// The same way, for questions that may take so long, and no longer.
    #[must_use]
    pub fn within(&self, patience: Duration) -> Self {
        Self { patience: patience.min(QUESTION_DEADLINE), ..self.clone() }
    }

    /// Runs a command; `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// If it brought no result.
    pub async fn call(&self, command: &'static str, arguments: Value) -> Result<Value, CallError> {
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.calls.send(Call { command, arguments, answer }).await.map_err(|_| CallError::Lost)?;
            answered.await.map_err(|_| CallError::Lost)?
        };
        let is_question = command.starts_with("query-") || matches!(command, "qom-list" | "qom-get");
        let deadline = if is_question { self.patience } else { ANSWER_DEADLINE };
        let begun = Instant::now();
        let answer = tokio::time::timeout(deadline, asked).await.unwrap_or(Err(CallError::Silent(deadline)));
        let outcome = match &answer {
            Ok(_) => Outcome::Done,
            Err(CallError::Refused { .. }) => Outcome::Refused,
            Err(CallError::Silent(_)) => Outcome::Silent,
            Err(CallError::Unreachable(_) | CallError::Lost) => Outcome::Unreachable,
        };
        self.half.metrics.hypervisors.ended(outcome, begun.elapsed());
        answer
    }

    /// What happens from now on. It says nothing any more when the monitor has ended.
    pub fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }

    /// Who runs QEMU; none before the first connection.
    pub fn owner(&self) -> Option<Owner> {
        self.peer().map(|peer| Owner { uid: peer.uid(), gid: peer.gid() })
    }

    /// The process that is QEMU, as the kernel knows the other end of the QMP socket; none before the first connection.
    pub fn peer(&self) -> Option<UCred> {
        *self.peer.borrow()
    }

    /// That process; none where it cannot be held.
    pub fn process(&self) -> Option<Arc<Process>> {
        self.process.borrow().clone()
    }

    /// Completes when nobody will be asked by this any more: the VM is in no list, or has another QMP socket.
    pub async fn ended(&self) {
        self.calls.closed().await;
    }

    /// Whether QEMU can be asked, as soon as that was tried.
    pub async fn standing(&self) -> Standing {
        let mut standing = self.standing.clone();
        let tried = standing.wait_for(|standing| *standing != Standing::Untried).await;
        tried.map_or(Standing::Untried, |standing| standing.clone())
    }

    /// Whether the process has ended for certain that answered the last time.
    pub fn has_ended(&self) -> bool {
        self.process.borrow().as_ref().is_some_and(|process| process.has_ended().unwrap_or(false))
    }
}

impl Inbox {
    /// The next command that somebody still waits for; none when nobody is left to give any.
    pub async fn next(&mut self) -> Option<Call> {
        loop {
            let call = self.calls.recv().await?;
            if !call.answer.is_closed() {
                return Some(call);
            }
        }
    }

    /// There is a connection, to a QEMU that runs as `credentials` say, in that `process`, if it can be known.
    pub fn connected(&self, credentials: Option<UCred>, process: Option<Process>) {
        self.peer.send_replace(credentials);
        self.process.send_replace(process.map(Arc::new));
        self.standing.send_replace(Standing::Connected);
        self.tell(Some(Notice::Connected));
    }

    /// There is no connection, and so it stands with QEMU.
    pub fn disconnected(&self, standing: Standing) {
        self.standing.send_replace(standing);
        self.tell(Some(Notice::Disconnected));
    }

    /// Tells what happened, if anything did.
    pub fn tell(&self, notice: Option<Notice>) {
        if let Some(notice) = notice {
            // Nobody has to listen.
            let _ = self.notices.send(notice);
        }
    }

    /// Waits, and refuses every command meanwhile with these words.
    pub async fn refuse_for(&mut self, span: Duration, words: &str) {
        let mut pause = std::pin::pin!(tokio::time::sleep(span));
        loop {
            tokio::select! {
                () = &mut pause => return,
                Some(call) = self.calls.recv() => {
                    // Who asked may have gone.
                    let _ = call.answer.send(Err(CallError::Unreachable(words.to_owned())));
                }
            }
        }
    }
}

/// The commands that QEMU has not answered yet.
#[derive(Debug, Default)]
pub struct Pending {
    calls: u64,
    waiting: BTreeMap<u64, oneshot::Sender<Result<Value, CallError>>>,
}

impl Pending {
    /// Takes a command, and gives the line to send.
    pub fn add(&mut self, call: Call) -> Vec<u8> {
        let id = FIRST_ID + self.calls;
        self.calls += 1;
        self.waiting.retain(|_, waiting| !waiting.is_closed());
        self.waiting.insert(id, call.answer);
        qmp::command(call.command, &call.arguments, id)
    }

    /// Hands an answer to who has asked; other messages are left alone.
    pub fn answer(&mut self, message: Message) {
        let (id, result) = match message {
            Message::Return { id: Some(id), value } => (id, Ok(value)),
            Message::Error { id: Some(id), class, description } => {
                (id, Err(CallError::Refused { class, description }))
            }
            _ => return,
        };
        if let Some(waiting) = self.waiting.remove(&id) {
            let _ = waiting.send(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn answers_find_who_has_asked_and_a_lost_connection_is_told() {
        let (link, mut inbox) = new(Arc::new(Half::new("host".into())));
        let mut pending = Pending::default();
        let serve = async {
            let first = inbox.next().await.unwrap();
            let sent = String::from_utf8(pending.add(first)).unwrap();
            assert!(sent.contains("\"execute\":\"one\"") && sent.contains("\"id\":1000"), "{sent}");
            pending.add(inbox.next().await.unwrap());
            pending.add(inbox.next().await.unwrap());
            let refusal =
                Message::Error { id: Some(1001), class: "GenericError".into(), description: "no".into() };
            pending.answer(refusal);
            pending.answer(Message::Return { id: Some(1000), value: json!(7) });
            pending.answer(Message::Return { id: Some(77), value: json!(8) });
            drop(pending);
            inbox.refuse_for(Duration::from_millis(50), "it is off").await;
        };
        let ask = async {
            tokio::join!(
                link.call("one", json!({})),
                link.call("two", Value::Null),
                link.call("three", Value::Null)
            )
        };
        let (answers, ()) = tokio::join!(ask, serve);
        let refused = CallError::Refused { class: "GenericError".into(), description: "no".into() };
        assert_eq!(answers, (Ok(json!(7)), Err(refused), Err(CallError::Lost)));
    }

    #[tokio::test]
    async fn without_a_connection_commands_are_refused() {
        let (link, mut inbox) = new(Arc::new(Half::new("host".into())));
        let refuse = inbox.refuse_for(Duration::from_secs(3600), "it is off");
        let answer = tokio::select! {
            () = refuse => unreachable!(),
            answer = link.call("any", Value::Null) => answer,
        };
        assert_eq!(answer, Err(CallError::Unreachable("it is off".into())));
        drop(inbox);
        assert_eq!(link.call("any", Value::Null).await, Err(CallError::Lost));
    }

    #[test]
    fn events_that_concern_plugging() {
        let device = json!({"device": "a", "path": "/machine/peripheral/a"});
        let deleted = Some(Notice::DeviceDeleted("a".into()));
        assert_eq!(Notice::of_event("DEVICE_DELETED", &device), deleted);
        assert_eq!(Notice::of_event("DEVICE_DELETED", &json!({"path": "/machine/x"})), None);
        assert_eq!(Notice::of_event("RESET", &json!({})), Some(Notice::BeginsAnew));
        assert_eq!(Notice::of_event("STOP", &json!({})), None);
    }
}
