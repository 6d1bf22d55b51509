//! Authorization of calls to the guestlet API, before a request reaches the service, and the audit record
//! after it was answered.
//!
//! ```text
//! request ──▶ verb (by its path) ──▶ decide (peer, caller) ──▶ frozen? ──▶ the service ──▶ record, if the verb is audited
//!                  │ none: UNIMPLEMENTED      │ denied: PERMISSION_DENIED, and a record
//! ```
//!
//! The peer is in the extensions of a request (`Arc<Peer>`); if it is missing, the peer counts as one that has
//! proved nothing. The caller on whose behalf the host half acts, and the number of the call, are in the
//! request's metadata.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use http::{HeaderMap, Request, Response};
use tonic::body::Body;
use tonic::{Code, Status};

use crate::guest::freeze::Freezer;
use crate::policy::audit::{Id, Noted, Record, printable};
use crate::policy::bounds::Bound;
use crate::policy::grant::MAX_CALLER;
use crate::policy::verbs::{self, Verb};
use crate::policy::{Asked, Asker, Audit, Decision, HostHalf, Rules, Who};
use crate::trust::Peer;

/// Metadata key of the caller on whose behalf the host half acts, such as `uid:0 root`; absent if it acts for
/// itself. Characters that are not printable are percent-encoded.
const CALLER: &str = "guestlet-caller";
/// Metadata: the number of the call in the audit records of both ends, 32 hexadecimal digits.
const AUDIT_ID: &str = "guestlet-audit-id";

/// The method by which a host half takes this guest, and the one by which it then shows that it is there.
const TAKES_THE_GUEST: &str = "WatchEvents";
const OPENS_A_CALLBACK: &str = "/guestlet.v1.Guest/Callback";

/// Request extension that shows whether the calling host half may open a callback.
#[derive(Debug, Clone, Copy)]
struct MayCallBack(bool);

/// Returns whether the host half that takes this guest with the request may open a callback. True where
/// requests are not checked.
pub fn may_call_back<T>(request: &tonic::Request<T>) -> bool {
    request.extensions().get().is_none_or(|MayCallBack(may)| *may)
}

/// Gate that checks and records requests; clones share it.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rules: Rules,
    audit: Audit,
    /// The guest was given keys of host halves.
    guest_has_keys: Arc<AtomicBool>,
    freezer: Freezer,
}

impl Gate {
    /// Holds requests to `rules`, and to what may be called while `freezer` holds anything frozen, and writes them down in
    /// `audit`. As soon as `guest_has_keys` is set, a peer that has proved nothing is a stranger.
    pub fn new(rules: Rules, audit: Audit, guest_has_keys: Arc<AtomicBool>, freezer: Freezer) -> Self {
        Self(Arc::new(Inner { rules, audit, guest_has_keys, freezer }))
    }

    /// Returns the rules that requests are checked against.
    pub fn rules(&self) -> &Rules {
        &self.0.rules
    }

    /// Returns the audit log.
    pub fn audit(&self) -> &Audit {
        &self.0.audit
    }

    /// The same service behind this gate.
    pub fn before<S>(&self, service: S) -> Guarded<S> {
        Guarded { service, gate: self.clone() }
    }
}

/// A service that only those reach who may.
#[derive(Debug, Clone)]
pub struct Guarded<S> {
    service: S,
    gate: Gate,
}

/// Future of the services that tonic generates.
type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S, B> tower_service::Service<Request<B>> for Guarded<S>
where
    S: tower_service::Service<Request<B>, Response = Response<Body>, Error = Infallible, Future = Answering>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Answering {
        let Some(verb) = verbs::find(request.uri().path()) else {
            return refused(Status::unimplemented("unknown method"));
        };
        let mut request = request;
        if verb.name == TAKES_THE_GUEST {
            let may = MayCallBack(self.gate.allows(OPENS_A_CALLBACK, &request));
            request.extensions_mut().insert(may);
        }
        if verb.names_asker {
            match self.gate.asker(&request) {
                Ok(asker) => drop(request.extensions_mut().insert(asker)),
                Err(status) => return refused(status),
            }
        }
        match self.gate.admit(verb, &request) {
            Err(status) => refused(status),
            Ok(None) => self.service.call(request),
            Ok(Some(open)) => {
                request.extensions_mut().insert(Arc::clone(&open.noted));
                let answering = self.service.call(request);
                Box::pin(async move {
                    let Ok(answer) = answering.await;
                    open.ended(&answer);
                    Ok(answer)
                })
            }
        }
    }
}

