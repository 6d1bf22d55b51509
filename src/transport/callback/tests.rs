#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests, some of them beside what they test"
)]

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use proptest::prelude::*;
use tokio::sync::{mpsc, oneshot};
use tonic::body::Body;
use tonic::{Code, Status};
use tower_service::Service as _;

use super::*;
use crate::wire::proto::v1::callback_from_guest::Message as FromGuest;
use crate::wire::proto::v1::callback_from_host::Message as FromHost;
use crate::wire::proto::v1::{
    CallbackBounds, CallbackCall, CallbackCancellation, CallbackFromGuest, CallbackFromHost,
};

/// Service that answers with the method and the message of the request, refuses `/s/Refuse`, and holds
/// `/s/Wait` until it is dropped.
#[derive(Clone, Default)]
struct Echo {
    waiting: Arc<AtomicUsize>,
}

impl tower_service::Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let waiting = Arc::clone(&self.waiting);
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let message = request_message(body, usize::MAX).await.unwrap();
            match head.uri.path() {
                "/s/Refuse" => Ok(Status::new(Code::NotFound, "refused, in words").into_http()),
                "/s/Wait" => {
                    let _waits = Waits::new(waiting);
                    std::future::pending().await
                }
                path => Ok(response(&[path.as_bytes(), &message].concat())),
            }
        })
    }
}

struct Waits(Arc<AtomicUsize>);

impl Waits {
    fn new(waiting: Arc<AtomicUsize>) -> Self {
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn bounds(open_calls: u32) -> CallbackBounds {
    CallbackBounds { host_instance_id: "one".to_owned(), open_calls, request_bytes: 100 }
}

/// Both ends, without a connection between them. The host's runs until the task is ended.
async fn connected(open_calls: u32, service: Echo) -> (Caller, tokio::task::JoinHandle<Result<(), Ended>>) {
    let (give, taken) = oneshot::channel();
    let serving = tokio::spawn(serve(bounds(open_calls), service, async |mut messages: Messages| {
        let Some(FromHost::Bounds(bounds)) = messages.next().await.unwrap().message else { panic!() };
        let (caller, calls) = open(&bounds, messages.map(Ok));
        give.send(caller).unwrap();
        Ok(Box::pin(calls))
    }));
    (taken.await.unwrap(), serving)
}

async fn ask(mut caller: Caller, path: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
    let request = request(path, message).unwrap();
    let response = caller.call(request).await.map_err(|broken| Status::from_error(Box::new(broken)))?;
    response_message(response).await.map(|message| message.to_vec())
}

async fn until(mut found: impl FnMut() -> bool) {
    while !found() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn messages_go_through_as_they_are(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..=100), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (caller, _serving) = connected(4, Echo::default()).await;
            let asked = messages.iter().map(|message| ask(caller.clone(), "/s/Echo", message));
            for (answer, message) in futures_util::future::join_all(asked).await.into_iter().zip(&messages) {
                assert_eq!(answer.unwrap(), [b"/s/Echo", &message[..]].concat());
            }
        });
    }
}

