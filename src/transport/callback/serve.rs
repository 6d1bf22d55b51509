//! The host half's end: a guest's messages become calls of a service, and its answers messages.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::FuturesUnordered;
use tokio_stream::Stream;
use tonic::Status;
use tonic::body::Body;

use super::unary::{request, response_message};
use crate::transport::http2;
use crate::wire::proto::v1::callback_from_guest::Message as FromGuest;
use crate::wire::proto::v1::callback_from_host::Message as FromHost;
use crate::wire::proto::v1::{
    CallbackAnswer, CallbackBounds, CallbackCall, CallbackFromGuest, CallbackFromHost,
};

/// Violation of the protocol by a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// More concurrent calls than the limit.
    #[error("more than {0} calls are under way")]
    Calls(u32),
    /// A call's number is not the one after the last.
    #[error("the call has the number {found}, expected {expected}")]
    Number {
        /// Number of the call.
        found: u64,
        /// Number that was expected.
        expected: u64,
    },
    /// More cancellations than calls.
    #[error("it cancels more calls than it makes")]
    Cancellations,
}

/// Reason why serving has ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The guest refused the callback, or the stream broke.
    #[error(transparent)]
    Status(#[from] Box<Status>),
    /// The guest does not keep to the rules.
    #[error(transparent)]
    Breach(#[from] Breach),
}

/// Number of a call, with its answer or status.
type Outcome = (u64, Result<Vec<u8>, Status>);

/// Serves `service` to a guest until it ends the callback. `open` sends it these messages, of which `bounds` are the first,
/// and returns its own. Dropping the future ends all calls.
///
/// # Errors
/// If the guest does not take it, breaks it, or breaks the rules.
pub fn serve<S, F, M>(
    bounds: CallbackBounds,
    service: S,
    open: impl FnOnce(Messages) -> F,
) -> impl Future<Output = Result<(), Ended>>
where
    S: http2::Service<Body>,
    F: Future<Output = Result<M, Status>>,
    M: Stream<Item = Result<CallbackFromGuest, Status>> + Unpin,
{
    let outgoing = Outgoing::default();
    let messages = Messages(Arc::clone(&outgoing.0));
    // Made here: a future has room for its arguments beside what it makes of them.
    let mut serving = Serving::new(bounds.open_calls, service, outgoing);
    serving.outgoing.send(FromHost::Bounds(bounds));
    async move {
        let mut calls = Box::pin(open(messages)).await.map_err(Box::new)?;
        loop {
            tokio::select! {
                biased;
                Some(outcome) = serving.running.next() => serving.ended(outcome),
                message = calls.next() => match message {
                    Some(message) => serving.take(message.map_err(Box::new)?)?,
                    None => return Ok(()),
                },
            }
        }
    }
}

/// Messages that the guest has not taken yet. A channel of tokio would reserve room for 32 messages, however
/// small its limit.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<CallbackFromHost>,
    reader: Option<Waker>,
    has_ended: bool,
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    // Ignores poisoning: no operation under the lock can leave the queue inconsistent.
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends messages to the guest; when it is dropped, they end.
#[derive(Debug, Default)]
struct Outgoing(Arc<Mutex<Queue>>);

impl Outgoing {
    fn send(&self, message: FromHost) {
        let mut queue = lock(&self.0);
        queue.messages.push_back(CallbackFromHost { message: Some(message) });
        queue.wake();
    }

    /// Answers that the guest has not taken yet.
    fn answers(&self) -> usize {
        let is_answer = |message: &&CallbackFromHost| matches!(message.message, Some(FromHost::Answer(_)));
        lock(&self.0).messages.iter().filter(is_answer).count()
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let mut queue = lock(&self.0);
        queue.has_ended = true;
        queue.wake();
    }
}

impl Queue {
    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// The host half's messages, as the call of `Callback` sends them.
#[derive(Debug)]
pub struct Messages(Arc<Mutex<Queue>>);

impl Stream for Messages {
    type Item = CallbackFromHost;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<CallbackFromHost>> {
        let mut queue = lock(&self.0);
        match queue.messages.pop_front() {
            None if queue.has_ended => Poll::Ready(None),
            None => {
                // An idle guest has no room for messages.
                queue.messages = VecDeque::new();
                queue.reader = Some(context.waker().clone());
                Poll::Pending
            }
            message => Poll::Ready(message),
        }
    }
}

/// The calls of one guest.
struct Serving<S> {
    service: S,
    most: u32,
    /// Calls that were made, and those of them that were cancelled.
    made: u64,
    cancelled: u64,
    running: FuturesUnordered<Pin<Box<dyn Future<Output = Outcome> + Send>>>,
    cancels: BTreeMap<u64, AbortHandle>,
    outgoing: Outgoing,
}

impl<S> Serving<S>
where
    S: http2::Service<Body>,
{
    fn new(most: u32, service: S, outgoing: Outgoing) -> Self {
        Self {
            service,
            most,
            made: 0,
            cancelled: 0,
            running: FuturesUnordered::new(),
            cancels: BTreeMap::new(),
            outgoing,
        }
    }

    fn take(&mut self, CallbackFromGuest { number, message }: CallbackFromGuest) -> Result<(), Breach> {
        match message {
            Some(FromGuest::Call(call)) => self.begin(number, call),
            Some(FromGuest::Cancellation(_)) => {
                self.cancelled += 1;
                if self.cancelled > self.made {
                    return Err(Breach::Cancellations);
                }
                // If the entry is missing, the answer may have been sent already.
                if let Some(cancel) = self.cancels.get(&number) {
                    cancel.abort();
                }
                Ok(())
            }
            // One of a later version.
            None => Ok(()),
        }
    }

    fn begin(&mut self, number: u64, call: CallbackCall) -> Result<(), Breach> {
        let expected = self.made + 1;
        if number != expected {
            return Err(Breach::Number { found: number, expected });
        }
        let most = usize::try_from(self.most).unwrap_or(usize::MAX);
        if self.running.len() + self.outgoing.answers() >= most {
            return Err(Breach::Calls(self.most));
        }
        self.made = number;
        let (cancel, registration) = AbortHandle::new_pair();
        self.cancels.insert(number, cancel);
        let answered = Abortable::new(answer(self.service.clone(), call), registration);
        self.running.push(Box::pin(async move {
            let cancelled = |_| Err(Status::cancelled("the guest no longer waits"));
            (number, answered.await.unwrap_or_else(cancelled))
        }));
        Ok(())
    }

    fn ended(&mut self, (number, outcome): Outcome) {
        self.cancels.remove(&number);
        if self.cancels.is_empty() {
            // An empty one keeps its room, and there is one for each guest.
            self.cancels = BTreeMap::new();
        }
        self.outgoing.send(FromHost::Answer(match outcome {
            Ok(answer) => CallbackAnswer { number, code: 0, message: String::new(), answer },
            Err(status) => CallbackAnswer {
                number,
                // gRPC's codes are 0 to 16.
                code: u32::try_from(i32::from(status.code())).unwrap_or_default(),
                message: status.message().to_owned(),
                answer: Vec::new(),
            },
        }));
    }
}

/// Calls the service, and returns the answer's message or status.
async fn answer<S>(mut service: S, call: CallbackCall) -> Result<Vec<u8>, Status>
where
    S: http2::Service<Body>,
{
    let request = request(&call.method, &call.request)?;
    // The answer may take minutes, and the request is a copy.
    drop(call);
    std::future::poll_fn(|context| service.poll_ready(context)).await.unwrap_or_else(|never| match never {});
    let response = service.call(request).await.unwrap_or_else(|never| match never {});
    response_message(response).await.map(Vec::from)
}
