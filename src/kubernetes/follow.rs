//! Follows objects of the API: lists them once, and reports each change from then on.
//!
//! ```text
//!  list ──▶ watch from there ──ends──▶ watch from the newest version seen
//!   ▲ └─fails: wait, again    │  └──fails: wait, again; the third time in a row ──▶ list
//!   └──────────too old (410)──┘
//! ```
//!
//! The first list may be served from the server's cache if the [`Selector`] permits it: a watch from its version
//! reports what has changed since. Later lists are up to date.
//!
//! While nothing happens no requests are made, except that the server ends a watch every few minutes and a new one
//! is started.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use kube::api::{Api, WatchEvent, WatchParams};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::lists::{self, Failed, Listed, Selector};
use super::standing::Teller;
use crate::sys::error_chain;

/// Number of objects in one answer to a list, which bounds the memory that an answer takes.
const PAGE: u32 = 100;
/// Time after which the server is asked to end a watch, in seconds.
const WATCH_SECONDS: u32 = 290;
/// Time after which a silent watch counts as dead: longer than the server was asked to keep it.
const SILENCE: Duration = Duration::from_secs(300);
/// Minimum duration of a watch; after a shorter one, the next one is delayed.
const LASTING: Duration = Duration::from_secs(5);
/// Delays between two attempts: the first one, and the maximum.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Number of failures in a row after which all objects are listed again.
const LIST_AGAIN: u32 = 3;

/// Report about the objects that are followed.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard<K> {
    /// These are all objects.
    All(Vec<K>),
    /// This object is new, or has changed.
    There(K),
    /// This object was deleted, or the selector no longer matches it.
    Gone(K),
}

impl<K> Heard<K> {
    /// Converts each object; objects for which `make` returns none are left out, and so is a report about such an
    /// object.
    pub fn map<T>(self, mut make: impl FnMut(K) -> Option<T>) -> Option<Heard<T>> {
        match self {
            Self::All(all) => Some(Heard::All(all.into_iter().filter_map(make).collect())),
            Self::There(object) => make(object).map(Heard::There),
            Self::Gone(object) => make(object).map(Heard::Gone),
        }
    }
}

/// Follows the objects of `api` without end. Failures are retried, and reported to `teller` if there is one.
pub fn follow<K>(
    api: Api<K>,
    selector: Selector,
    teller: Option<Teller>,
) -> impl Stream<Item = Heard<K>> + Send
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let follower = Follower { api, selector, teller, at: At::Start, failures: 0 };
    stream::unfold(follower, |mut follower| async move {
        let heard = follower.next().await;
        Some((heard, follower))
    })
}

struct Follower<K> {
    api: Api<K>,
    selector: Selector,
    teller: Option<Teller>,
    at: At<K>,
    /// Number of failures in a row.
    failures: u32,
}

/// Progress of a follower.
enum At<K> {
    /// No version is known: list first.
    Start,
    /// Everything is known up to this version: watch from it.
    Version(String),
    /// Everything is known up to this version, and a watch reports what follows.
    Watching { version: String, stream: BoxStream<'static, kube::Result<WatchEvent<K>>>, since: Instant },
}

/// Reason why a step failed.
enum Failure {
    /// The version is too old for the server to continue from it.
    Expired,
    /// The watch ended early.
    Ended,
    /// Another reason, described for users.
    Other(String),
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 410 => Self::Expired,
            kube::Error::Api(status) => Self::Other(status.message.clone()),
            error => Self::Other(error_chain::words(&error)),
        }
    }
}

impl From<Failed> for Failure {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Answered(error) => error.into(),
            Failed::Late => Self::Other(failed.to_string()),
        }
    }
}

