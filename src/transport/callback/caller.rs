//! The guest's end: a client's calls become messages, and the host half's messages their answers.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::{Code, Status, Streaming};

use super::unary::{request_message, response, too_large};
use crate::wire::proto::v1::callback_from_guest::Message as FromGuest;
use crate::wire::proto::v1::callback_from_host::Message as FromHost;
use crate::wire::proto::v1::{
    CallbackAnswer, CallbackBounds, CallbackCall, CallbackCancellation, CallbackFromGuest, CallbackFromHost,
};

/// Timeout for the first message of a peer that opens a callback.
const BEGINNING: Duration = Duration::from_secs(5);
/// Calls that are under way at a time, whatever the host half allows.
const MAX_OPEN_CALLS: u32 = 64;

/// Error of a call whose host half has disconnected; whether the call has had an effect is unknown.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the host half has closed the callback")]
pub struct Broken;

/// Makes calls of the host half; clones share what it allows.
#[derive(Debug, Clone)]
pub struct Caller(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Holds two messages for each call that may be under way at most: itself, and its cancellation.
    outgoing: mpsc::UnboundedSender<CallbackFromGuest>,
    places: Arc<Semaphore>,
    request_bytes: usize,
    open: Mutex<Open>,
}

/// The calls that are under way.
#[derive(Debug, Default)]
struct Open {
    last: u64,
    calls: BTreeMap<u64, Call>,
    has_ended: bool,
}

#[derive(Debug)]
struct Call {
    /// Channel for the answer; closed if the caller no longer waits.
    answer: oneshot::Sender<CallbackAnswer>,
    _place: OwnedSemaphorePermit,
}

/// Messages for the host half. Polling this stream also receives the answers: `answers` are the host half's
/// messages after the first one, which had these `bounds`.
pub fn open<S>(bounds: &CallbackBounds, answers: S) -> (Caller, Calls<S>)
where
    S: Stream<Item = Result<CallbackFromHost, Status>> + Unpin,
{
    let (outgoing, messages) = mpsc::unbounded_channel();
    let places = bounds.open_calls.clamp(1, MAX_OPEN_CALLS);
    let shared = Arc::new(Shared {
        outgoing,
        places: Arc::new(Semaphore::new(usize::try_from(places).unwrap_or(1))),
        request_bytes: usize::try_from(bounds.request_bytes).unwrap_or(usize::MAX),
        open: Mutex::default(),
    });
    (Caller(Arc::clone(&shared)), Calls { shared, answers, messages })
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        // Ignores poisoning: no operation under the lock can leave the state inconsistent.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, number: u64, message: FromGuest) {
        // Without anybody to take it, the calls end as well.
        let _ = self.outgoing.send(CallbackFromGuest { number, message: Some(message) });
    }
}

impl tower_service::Service<Request<Body>> for Caller {
    type Response = Response<Body>;
    type Error = Broken;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Broken>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        // Each call waits for its own turn.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let caller = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            match request_message(body, caller.0.request_bytes).await {
                Ok(message) => caller.ask(head.uri.path(), message).await,
                Err(status) => Ok(status.into_http()),
            }
        })
    }
}

impl Caller {
    /// Makes one call of `method` with this message, waiting for its turn; dropping the future cancels the call.
    ///
    /// # Errors
    /// If the host half closes the callback before it has answered.
    pub async fn ask(&self, method: &str, message: Bytes) -> Result<Response<Body>, Broken> {
        let shared = &*self.0;
        if message.len() > shared.request_bytes {
            return Ok(too_large(shared.request_bytes).into_http());
        }
        let place = Arc::clone(&shared.places).acquire_owned().await.map_err(|_| Broken)?;
        let (answer, answered) = oneshot::channel();
        let number = {
            let mut open = shared.open();
            if open.has_ended {
                return Err(Broken);
            }
            open.last += 1;
            let number = open.last;
            open.calls.insert(number, Call { answer, _place: place });
            // Under the lock, so that they go in their order.
            let call = CallbackCall { method: method.to_owned(), request: message.into() };
            shared.send(number, FromGuest::Call(call));
            number
        };
        let waiting = Waiting { shared, number };
        let answer = answered.await.map_err(|_| Broken)?;
        drop(waiting);
        Ok(match Code::from(i32::try_from(answer.code).unwrap_or(-1)) {
            Code::Ok => response(&answer.answer),
            code => Status::new(code, answer.message).into_http(),
        })
    }
}