fn refused(status: Status) -> Answering {
    Box::pin(std::future::ready(Ok(status.into_http())))
}

impl Gate {
    /// Checks whether a request may reach the service, and returns the open audit record if one is needed.
    /// Allocates no memory for a verb without a record.
    fn admit<B>(&self, verb: &'static Verb, request: &Request<B>) -> Result<Option<Open>, Status> {
        let caller = caller(request.headers())?;
        let who = self.who(request);
        let asked = Asked::new(who, caller, verb.name, verb.role);
        let is_frozen = self.0.freezer.restricts();
        // As of the commands, the lists do not hold for what is always allowed while something is frozen.
        if !(is_frozen && verb.while_frozen)
            && let Some(words) = self.forbidden(verb, &asked)
        {
            return Err(self.denied(verb, request, caller, words));
        }
        let decision = self.0.rules.decide(&asked);
        if let Decision::Denied(why) = decision {
            return Err(self.denied(verb, request, caller, why.to_string()));
        }
        if is_frozen && !verb.while_frozen {
            let words = format!("file systems are frozen: {}; thaw them first", self.0.freezer.held());
            return Err(Status::failed_precondition(words));
        }
        let noted = match decision {
            Decision::WouldDeny(why) => Noted { would_deny: why.to_string().into(), ..Noted::default() },
            _ if !verb.audited && !self.0.audit.is_new(&who, caller, verb.role) => return Ok(None),
            _ => Noted::default(),
        };
        Ok(Some(self.open(verb, request, caller, noted)))
    }

    /// Returns why a verb is forbidden, if the settings of `[qga]` forbid a command that has the same effect.
    fn forbidden(&self, verb: &Verb, asked: &Asked<'_>) -> Option<String> {
        verb.commands.iter().find_map(|&command| {
            let asked = Asked { verb: command, detail: verb.detail, ..*asked };
            let bound = self.0.rules.bounds.forbid(&asked)?;
            Some(match bound {
                Bound::Command => format!("the settings of [qga] in this guest do not allow {command}"),
                bound => bound.to_string(),
            })
        })
    }

    /// Writes down that a request is denied, and says so.
    fn denied<B>(&self, verb: &'static Verb, request: &Request<B>, caller: &str, words: String) -> Status {
        let noted = Noted { denied: words.clone().into(), ..Noted::default() };
        self.open(verb, request, caller, noted).record("not begun");
        Status::permission_denied(words)
    }

    /// Returns whether the peer and caller of this request may also call the method at this path. Leaves no audit
    /// record.
    fn allows<B>(&self, path: &str, request: &Request<B>) -> bool {
        let (Some(verb), Ok(caller)) = (verbs::find(path), caller(request.headers())) else { return false };
        let asked = Asked::new(self.who(request), caller, verb.name, verb.role);
        !matches!(self.0.rules.decide(&asked), Decision::Denied(_))
    }

    /// Returns the peer and caller of a request, in a form that lives as long as its execution.
    fn asker<B>(&self, request: &Request<B>) -> Result<Asker, Status> {
        let peer = request.extensions().get::<Arc<Peer>>();
        Ok(Asker::Host(Arc::new(HostHalf {
            peer: peer.map_or_else(|| Arc::new(Peer::Plain), Arc::clone),
            guest_has_keys: self.0.guest_has_keys.load(Ordering::Relaxed),
            caller: caller(request.headers())?.to_owned(),
            id: id(request),
        })))
    }

