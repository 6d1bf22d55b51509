//! The host half's end: a guest's messages become calls of a service, and its answers messages.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;

use futures_util::StreamExt as _;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
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

/// How a guest breaks the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// It has more calls under way than it may.
    #[error("more than {0} calls are under way")]
    Calls(u32),
    /// A call's number is not the one after the last.
    #[error("the call has the number {found}, expected {expected}")]
    Number {
        /// What it has.
        found: u64,
        /// What it should have.
        expected: u64,
    },
    /// It cancels more calls than it makes.
    #[error("it cancels more calls than it makes")]
    Cancellations,
}

/// Why nothing is served any more.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The guest refused the callback, or the stream broke.
    #[error(transparent)]
    Status(#[from] Box<Status>),
    /// The guest does not keep to the rules.
    #[error(transparent)]
    Breach(#[from] Breach),
}

/// What has come of a call.
type Outcome = (u64, Result<Vec<u8>, Status>);

/// Serves `service` to a guest until it ends the callback. `open` sends it these messages, of which `bounds` are the first,
/// and returns its own. Dropping the future ends all calls.
///
/// # Errors
/// If the guest does not take it, breaks it, or breaks the rules.
pub async fn serve<S, F, M>(
    bounds: CallbackBounds,
    service: S,
    open: impl FnOnce(Messages) -> F,
) -> Result<(), Ended>
where
    S: http2::Service<Body>,
    F: Future<Output = Result<M, Status>>,
    M: Stream<Item = Result<CallbackFromGuest, Status>> + Unpin,
{
    let (outgoing, messages) = mpsc::channel(1);
    let mut serving = Serving::new(bounds.open_calls, service);
    let first = CallbackFromHost { message: Some(FromHost::Bounds(bounds)) };
    // There is room for one.
    let _ = outgoing.try_send(Box::new(first));
    let mut calls = open(Messages(messages)).await.map_err(Box::new)?;
    loop {
        tokio::select! {
            biased;
            Some(outcome) = serving.running.next() => serving.ended(outcome),
            Ok(room) = outgoing.reserve(), if !serving.answers.is_empty() => {
                let answer = serving.answers.pop_front().map(FromHost::Answer);
                room.send(Box::new(CallbackFromHost { message: answer }));
            }
            message = calls.next() => match message {
                Some(message) => serving.take(message.map_err(Box::new)?)?,
                None => return Ok(()),
            },
        }
    }
}

/// The host half's messages, as the call of `Callback` sends them. Boxed: a channel has places for 32, however few may wait.
#[derive(Debug)]
pub struct Messages(mpsc::Receiver<Box<CallbackFromHost>>);

impl Stream for Messages {
    type Item = CallbackFromHost;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<CallbackFromHost>> {
        self.0.poll_recv(context).map(|message| message.map(|message| *message))
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
    /// Those that wait to be sent.
    answers: VecDeque<CallbackAnswer>,
}

impl<S> Serving<S>
where
    S: http2::Service<Body>,
{
    fn new(most: u32, service: S) -> Self {
        Self {
            service,
            most,
            made: 0,
            cancelled: 0,
            running: FuturesUnordered::new(),
            cancels: BTreeMap::new(),
            answers: VecDeque::new(),
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
                // Its answer may be on its way.
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
        if self.running.len() + self.answers.len() >= most {
            return Err(Breach::Calls(self.most));
        }
        self.made = number;
        let (cancel, registration) = AbortHandle::new_pair();
        self.cancels.insert(number, cancel);
        let answered = Abortable::new(answer(self.service.clone(), call), registration);
        self.running.push(Box::pin(async move {
            let cancelled = |_| Err(Status::cancelled("the guest does not wait any more"));
            (number, answered.await.unwrap_or_else(cancelled))
        }));
        Ok(())
    }

    fn ended(&mut self, (number, outcome): Outcome) {
        self.cancels.remove(&number);
        self.answers.push_back(match outcome {
            Ok(answer) => CallbackAnswer { number, code: 0, message: String::new(), answer },
            Err(status) => CallbackAnswer {
                number,
                // gRPC's codes are 0 to 16.
                code: u32::try_from(i32::from(status.code())).unwrap_or_default(),
                message: status.message().to_owned(),
                answer: Vec::new(),
            },
        });
    }
}

/// Calls the service.
async fn answer<S>(mut service: S, call: CallbackCall) -> Result<Vec<u8>, Status>
where
    S: http2::Service<Body>,
{
    let request = request(&call.method, &call.request)?;
    std::future::poll_fn(|context| service.poll_ready(context)).await.unwrap_or_else(|never| match never {});
    let response = service.call(request).await.unwrap_or_else(|never| match never {});
    response_message(response).await.map(Vec::from)
}
