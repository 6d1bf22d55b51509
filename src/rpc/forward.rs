//! `guestlet.v1.Forward`: connections of host halves with what listens in this guest. A call carries any number of them, and they end
//! with it.
//!
//! ```text
//! connect ──▶ rules (each place) ──▶ room ──▶ connect(2) ──▶ carried on ──▶ ended
//!                │ refused, and why    │           │          └─ each with a record at its beginning and its end
//! ```

mod conversation;

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::guest::Guest;
use crate::guest::forward::{self, Counted, Place};
use crate::policy::audit::{Noted, Record};
use crate::policy::{Asked, Asker, Decision, Detail, Role, Target};
use crate::rpc::guard::Gate;
use crate::sys::socket::Socket;
use crate::transport::carry::{Counts, Ended, Link};
use crate::transport::opening;
use crate::wire::proto::v1;
use crate::wire::proto::v1::RefusedBecause;
use crate::wire::proto::v1::forward_server::{self, ForwardServer};
use crate::wire::proto::v1::to_target::Message;
use conversation::Conversation;

/// Bytes of one request.
const MAX_REQUEST: usize = 64 << 10;
/// The verb in audit records.
const VERB: &str = "ForwardConnections";
/// Connections that were not made are written down one by one no faster than this; the rest are counted.
const BETWEEN_FAILURES: Duration = Duration::from_secs(1);

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    gate: Gate,
    stopping: CancellationToken,
}

impl Service {
    /// Makes connections in this guest, as far as the rules of `gate` let it, until `stopping`.
    pub fn new(guest: Guest, gate: Gate, stopping: CancellationToken) -> Self {
        Self { guest, gate, stopping }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> ForwardServer<Self> {
        ForwardServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl forward_server::Forward for Service {
    type ForwardConnectionsStream = Pin<Box<dyn Stream<Item = Result<v1::FromTarget, Status>> + Send>>;

    async fn forward_connections(
        &self,
        request: Request<Streaming<v1::ToTarget>>,
    ) -> Result<Response<Self::ForwardConnectionsStream>, Status> {
        let asker = request.extensions().get::<Asker>().cloned();
        let asker = asker.ok_or_else(|| Status::internal("the caller is not known"))?;
        let mut requests = request.into_inner();
        let first = opening::first(&mut requests).await?;
        if !matches!(first.and_then(|first| first.message), Some(Message::Open(_))) {
            return Err(Status::invalid_argument("the first message must be open"));
        }
        let Self { guest, gate, stopping } = self.clone();
        let desk = Desk { guest, gate, caller: asker.to_string(), asker, failures: Mutex::default() };
        let conversation = Conversation::new(requests, Arc::new(desk), stopping);
        Ok(Response::new(Box::pin(conversation.into_stream())))
    }
}

/// Reason why a connection is refused, with an explanation.
pub(super) type Refused = (RefusedBecause, String);

/// State that the connections of one call share.
struct Desk {
    guest: Guest,
    gate: Gate,
    asker: Asker,
    /// Name of the caller for display, which is also the key under which its connections are counted.
    caller: String,
    failures: Mutex<Failures>,
}

/// Connections that were not made for reasons other than the rules.
#[derive(Default)]
struct Failures {
    told: Option<Instant>,
    more: u64,
}

/// A connection that may be made.
struct Allowed {
    places: Vec<Place>,
    counted: Counted,
    noted: Noted,
}

impl Desk {
    /// Checks whether the caller may connect to the target `text`, and reserves a place for the connection.
    fn allow(&self, text: &str) -> Result<Allowed, Refused> {
        let no_target = |error| (RefusedBecause::NoTarget, format!("the target {error}"));
        let target: Target = text.parse().map_err(no_target)?;
        let noted = Noted::default();
        let _ = noted.subject.set(target.to_string());
        let mut places = Vec::new();
        for place in target.places() {
            match self.decide(&place) {
                Decision::Denied(_) => continue,
                Decision::WouldDeny(why) => drop(noted.would_deny.set(why.to_string())),
                Decision::Allowed(_) => {}
            }
            match place {
                Target::Address(address) => places.push(Place::Address(address)),
                Target::Path(path) => places.push(Place::Path(path)),
                Target::Port(_) => {}
            }
        }
        if places.is_empty() {
            let why = match self.decide(&target) {
                Decision::Denied(why) | Decision::WouldDeny(why) => why.to_string(),
                Decision::Allowed(_) => String::new(),
            };
            let _ = noted.denied.set(why.clone());
            self.record(&noted, "not begun", Duration::ZERO);
            return Err((RefusedBecause::Denied, why));
        }
        let counted = self.guest.forwards.one_more(&self.caller).map_err(|full| {
            self.failed(&noted, &full.to_string(), Duration::ZERO);
            (RefusedBecause::TooMany, full.to_string())
        })?;
        Ok(Allowed { places, counted, noted })
    }

    fn decide<'a>(&'a self, target: &'a Target) -> Decision<'a> {
        let asked = Asked::new(self.asker.who(), self.asker.caller(), VERB, Role::Forward);
        self.gate.rules().decide(&Asked { detail: Detail::Target(target), ..asked })
    }

    /// Makes the connection, and records the result.
    async fn connect(&self, allowed: &Allowed) -> Result<Socket, Refused> {
        let begun = Instant::now();
        let connected = forward::connect(&allowed.places).await;
        match &connected {
            Ok(_) => self.record(&allowed.noted, "connected", begun.elapsed()),
            Err(error) => self.failed(&allowed.noted, &format!("cannot connect: {error}"), begun.elapsed()),
        }
        connected.map_err(|error| (RefusedBecause::Unspecified, error.to_string()))
    }

    fn record(&self, noted: &Noted, result: &str, took: Duration) {
        self.gate.audit().record(&Record {
            id: self.asker.id(),
            who: self.asker.who(),
            caller: self.asker.caller(),
            role: Role::Forward,
            verb: VERB,
            noted,
            result,
            took,
        });
    }

    /// Records a failed connection, unless another failure was recorded a moment ago: then it is only counted, so
    /// that repeated attempts cannot fill the log.
    fn failed(&self, noted: &Noted, result: &str, took: Duration) {
        let more = {
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            if failures.told.is_some_and(|told| now.duration_since(told) < BETWEEN_FAILURES) {
                failures.more += 1;
                return;
            }
            failures.told = Some(now);
            std::mem::take(&mut failures.more)
        };
        let more = if more > 0 { format!(" (and {more} more failed before)") } else { String::new() };
        self.record(noted, &format!("{result}{more}"), took);
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let more = self.failures.get_mut().unwrap_or_else(PoisonError::into_inner).more;
        if more > 0 {
            self.record(&Noted::default(), &format!("{more} more connections failed"), Duration::ZERO);
        }
    }
}

/// A connection that was made. Its end is written down when this is dropped, however that comes about.
struct Open<'d> {
    desk: &'d Desk,
    noted: &'d Noted,
    link: &'d Link,
    begun: Instant,
    ended: Option<Ended>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let Counts { read, written } = self.link.counts();
        let how = match &self.ended {
            Some(Ended::Well) => "ended".to_owned(),
            Some(Ended::Broken(reason)) => format!("broken by the target ({reason})"),
            Some(Ended::Reset) => "broken by the client".to_owned(),
            None => "ended with its call".to_owned(),
        };
        let result = format!("{how}: {written} bytes to the target, {read} bytes from it");
        self.desk.record(self.noted, &result, self.begun.elapsed());
    }
}
