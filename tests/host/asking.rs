//! The guest's end of the callback: it asks, in good or bad manners.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use guestlet::supervise::Scope;
use guestlet::transport::callback::{self, Caller, Calls};
use guestlet::transport::http2::ORIGIN;
use guestlet::wire::proto::v1::callback_from_guest::Message;
use guestlet::wire::proto::v1::host_client::HostClient;
use guestlet::wire::proto::v1::{
    CallbackBounds, CallbackCall, CallbackCancellation, CallbackFromGuest, CallbackFromHost, PingRequest,
    WhoAmIRequest,
};
use prost::Message as _;
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use crate::guest::{Asked, Manner};

/// Between two pings of a guest that does not nag.
const PAUSE: Duration = Duration::from_millis(50);
const WHO_AM_I: &str = "/guestlet.v1.Host/WhoAmI";

/// What a guest does against the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unruly {
    /// Does not take the answers to its calls.
    NoRoom,
    /// Makes calls, and does not wait for those before.
    TooMany,
    /// Leaves a number out.
    Number,
    /// Cancels calls that it has never made.
    Cancellations,
    /// Makes a call that is larger than it may be.
    Large,
}

/// What it sends to the host half. The host half ends it.
pub struct Messages {
    calls: Calls<Answers>,
    by_hand: Box<dyn Iterator<Item = CallbackFromGuest> + Send>,
    has_ended: bool,
    _scope: Scope,
}

/// What the host half sends, as far as the guest takes it.
struct Answers {
    answers: Streaming<CallbackFromHost>,
    are_taken: bool,
}

impl Messages {
    pub fn new(
        manner: Manner,
        asked: &Arc<Asked>,
        bounds: &CallbackBounds,
        answers: Streaming<CallbackFromHost>,
    ) -> Self {
        let unruly = if let Manner::Unruly(unruly) = manner { Some(unruly) } else { None };
        let are_taken = !matches!(unruly, Some(Unruly::NoRoom | Unruly::TooMany));
        let (caller, calls) = callback::open(bounds, Answers { answers, are_taken });
        let scope = Scope::new();
        let asked = Arc::clone(asked);
        match manner {
            Manner::Unruly(_) | Manner::Fleeting => {}
            Manner::Resetting => scope.children().spawn(reset(caller)),
            _ => scope.children().spawn(async move { ask(caller, &asked, manner == Manner::Nagging).await }),
        }
        let by_hand = by_hand(unruly, bounds);
        Self { calls, by_hand, has_ended: manner == Manner::Fleeting, _scope: scope }
    }
}

impl Stream for Answers {
    type Item = Result<CallbackFromHost, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.are_taken { Pin::new(&mut self.answers).poll_next(context) } else { Poll::Pending }
    }
}

impl Stream for Messages {
    type Item = Result<CallbackFromGuest, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        match self.by_hand.next() {
            Some(message) => Poll::Ready(Some(Ok(message))),
            None => Pin::new(&mut self.calls).poll_next(context),
        }
    }
}

fn call(number: u64, method: &str, request: Vec<u8>) -> CallbackFromGuest {
    let call = CallbackCall { method: method.to_owned(), request };
    CallbackFromGuest { number, message: Some(Message::Call(call)) }
}

/// The messages against the rules.
fn by_hand(
    unruly: Option<Unruly>,
    bounds: &CallbackBounds,
) -> Box<dyn Iterator<Item = CallbackFromGuest> + Send> {
    let open = u64::from(bounds.open_calls);
    let request_bytes = usize::try_from(bounds.request_bytes).unwrap();
    match unruly {
        None => Box::new(std::iter::empty()),
        Some(Unruly::NoRoom) => {
            // All answers together are more than HTTP/2 has room for.
            let ping = PingRequest { payload: vec![7; 4096] }.encode_to_vec();
            Box::new((1..=open).map(move |number| call(number, "/guestlet.v1.Host/Ping", ping.clone())))
        }
        Some(Unruly::TooMany) => {
            // Of calls that wait for the host's disks, so that they stay.
            let ping = PingRequest { payload: vec![7; 4096] }.encode_to_vec();
            Box::new((1..=3 * open).map(move |number| call(number, "/guestlet.v1.Host/Ping", ping.clone())))
        }
        Some(Unruly::Number) => Box::new([1, 3].into_iter().map(|number| call(number, WHO_AM_I, Vec::new()))),
        Some(Unruly::Cancellations) => Box::new((1..).map(|number| CallbackFromGuest {
            number,
            message: Some(Message::Cancellation(CallbackCancellation {})),
        })),
        Some(Unruly::Large) => Box::new(std::iter::once(call(1, WHO_AM_I, vec![0; request_bytes * 2]))),
    }
}

/// Asks who it is, and then pings until the callback ends.
async fn ask(caller: Caller, asked: &Asked, nagging: bool) {
    asked.client.send_replace(Some(caller.clone()));
    let mut client = HostClient::with_origin(caller, http::Uri::from_static(ORIGIN));
    let Ok(identity) = client.who_am_i(WhoAmIRequest {}).await else { return };
    *asked.identity.lock().unwrap() = Some(identity.into_inner());
    let payload = b"ping".to_vec();
    while let Ok(answer) = client.ping(PingRequest { payload: payload.clone() }).await {
        assert_eq!(answer.get_ref().payload, payload);
        asked.answers.fetch_add(1, Ordering::SeqCst);
        if !nagging {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Makes calls and cancels them before they are answered, again and again.
async fn reset(caller: Caller) {
    loop {
        let calls: Vec<_> = (0..64)
            .map(|_| {
                let mut client = HostClient::with_origin(caller.clone(), http::Uri::from_static(ORIGIN));
                async move { drop(client.who_am_i(WhoAmIRequest {}).await) }
            })
            .collect();
        for call in calls {
            drop(tokio::time::timeout(Duration::ZERO, call).await);
        }
        tokio::task::yield_now().await;
    }
}