    fn who<'r, B>(&self, request: &'r Request<B>) -> Who<'r> {
        let guest_has_keys = self.0.guest_has_keys.load(Ordering::Relaxed);
        let peer = request.extensions().get::<Arc<Peer>>();
        peer.map_or(Who::Plain { guest_has_keys }, move |peer| Who::peer(peer, guest_has_keys))
    }

    fn open<B>(&self, verb: &'static Verb, request: &Request<B>, caller: &str, noted: Noted) -> Open {
        let peer = request.extensions().get::<Arc<Peer>>();
        Open {
            gate: self.clone(),
            id: id(request),
            peer: peer.map_or_else(|| Arc::new(Peer::Plain), Arc::clone),
            caller: caller.to_owned(),
            verb,
            noted: Arc::new(noted),
            begun: Instant::now(),
            ended: false,
        }
    }
}

/// The host half's number of a call.
fn id<B>(request: &Request<B>) -> Option<Id> {
    request.headers().get(AUDIT_ID).and_then(|id| Id::parse(id.to_str().ok()?))
}

/// Returns the caller on whose behalf the host half acts; empty if it does not name one.
fn caller(headers: &HeaderMap) -> Result<&str, Status> {
    let Some(caller) = headers.get(CALLER) else { return Ok("") };
    let printable =
        |text: &&str| text.len() <= MAX_CALLER && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    caller.to_str().ok().filter(printable).ok_or_else(|| {
        Status::invalid_argument(format!("{CALLER} is not at most {MAX_CALLER} printable ASCII characters"))
    })
}

/// A call that has not ended. When this is dropped before, as it is when the host half goes away, the record says so.
struct Open {
    gate: Gate,
    id: Option<Id>,
    peer: Arc<Peer>,
    caller: String,
    verb: &'static Verb,
    noted: Arc<Noted>,
    begun: Instant,
    ended: bool,
}

impl Open {
    fn ended(mut self, answer: &Response<Body>) {
        self.ended = true;
        match Status::from_header_map(answer.headers()).filter(|status| status.code() != Code::Ok) {
            None => self.record("done"),
            Some(status) => self.record(status.message()),
        }
    }

    fn record(&self, result: &str) {
        let inner = &self.gate.0;
        inner.audit.record(&Record {
            id: self.id,
            who: Who::peer(&self.peer, inner.guest_has_keys.load(Ordering::Relaxed)),
            caller: &self.caller,
            role: self.verb.role,
            verb: self.verb.name,
            noted: &self.noted,
            result: &printable(result),
            took: self.begun.elapsed(),
        });
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.ended && self.noted.denied.get().is_none() {
            self.record("not known: the call was cancelled");
        }
    }
}

