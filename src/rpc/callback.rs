//! Calls of this guest to its host half. The host half opens a stream for them
//! ([`crate::transport::callback`]), on which the guest calls `guestlet.v1.Host` and other services.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Request, Status, Streaming};

use crate::rpc::holder::Holder;
use crate::transport::callback::{self, Caller, Opened};
use crate::transport::http2::ORIGIN;
use crate::trust::Peer;
use crate::wire::proto::v1::host_client::HostClient;
use crate::wire::proto::v1::{CallbackFromHost, HostHalf, PingRequest, WhoAmIRequest, WhoAmIResponse};

/// Timeout for the answer to `WhoAmI`.
const INTRODUCTION: Duration = Duration::from_secs(10);
/// Timeout for the answer to a ping.
const ANSWER: Duration = Duration::from_secs(2);
/// Time without changes before the host half is asked again.
const SETTLED: Duration = Duration::from_secs(1);
/// Time after which the host half is asked again although nothing has changed in the guest.
const AT_LATEST: Duration = Duration::from_secs(300);
/// Bytes of one answer; those so far are all small.
const MAX_ANSWER: usize = 64 * 1024;

static OPENED: AtomicU64 = AtomicU64::new(0);

/// Open callback of a host half.
#[derive(Debug, Clone)]
pub struct Callback {
    number: u64,
    caller: Caller,
    identity: WhoAmIResponse,
}

impl Callback {
    /// Returns the number of the callback, unique during this run of the agent.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// For calls of other services.
    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Returns the identity that the host half has assigned to this guest.
    pub fn identity(&self) -> WhoAmIResponse {
        self.identity.clone()
    }

    /// Returns whether the host half answers a ping.
    pub async fn answers(&self) -> bool {
        let mut client = host(self.caller.clone());
        let ping = client.ping(Request::new(PingRequest::default()));
        matches!(tokio::time::timeout(ANSWER, ping).await, Ok(Ok(_)))
    }
}

fn host(caller: Caller) -> HostClient<Caller> {
    HostClient::with_origin(caller, http::Uri::from_static(ORIGIN)).max_decoding_message_size(MAX_ANSWER)
}

/// Interfaces to the agent that the callback needs; clones share them.
#[derive(Clone)]
pub struct Surroundings {
    /// Changes after which the host half may say something else of this guest.
    pub changes: watch::Receiver<u64>,
    /// Function that receives the host half's answer, at first and whenever it has changed.
    pub known: Arc<dyn Fn(&WhoAmIResponse) + Send + Sync>,
}

impl std::fmt::Debug for Surroundings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Surroundings").finish_non_exhaustive()
    }
}

/// Asks the host half for the identity of this guest.
async fn introduction(mut client: HostClient<Caller>) -> Result<WhoAmIResponse, Status> {
    let answer = tokio::time::timeout(INTRODUCTION, client.who_am_i(Request::new(WhoAmIRequest {}))).await;
    answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("too late"))).map(tonic::Response::into_inner)
}

/// Opens the callback of the host half that sends `answers`.
///
/// # Errors
/// `FAILED_PRECONDITION` if that does not hold this guest, `INVALID_ARGUMENT` or `DEADLINE_EXCEEDED` if it does not begin as it
/// should.
pub async fn open(
    answers: Streaming<CallbackFromHost>,
    holder: &Holder,
    peer: Arc<Peer>,
    surroundings: Surroundings,
) -> Result<Opened, Status> {
    let (bounds, answers) = callback::begin(answers).await?;
    let half = holder.held_by(&bounds.host_instance_id, &peer).ok_or_else(stranger)?;
    let (caller, calls) = callback::open(&bounds, answers);
    Ok(Opened::new(calls, ask(caller, half, peer, holder.clone(), surroundings)))
}

fn stranger() -> Status {
    Status::failed_precondition("only the host half that holds this guest receives calls")
}

/// Introduces this guest and keeps what the host half says of it, for as long as that holds it; returns why it ended.
async fn ask(
    caller: Caller,
    half: HostHalf,
    peer: Arc<Peer>,
    holder: Holder,
    surroundings: Surroundings,
) -> Status {
    let Surroundings { mut changes, known } = surroundings;
    let client = host(caller.clone());
    let mut told = match introduction(client.clone()).await {
        Ok(identity) => identity,
        Err(status) => return Status::aborted(format!("no answer to WhoAmI: {}", status.message())),
    };
    let number = OPENED.fetch_add(1, Ordering::Relaxed);
    let Some(over) = holder.attach(&half, &peer, Callback { number, caller, identity: told.clone() }) else {
        return stranger();
    };
    let _attached = Attached { holder, number };
    known(&told);
    let again = async {
        // If the sender is dropped, the agent is ending. Changes that happen on the host only are noticed with a
        // delay.
        while !matches!(tokio::time::timeout(AT_LATEST, changes.changed()).await, Ok(Err(_))) {
            // Changes come in many steps.
            tokio::time::sleep(SETTLED).await;
            changes.mark_unchanged();
            match introduction(client.clone()).await {
                Ok(now) if now.vm_uid == told.vm_uid && now != told => {
                    known(&now);
                    told = now;
                }
                _ => {}
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = over => Status::aborted("this callback was replaced by another one, or the hold has ended"),
        () = again => Status::aborted("the agent is stopping"),
    }
}

/// The holder has the callback until this is dropped.
struct Attached {
    holder: Holder,
    number: u64,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.holder.detach(self.number);
    }
}
