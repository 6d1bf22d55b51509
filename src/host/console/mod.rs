//! Serial consoles of VMs: `guestlet.v1.Console` of the admin API. The hypervisor serves them and no agent is
//! involved, so they work while a guest boots or hangs.
//!
//! ```text
//! guestctl ◀─stream─▶ api, admitted ─▶ Desk: a seat for each VM ─▶ backend connects ─▶ relay ◀─▶ the hypervisor's console
//!                                        │ taken: ABORTED            (one task)   └ ring of 256 KiB
//!                                        └ by force: the other relay lets go first
//! ```
//!
//! A console has one client at a time, because hypervisors accept only one: the desk records who that is. `relay`
//! owns the connection.
//!
//! The output of the guest is always read. If the client does not keep up, the oldest bytes are dropped and the
//! client gets their number. A console that nobody reads must not stop a guest: its kernel blocks in the middle of
//! a message until the port accepts the rest.

mod relay;
mod ring;
mod seat;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::admission::Call;
use super::asked::{Asked, Object};
use super::audit::What;
use super::backends::consoles::{ConsoleError, Consoles};
use super::fleet::{Handle, Identity};
use super::half::Half;
use super::text;
use crate::access::verb::{self, Verb};
use crate::supervise::Scope;
use crate::transport::opening::first;
use crate::wire::proto::v1::to_console::Message;
use crate::wire::proto::v1::{ConsoleRequest, FromConsole, ToConsole};
use relay::Relay;
use seat::{Refusal, Seats};

/// Bytes of one message of a client.
pub const MAX_REQUEST: usize = 64 << 10;
/// Timeout for opening a console, which takes several requests to the hypervisor.
const OPENING: Duration = Duration::from_secs(30);
/// Number of messages that are queued for a client.
const QUEUE: usize = 4;

/// Stream of messages to the client of a console.
pub type Answers = ReceiverStream<Result<FromConsole, Status>>;

/// Desk that opens consoles, each for one client; clones share it. When the last is dropped, all consoles are
/// closed.
#[derive(Debug, Clone)]
pub struct Desk(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    consoles: Arc<dyn Consoles>,
    half: Arc<Half>,
    seats: Seats,
    scope: Scope,
}

/// First message of a client, which opens a console.
pub struct Opening(ConsoleRequest);

impl Asked for Opening {
    fn verb(&self) -> &'static Verb {
        &verb::CONSOLE
    }

    fn object(&self) -> Object<'_> {
        Object::Machine(&self.0.name)
    }

    fn subject(&self) -> String {
        if self.0.force { "open (by force)" } else { "open" }.to_owned()
    }
}

/// Receives the first message of a client.
///
/// # Errors
/// If it is not `open`, or does not arrive in time.
pub async fn opening(messages: &mut Streaming<ToConsole>) -> Result<Opening, Status> {
    let first = first(messages).await?;
    match first.and_then(|first| first.message) {
        Some(Message::Open(request)) => Ok(Opening(request)),
        _ => Err(Status::invalid_argument("the first message must be open")),
    }
}

impl Desk {
    /// Creates the desk for the consoles of a backend; `half` has the audit log.
    pub fn new(consoles: Arc<dyn Consoles>, half: Arc<Half>) -> Self {
        Self(Arc::new(Inner { consoles, half, seats: Seats::default(), scope: Scope::new() }))
    }

    /// Opens the console for an admitted client.
    ///
    /// # Errors
    /// If another client has it, or it cannot be opened. The failure is already recorded then.
    pub async fn open(
        &self,
        fleet: &Handle,
        call: Call,
        Opening(request): Opening,
        messages: Streaming<ToConsole>,
    ) -> Result<Answers, Status> {
        let ConsoleRequest { name, force } = request;
        let Call { behalf, sight, entry } = call;
        let opened = async {
            let known = fleet.find(Identity::Name(name.clone())).await?;
            let cluster = known.map(|known| known.vm.cluster.clone()).unwrap_or_default();
            let taken = self.0.seats.take(&name, behalf.caller(), force, SystemTime::now()).await?;
            let opening = tokio::time::timeout(OPENING, self.0.consoles.open(&name)).await;
            let late = || ConsoleError::Unreachable("the hypervisor does not answer in time".to_owned());
            Ok((cluster, taken, opening.unwrap_or_else(|_| Err(late()))?))
        };
        let opened: Result<_, Status> = opened.await;
        if let Some(entry) = entry {
            entry.end(opened.as_ref().err().map_or(Code::Ok, Status::code));
        }
        let (cluster, taken, console) = opened?;
        let subject = "closed".to_owned();
        let entry =
            self.0.half.audit.begin(&behalf, What { verb: &verb::CONSOLE, vm: name.clone(), subject });
        let (answers, queue) = mpsc::channel(QUEUE);
        let lost_sight = Box::pin(async move { sight.lost(&name, &cluster).await });
        let relay = Relay { console, messages, answers, entry, lost_sight };
        self.0.scope.children().spawn(relay.run(taken));
        Ok(ReceiverStream::new(queue))
    }
}

impl From<ConsoleError> for Status {
    fn from(error: ConsoleError) -> Self {
        let code = match &error {
            ConsoleError::UnknownVm => Code::NotFound,
            ConsoleError::None(_) | ConsoleError::Foreign(_) => Code::FailedPrecondition,
            ConsoleError::Unreachable(_) => Code::Unavailable,
            ConsoleError::Taken(_) => Code::Aborted,
            ConsoleError::Strange(_) => Code::Internal,
            ConsoleError::Elsewhere(_) => Code::Unimplemented,
        };
        Self::new(code, text::clean_words(&error.to_string()))
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::InUse { .. } => Code::Aborted,
            Refusal::OfRoot { .. } => Code::PermissionDenied,
            Refusal::TooMany(_) => Code::ResourceExhausted,
            Refusal::Kept => Code::Unavailable,
        };
        Self::new(code, text::clean_words(&refusal.to_string()))
    }
}
