//! Shared access to the single connection to a VM's QMP socket, which is owned by its
//! [`monitor`](super::monitor).
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

/// Maximum number of commands that wait for the connection.
const INBOX: usize = 64;
/// Capacity of the channel of notices; a receiver that misses some reads the state again.
const NOTICES: usize = 256;
/// Timeout of a command. The longest one is a resize, which may have to write.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// Timeout of a query, which changes nothing.
const QUESTION_DEADLINE: Duration = Duration::from_secs(10);
/// Identifier of the first command; lower ones are used by the monitor itself.
const FIRST_ID: u64 = 1000;

/// Reason why a command has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No connection to QEMU; the text is the reason.
    #[error("QEMU cannot be asked: {0}")]
    Unreachable(String),
    /// The connection ended meanwhile. It is unknown whether the command was carried out.
    #[error("the connection to QEMU ended meanwhile; repeat the command")]
    Lost,
    /// QEMU did not answer in time. It is unknown whether the command was carried out.
    #[error("QEMU has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// QEMU refused the command.
    #[error("QEMU refused: {description}")]
    Refused {
        /// Class of the error, such as `DeviceNotFound`.
        class: String,
        /// Description of the error.
        description: String,
    },
}

/// Event on a connection to QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Commands can be run from now on. Earlier events may have been missed.
    Connected,
    /// The connection has ended; commands fail from now on.
    Disconnected,
    /// The device with this identifier has been removed.
    DeviceDeleted(String),
    /// The guest has refused to release the device with this identifier.
    UnplugRefused(String),
    /// A disk request has failed.
    Failed(Failed),
    /// The VM continues, or a new guest starts in it: requests that failed are retried or obsolete.
    BeginsAnew,
}

impl Notice {
    /// Converts the events that hot-plugging is concerned with; `None` for all others.
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

/// State of the connection to QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// No connection has been attempted yet.
    Untried,
    /// QEMU answers.
    Connected,
    /// No process listens at the socket, or the socket does not exist.
    Absent,
    /// A process listens but does not answer; the text is the reason.
    Silent(String),
}

/// User and group that files for QEMU should belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User ID of the QEMU process.
    pub uid: u32,
    /// Group ID of the QEMU process.
    pub gid: u32,
}

/// Command that was sent to the monitor.
#[derive(Debug)]
pub struct Call {
    command: &'static str,
    arguments: Value,
    answer: oneshot::Sender<Result<Value, CallError>>,
}

/// Runs commands on behalf of all parts other than the monitor.
#[derive(Debug, Clone)]
pub struct Link {
    calls: mpsc::Sender<Call>,
    notices: broadcast::Sender<Notice>,
    peer: watch::Receiver<Option<UCred>>,
    standing: watch::Receiver<Standing>,
    process: watch::Receiver<Option<Arc<Process>>>,
    half: Arc<Half>,
    /// Timeout of a query.
    patience: Duration,
}

/// End of the link that the monitor serves.
#[derive(Debug)]
pub struct Inbox {
    calls: mpsc::Receiver<Call>,
    notices: broadcast::Sender<Notice>,
    peer: watch::Sender<Option<UCred>>,
    standing: watch::Sender<Standing>,
    process: watch::Sender<Option<Arc<Process>>>,
}

/// Creates both ends; commands are counted in the metrics of `half`.
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
    /// Returns a link with this timeout for queries.
    #[must_use]
    pub fn within(&self, patience: Duration) -> Self {
        Self { patience: patience.min(QUESTION_DEADLINE), ..self.clone() }
    }

    /// Runs a command; `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// If the command has no result.
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

    /// Subscribes to the events from now on. The channel closes when the monitor ends.
    pub fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }

    /// Returns the user and group that QEMU runs as; `None` before the first connection.
    pub fn owner(&self) -> Option<Owner> {
        self.peer().map(|peer| Owner { uid: peer.uid(), gid: peer.gid() })
    }

    /// Returns the credentials of the QEMU process, as the kernel reports them for the QMP socket; `None` before
    /// the first connection.
    pub fn peer(&self) -> Option<UCred> {
        *self.peer.borrow()
    }

    /// Returns the QEMU process; `None` if no handle to it can be obtained.
    pub fn process(&self) -> Option<Arc<Process>> {
        self.process.borrow().clone()
    }

    /// Completes when this link will never send another command: the VM is in no list, or has another QMP socket.
    pub async fn ended(&self) {
        self.calls.closed().await;
    }

    /// Returns the state of the connection, after the first attempt to connect.
    pub async fn standing(&self) -> Standing {
        let mut standing = self.standing.clone();
        let tried = standing.wait_for(|standing| *standing != Standing::Untried).await;
        tried.map_or(Standing::Untried, |standing| standing.clone())
    }

    /// Reports whether the process that answered last has certainly ended.
    pub fn has_ended(&self) -> bool {
        self.process.borrow().as_ref().is_some_and(|process| process.has_ended().unwrap_or(false))
    }
}

impl Inbox {
    /// Returns the next command whose caller still waits; `None` when all links have been dropped.
    pub async fn next(&mut self) -> Option<Call> {
        loop {
            let call = self.calls.recv().await?;
            if !call.answer.is_closed() {
                return Some(call);
            }
        }
    }

    /// Records a connection to a QEMU with these `credentials`, and the handle to its `process` if one could be
    /// obtained.
    pub fn connected(&self, credentials: Option<UCred>, process: Option<Process>) {
        self.peer.send_replace(credentials);
        self.process.send_replace(process.map(Arc::new));
        self.standing.send_replace(Standing::Connected);
        self.tell(Some(Notice::Connected));
    }

    /// Records that there is no connection, with the reason.
    pub fn disconnected(&self, standing: Standing) {
        self.standing.send_replace(standing);
        self.tell(Some(Notice::Disconnected));
    }

    /// Sends a notice, if there is one.
    pub fn tell(&self, notice: Option<Notice>) {
        if let Some(notice) = notice {
            // Sending fails if there are no subscribers, which is fine.
            let _ = self.notices.send(notice);
        }
    }

    /// Waits, and meanwhile refuses all commands with this text.
    pub async fn refuse_for(&mut self, span: Duration, words: &str) {
        let mut pause = std::pin::pin!(tokio::time::sleep(span));
        loop {
            tokio::select! {
                () = &mut pause => return,
                Some(call) = self.calls.recv() => {
                    // The caller may no longer be waiting.
                    let _ = call.answer.send(Err(CallError::Unreachable(words.to_owned())));
                }
            }
        }
    }
}

/// Commands that QEMU has not answered yet.
#[derive(Debug, Default)]
pub struct Pending {
    calls: u64,
    waiting: BTreeMap<u64, oneshot::Sender<Result<Value, CallError>>>,
}

impl Pending {
    /// Registers a command, and returns the line to send.
    pub fn add(&mut self, call: Call) -> Vec<u8> {
        let id = FIRST_ID + self.calls;
        self.calls += 1;
        self.waiting.retain(|_, waiting| !waiting.is_closed());
        self.waiting.insert(id, call.answer);
        qmp::command(call.command, &call.arguments, id)
    }

    /// Passes an answer to its caller; ignores other messages.
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