#[tokio::test]
async fn what_the_service_refuses_is_refused_in_its_words() {
    let (caller, _serving) = connected(4, Echo::default()).await;
    let refused = ask(caller.clone(), "/s/Refuse", b"").await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::NotFound, "refused, in words"));
    let large = ask(caller.clone(), "/s/Echo", &[0; 101]).await.unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted, "it is not even sent");
    assert!(large.message().contains("more than 100 bytes"), "{large}");
    assert_eq!(ask(caller, "/s/Echo", &[0; 100]).await.unwrap().len(), 107);
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_is_ended_and_makes_room() {
    let echo = Echo::default();
    let waiting = Arc::clone(&echo.waiting);
    let (caller, _serving) = connected(2, echo).await;
    let waits = [0; 2].map(|_| {
        tokio::spawn({
            let caller = caller.clone();
            async move { ask(caller, "/s/Wait", b"").await }
        })
    });
    until(|| waiting.load(Ordering::SeqCst) == 2).await;
    // Both places are taken.
    let mut third = Box::pin(ask(caller.clone(), "/s/Echo", b"later"));
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut third).await.is_err());
    let [first, second] = waits;
    first.abort();
    assert_eq!(third.await.unwrap(), b"/s/Echolater");
    until(|| waiting.load(Ordering::SeqCst) == 1).await;
    assert!(!second.is_finished());
    // Repeated, to show that cancelled calls release their places.
    for _ in 0..100 {
        let call = ask(caller.clone(), "/s/Wait", b"");
        let _ = tokio::time::timeout(Duration::ZERO, call).await;
    }
    assert_eq!(ask(caller, "/s/Echo", b"").await.unwrap(), b"/s/Echo");
    assert_eq!(waiting.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn when_an_end_goes_so_do_the_calls() {
    let echo = Echo::default();
    let waiting = Arc::clone(&echo.waiting);
    let (caller, serving) = connected(2, echo).await;
    let call = tokio::spawn({
        let caller = caller.clone();
        async move { ask(caller, "/s/Wait", b"").await }
    });
    until(|| waiting.load(Ordering::SeqCst) == 1).await;
    serving.abort();
    let broken = call.await.unwrap().unwrap_err();
    assert!(std::error::Error::source(&broken).unwrap().is::<Broken>(), "{broken:?}");
    assert_eq!(waiting.load(Ordering::SeqCst), 0);
    assert!(ask(caller, "/s/Echo", b"").await.is_err(), "and there are no new ones");
}

/// Serves these messages, and returns the result.
async fn served(messages: Vec<CallbackFromGuest>) -> Result<(), Ended> {
    let (sender, receiver) = mpsc::channel(messages.len().max(1));
    for message in messages {
        sender.try_send(Ok(message)).unwrap();
    }
    drop(sender);
    let receiver = tokio_stream::wrappers::ReceiverStream::new(receiver);
    // The answers are not read.
    serve(bounds(2), Echo::default(), async |_messages| Ok(receiver)).await
}

fn call(number: u64) -> CallbackFromGuest {
    let call = CallbackCall { method: "/s/Wait".to_owned(), request: Vec::new() };
    CallbackFromGuest { number, message: Some(FromGuest::Call(call)) }
}

fn cancellation(number: u64) -> CallbackFromGuest {
    CallbackFromGuest { number, message: Some(FromGuest::Cancellation(CallbackCancellation {})) }
}

#[tokio::test]
async fn who_breaks_the_rules_is_cut_off() {
    let later = CallbackFromGuest { number: 9, message: None };
    for (messages, expected) in [
        (vec![call(1), call(2), later], None),
        (vec![call(1), call(2), call(3)], Some(Breach::Calls(2))),
        (vec![call(2)], Some(Breach::Number { found: 2, expected: 1 })),
        (vec![call(1), call(1)], Some(Breach::Number { found: 1, expected: 2 })),
        (vec![cancellation(1)], Some(Breach::Cancellations)),
        (vec![call(1), cancellation(7), cancellation(1)], Some(Breach::Cancellations)),
    ] {
        match (served(messages).await, expected) {
            (Ok(()), None) => {}
            (Err(Ended::Breach(found)), Some(expected)) => assert_eq!(found, expected),
            (ended, expected) => panic!("{ended:?}, not {expected:?}"),
        }
    }
}

#[tokio::test]
async fn the_guest_ends_it_when_the_host_half_breaks_the_rules() {
    let answer = |message| Ok(CallbackFromHost { message: Some(message) });
    let unasked =
        FromHost::Answer(crate::wire::proto::v1::CallbackAnswer { number: 3, ..Default::default() });
    for message in [unasked, FromHost::Bounds(bounds(1))] {
        let (_caller, mut calls) = open(&bounds(1), tokio_stream::once(answer(message)));
        let ended = Pin::new(&mut calls).next().await.unwrap().unwrap_err();
        assert_eq!(ended.code(), Code::InvalidArgument);
    }
}