/// Guard of a caller that waits for an answer. Dropped before the answer arrives, it cancels the call.
struct Waiting<'s> {
    shared: &'s Shared,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // If the entry is missing, the answer was received. Otherwise the place is released when the answer arrives.
        if self.shared.open().calls.contains_key(&self.number) {
            self.shared.send(self.number, FromGuest::Cancellation(CallbackCancellation {}));
        }
    }
}

/// See [`open`]. Ends with the host half's messages, and all calls with it.
#[derive(Debug)]
pub struct Calls<S> {
    shared: Arc<Shared>,
    answers: S,
    messages: mpsc::UnboundedReceiver<CallbackFromGuest>,
}

impl<S> Calls<S>
where
    S: Stream<Item = Result<CallbackFromHost, Status>> + Unpin,
{
    /// Takes in the answers that have come; whether that was the last one.
    fn take(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        loop {
            let Some(message) = ready!(Pin::new(&mut self.answers).poll_next(context)) else {
                return Poll::Ready(Ok(()));
            };
            match message?.message {
                Some(FromHost::Answer(answer)) => {
                    let call = self.shared.open().calls.remove(&answer.number);
                    let call = call.ok_or_else(|| {
                        let number = answer.number;
                        Status::invalid_argument(format!("no call of number {number} is under way"))
                    })?;
                    // The caller may no longer wait for the answer.
                    let _ = call.answer.send(answer);
                }
                Some(FromHost::Bounds(_)) => {
                    return Poll::Ready(Err(Status::invalid_argument("only the first message has bounds")));
                }
                // One of a later version.
                None => {}
            }
        }
    }
}

impl<S> Stream for Calls<S>
where
    S: Stream<Item = Result<CallbackFromHost, Status>> + Unpin,
{
    type Item = Result<CallbackFromGuest, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.take(context) {
            Poll::Ready(Ok(())) => Poll::Ready(None),
            Poll::Ready(Err(status)) => Poll::Ready(Some(Err(status))),
            Poll::Pending => self.messages.poll_recv(context).map(|message| message.map(Ok)),
        }
    }
}

impl<S> Drop for Calls<S> {
    fn drop(&mut self) {
        let mut open = self.shared.open();
        open.has_ended = true;
        open.calls.clear();
        self.shared.places.close();
    }
}

/// Reads the first message of a peer that opens a callback, and returns the limits in it together with the
/// messages that follow.
///
/// # Errors
/// `INVALID_ARGUMENT` or `DEADLINE_EXCEEDED` if the first message is wrong or late.
pub async fn begin(
    mut answers: Streaming<CallbackFromHost>,
) -> Result<(CallbackBounds, Streaming<CallbackFromHost>), Status> {
    let first = tokio::time::timeout(BEGINNING, answers.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("the first message did not arrive"))??;
    match first.and_then(|first| first.message) {
        Some(FromHost::Bounds(bounds)) => Ok((bounds, answers)),
        _ => Err(Status::invalid_argument("the first message has to have the bounds")),
    }
}

/// An open callback as the stream of its messages, until `over` says why it ends; with it, the callback ends.
pub struct Opened {
    calls: Calls<Streaming<CallbackFromHost>>,
    over: Pin<Box<dyn Future<Output = Status> + Send>>,
    has_ended: bool,
}

impl Opened {
    /// The one with these calls.
    pub fn new(
        calls: Calls<Streaming<CallbackFromHost>>,
        over: impl Future<Output = Status> + Send + 'static,
    ) -> Self {
        Self { calls, over: Box::pin(over), has_ended: false }
    }
}

impl Stream for Opened {
    type Item = Result<CallbackFromGuest, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(why) = self.over.as_mut().poll(context) {
            self.has_ended = true;
            return Poll::Ready(Some(Err(why)));
        }
        let next = Pin::new(&mut self.calls).poll_next(context);
        self.has_ended = matches!(next, Poll::Ready(None | Some(Err(_))));
        next
    }
}