/// Sets the subject of the call for its audit record; must never contain a secret.
pub fn concerns<T>(request: &tonic::Request<T>, subject: impl FnOnce() -> String) {
    if let Some(noted) = request.extensions().get::<Arc<Noted>>() {
        let _ = noted.subject.set(subject());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Bounds, Caller, Grant, Host, Mode, Role, Roles};
    use crate::trust::Fingerprint;
    use crate::trust::peer::Keyed;

    /// A service that answers everything.
    #[derive(Clone)]
    struct Willing;

    impl tower_service::Service<Request<()>> for Willing {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = Answering;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Answering {
            Box::pin(std::future::ready(Ok(Response::new(Body::default()))))
        }
    }

    fn grant(host: Host, caller: &str, role: Role) -> Grant {
        let (origin, roles) = ("a.toml:1".to_owned(), Roles::of(&[role]));
        let caller = Caller::new(caller);
        Grant { origin, host, caller, roles, exec: None, users: None, files: None, forward: Vec::new() }
    }

    /// The code and the words of the answer to a call.
    async fn call(gate: &Gate, method: &str, peer: Option<Peer>, caller: Option<&str>) -> (Code, String) {
        let mut request = Request::builder().uri(format!("/guestlet.v1.Guest/{method}"));
        if let Some(caller) = caller {
            request = request.header(CALLER, caller);
        }
        let mut request = request.body(()).unwrap();
        if let Some(peer) = peer {
            request.extensions_mut().insert(Arc::new(peer));
        }
        let answer = tower_service::Service::call(&mut gate.before(Willing), request).await.unwrap();
        let status = Status::from_header_map(answer.headers());
        status.map_or((Code::Ok, String::new()), |status| (status.code(), status.message().to_owned()))
    }

    fn keyed(key: &[u8]) -> Peer {
        let fingerprint = Fingerprint::of(key);
        Peer::Keyed(Keyed {
            fingerprint,
            anchor: fingerprint,
            names: Vec::new(),
            roles: Vec::new(),
            until: None,
        })
    }

    fn gate(rules: Rules, guest_has_keys: bool) -> Gate {
        Gate::new(rules, Audit::default(), Arc::new(AtomicBool::new(guest_has_keys)), Freezer::default())
    }

    #[tokio::test]
    async fn each_key_and_each_caller_has_what_its_grants_give() {
        let one = Host::Key(Fingerprint::of(b"one"));
        let grants = vec![grant(one, "uid:0 *", Role::Disks), grant(Host::AnyKey, "*", Role::Topology)];
        let gate = gate(Rules { grants, ..Rules::default() }, true);
        let root = Some("uid:0 root");
        for (method, key, caller, expected) in [
            ("GetInfo", "one", None, Code::Ok),
            ("SetTopology", "other", None, Code::Ok),
            ("FindDisk", "one", root, Code::Ok),
            ("FindDisk", "one", Some("uid:1000 a"), Code::PermissionDenied),
            ("FindDisk", "one", None, Code::PermissionDenied),
            ("FindDisk", "other", root, Code::PermissionDenied),
            ("Callback", "other", root, Code::PermissionDenied),
            ("Nothing", "one", root, Code::Unimplemented),
        ] {
            let (code, words) = call(&gate, method, Some(keyed(key.as_bytes())), caller).await;
            assert_eq!(code, expected, "{method} {key} {caller:?}: {words}");
            assert_eq!(
                code == Code::PermissionDenied,
                words.contains("the role disks to the host half SHA256:")
            );
        }
    }

    #[tokio::test]
    async fn who_has_proved_nothing_has_all_of_before_until_there_are_keys() {
        for peer in [None, Some(Peer::Plain)] {
            for mode in [Mode::Enforce, Mode::Audit] {
                let rules = Rules { mode, plain: Roles::of(&[Role::Status]), ..Rules::default() };
                let before = gate(rules.clone(), false);
                assert_eq!(call(&before, "ReleaseDisk", peer.clone(), None).await.0, Code::Ok);
                let after = gate(rules, true);
                assert_eq!(call(&after, "GetInfo", peer.clone(), None).await.0, Code::Ok);
                let (code, words) = call(&after, "ReleaseDisk", peer.clone(), None).await;
                assert!(code == Code::PermissionDenied && words.contains("trust.plain"), "{words}");
            }
        }
    }

    #[tokio::test]
    async fn a_caller_that_is_too_long_or_not_printable_is_no_caller() {
        let gate = gate(Rules::default(), false);
        for wrong in ["x".repeat(MAX_CALLER + 1), "a\tb".to_owned()] {
            assert_eq!(call(&gate, "Ping", None, Some(&wrong)).await.0, Code::InvalidArgument, "{wrong}");
        }
        assert_eq!(call(&gate, "Ping", None, Some(&"x".repeat(MAX_CALLER))).await.0, Code::Ok);
    }

    #[tokio::test]
    async fn what_the_settings_forbid_of_commands_is_forbidden_of_verbs_that_do_the_same() {
        let bounds = Bounds { block: vec!["guest-shutdown".to_owned()], ..Bounds::default() };
        let gate = gate(Rules { bounds, ..Rules::default() }, false);
        let mut calls = Vec::new();
        for path in ["Power/Shutdown", "Power/SuspendToMemory", "Guest/Ping"] {
            let request = Request::builder().uri(format!("/guestlet.v1.{path}")).body(()).unwrap();
            let answer = tower_service::Service::call(&mut gate.before(Willing), request).await.unwrap();
            let status = Status::from_header_map(answer.headers());
            calls.push(status.map(|status| (status.code(), status.message().to_owned())));
        }
        let words = "the settings of [qga] in this guest do not allow guest-shutdown";
        assert_eq!(calls, [Some((Code::PermissionDenied, words.to_owned())), None, None]);
    }
}