impl<K> Follower<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    async fn next(&mut self) -> Heard<K> {
        loop {
            match self.step().await {
                Ok(Some(heard)) => return heard,
                Ok(None) => {}
                Err(failure) => self.failed(failure).await,
            }
        }
    }

    async fn step(&mut self) -> Result<Option<Heard<K>>, Failure> {
        match std::mem::replace(&mut self.at, At::Start) {
            At::Start => {
                let (all, version) = self.list().await?;
                self.at = At::Version(version);
                Ok(Some(Heard::All(all)))
            }
            At::Version(version) => {
                let stream = match self.watch(&version).await {
                    Err(Failure::Expired) => return Err(Failure::Expired),
                    Err(failure) => {
                        self.at = At::Version(version);
                        return Err(failure);
                    }
                    Ok(stream) => stream,
                };
                if let Some(teller) = &self.teller {
                    teller.well();
                }
                self.at = At::Watching { version, stream, since: Instant::now() };
                Ok(None)
            }
            At::Watching { version, mut stream, since } => {
                let next = tokio::time::timeout(SILENCE, stream.next()).await;
                self.heard(version, stream, since, next.unwrap_or_default())
            }
        }
    }

    fn heard(
        &mut self,
        version: String,
        stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
        since: Instant,
        next: Option<kube::Result<WatchEvent<K>>>,
    ) -> Result<Option<Heard<K>>, Failure> {
        let event = match next {
            None => {
                self.at = At::Version(version);
                if since.elapsed() < LASTING {
                    return Err(Failure::Ended);
                }
                return Ok(None);
            }
            Some(Err(error)) => Err(Failure::from(error)),
            Some(Ok(WatchEvent::Error(status))) => Err(Failure::from(kube::Error::Api(status))),
            Some(Ok(event)) => Ok(event),
        };
        let event = match event {
            Err(Failure::Expired) => return Err(Failure::Expired),
            Err(failure) => {
                self.at = At::Version(version);
                return Err(failure);
            }
            Ok(event) => event,
        };
        let newer = match &event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object) => {
                object.resource_version()
            }
            WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version.clone()),
            WatchEvent::Error(_) => None,
        };
        self.failures = 0;
        self.at = At::Watching { version: newer.unwrap_or(version), stream, since };
        Ok(match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Some(Heard::There(object)),
            WatchEvent::Deleted(object) => Some(Heard::Gone(object)),
            WatchEvent::Bookmark(_) | WatchEvent::Error(_) => None,
        })
    }

    /// Lists all objects, with the version of the list.
    async fn list(&mut self) -> Result<(Vec<K>, String), Failure> {
        let Listed { all, version } = lists::all(&self.api, &self.selector, PAGE).await?;
        // From now on, versions only increase.
        self.selector.may_be_old = false;
        if version.is_empty() {
            return Err(Failure::Other("a list has no resourceVersion".to_owned()));
        }
        Ok((all, version))
    }

    async fn watch(
        &mut self,
        version: &str,
    ) -> Result<BoxStream<'static, kube::Result<WatchEvent<K>>>, Failure> {
        let params = WatchParams {
            label_selector: self.selector.labels.clone(),
            field_selector: self.selector.fields.clone(),
            timeout: Some(WATCH_SECONDS),
            bookmarks: true,
            send_initial_events: false,
        };
        Ok(lists::in_time(self.api.watch(&params, version)).await?.boxed())
    }

    /// Reports a failure, and waits before the next step.
    async fn failed(&mut self, failure: Failure) {
        self.failures += 1;
        // The server's cache may be too old to continue from its version.
        self.selector.may_be_old = false;
        match failure {
            // Both are normal. The next step shows whether following still works.
            Failure::Expired | Failure::Ended => {}
            Failure::Other(words) => {
                if let Some(teller) = &self.teller {
                    teller.failed(&words);
                } else {
                    tracing::debug!("cannot watch {}: {words}", K::plural(&()));
                }
            }
        }
        if self.failures.is_multiple_of(LIST_AGAIN) {
            self.at = At::Start;
        }
        let longest = FIRST_WAIT.saturating_mul(1 << self.failures.min(16)).min(LONGEST_WAIT);
        // Randomised, so that nodes that lost their connections together do not all reconnect at once.
        tokio::time::sleep(longest.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::pin::pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll};

    use http::{Request, Response, StatusCode};
    use k8s_openapi::api::core::v1::Node;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::watch;

    use super::super::standing::Problems;
    use super::*;

    /// API server that gives these answers one after the other, and does not answer further requests; it records the
    /// queries.
    #[derive(Clone)]
    struct Server {
        answers: Arc<Mutex<VecDeque<(StatusCode, String)>>>,
        asked: Arc<Mutex<Vec<String>>>,
    }

    impl tower_service::Service<Request<Body>> for Server {
        type Response = Response<String>;
        type Error = kube::Error;
        type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<String>, kube::Error>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), kube::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            self.asked.lock().unwrap().push(request.uri().query().unwrap_or_default().to_owned());
            let next = self.answers.lock().unwrap().pop_front();
            Box::pin(async move {
                let Some((status, body)) = next else { return std::future::pending().await };
                Ok(Response::builder().status(status).body(body).unwrap())
            })
        }
    }

    fn node(name: &str, version: &str) -> Value {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "resourceVersion": version } })
    }

    fn list(nodes: &[Value], version: &str, next: &str) -> (StatusCode, String) {
        let metadata = json!({ "resourceVersion": version, "continue": next });
        let list = json!({ "apiVersion": "v1", "kind": "NodeList", "metadata": metadata, "items": nodes });
        (StatusCode::OK, list.to_string())
    }

    fn failure(status: StatusCode) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": format!("it is {status}"),
            "reason": "", "code": status.as_u16(),
        })
    }

    fn event(kind: &str, object: &Value) -> String {
        json!({ "type": kind, "object": object }).to_string() + "\n"
    }

    /// Follows a server with these answers; returns the reports, the queries that the server received, and the
    /// problems.
    async fn followed(
        answers: Vec<(StatusCode, String)>,
        count: usize,
    ) -> (Vec<Heard<String>>, Vec<String>, Problems) {
        let selector = Selector { fields: Some("metadata.name=a".into()), ..Selector::default() };
        followed_by(selector, answers, count).await
    }

    async fn followed_by(
        selector: Selector,
        answers: Vec<(StatusCode, String)>,
        count: usize,
    ) -> (Vec<Heard<String>>, Vec<String>, Problems) {
        let server = Server { answers: Arc::new(Mutex::new(answers.into())), asked: Arc::default() };
        let (asked, client) = (Arc::clone(&server.asked), kube::Client::new(server, "default"));
        let (problems, told) = watch::channel(Problems::new());
        let teller = Teller::new("nodes", problems, Arc::new(|| ()));
        let mut heard = pin!(follow(Api::<Node>::all(client), selector, Some(teller)));
        let name = |node: Node| node.metadata.name.unwrap();
        let mut names = Vec::new();
        for _ in 0..count {
            names.push(match heard.next().await.unwrap() {
                Heard::All(all) => Heard::All(all.into_iter().map(name).collect()),
                Heard::There(node) => Heard::There(name(node)),
                Heard::Gone(node) => Heard::Gone(name(node)),
            });
        }
        let asked = asked.lock().unwrap().clone();
        let told = told.borrow().clone();
        (names, asked, told)
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_cut_goes_on_where_it_was_and_what_is_too_old_begins_anew() {
        let bookmark = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "resourceVersion": "9" } });
        let gone = StatusCode::GONE;
        let answers = vec![
            list(&[node("a", "1")], "5", "more"),
            list(&[node("b", "2")], "5", ""),
            (StatusCode::OK, event("ADDED", &node("c", "6")) + "{\"type\":\"MODIFI"),
            (StatusCode::OK, event("DELETED", &node("c", "8")) + &event("BOOKMARK", &bookmark)),
            (StatusCode::OK, event("ERROR", &failure(gone))),
            (StatusCode::INTERNAL_SERVER_ERROR, failure(StatusCode::INTERNAL_SERVER_ERROR).to_string()),
            list(&[node("b", "2")], "20", ""),
            (gone, failure(gone).to_string()),
            list(&[], "30", ""),
            (StatusCode::OK, event("MODIFIED", &node("d", "31"))),
        ];
        let (heard, asked, told) = followed(answers, 6).await;
        let all = |names: &[&str]| Heard::All(names.iter().map(|&name| name.to_owned()).collect());
        let expected = [
            all(&["a", "b"]),
            Heard::There("c".into()),
            Heard::Gone("c".into()),
            all(&["b"]),
            all(&[]),
            Heard::There("d".into()),
        ];
        assert_eq!(heard, expected);
        let from = |query: &String| {
            let value =
                |key: &str| query.split('&').find_map(|part| part.strip_prefix(key)).map(str::to_owned);
            if query.contains("watch=true") { value("resourceVersion=") } else { value("continue=") }
        };
        let from: Vec<_> = asked.iter().map(from).collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(from[..5], [None, some("more"), some("5"), some("6"), some("9")]);
        assert_eq!(from[5..], [None, None, some("20"), None, some("30")]);
        assert!(asked.iter().all(|query| query.contains("fieldSelector=metadata.name%3Da")), "{asked:?}");
        assert_eq!(told, Problems::new(), "it is well again");
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_list_may_be_old() {
        let gone = (StatusCode::GONE, failure(StatusCode::GONE).to_string());
        let answers = vec![list(&[], "5", ""), gone.clone(), list(&[], "7", ""), gone, list(&[], "9", "")];
        let selector = Selector { may_be_old: true, ..Selector::default() };
        let (heard, asked, _) = followed_by(selector.clone(), answers, 3).await;
        assert_eq!(heard.len(), 3);
        let is_old = |query: &String| query.split('&').any(|part| part == "resourceVersion=0");
        assert!(is_old(&asked[0]) && !asked[0].contains("limit="), "{asked:?}");
        assert!(!asked[1..].iter().any(is_old), "{asked:?}");

        let late = (StatusCode::GATEWAY_TIMEOUT, failure(StatusCode::GATEWAY_TIMEOUT).to_string());
        let (_, asked, _) = followed_by(selector, vec![late, list(&[], "5", "")], 1).await;
        assert!(is_old(&asked[0]) && !is_old(&asked[1]), "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_silent_is_asked_again() {
        let begin = Instant::now();
        // The watch is never answered; with paused time, its deadline passes at once.
        let following = followed(vec![list(&[], "5", "")], 2);
        assert!(tokio::time::timeout(lists::DEADLINE * 3, following).await.is_err());
        assert!(begin.elapsed() >= lists::DEADLINE * 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_fails_again_and_again_is_begun_with_a_list() {
        let forbidden = (StatusCode::FORBIDDEN, failure(StatusCode::FORBIDDEN).to_string());
        let broken =
            vec![list(&[], "5", ""), forbidden.clone(), forbidden.clone(), forbidden, list(&[], "6", "")];
        let (heard, asked, told) = followed(broken, 2).await;
        assert_eq!((heard.len(), asked.len()), (2, 5));
        assert_eq!(told["nodes"], "it is 403 Forbidden");
    }
}
