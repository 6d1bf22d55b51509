//! Follows objects of the API: lists them once, and hears of each change from then on.
//!
//! ```text
//!  list ──▶ watch from there ──ends──▶ watch from the newest that was heard
//!   ▲ └─fails: wait, again    │  └──fails: wait, again; the third time in a row ──▶ list
//!   └──────────too old (410)──┘
//! ```
//!
//! While nothing happens nothing is asked for, but that a watch is begun again every few minutes, when the server ends it.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::host::backends::kubevirt::standing::Teller;
use crate::host::text;

/// Objects in one answer to a list: what one answer takes in memory is bounded by it.
const PAGE: u32 = 100;
/// How long the server may take for an answer, or for the head of one that goes on.
const PATIENCE: Duration = Duration::from_secs(30);
/// When the server is to end a watch, in seconds.
const WATCH_SECONDS: u32 = 290;
/// A watch that is silent for longer than the server was to let it live is dead.
const SILENCE: Duration = Duration::from_secs(300);
/// A watch that ended sooner is begun again after a wait.
const LASTING: Duration = Duration::from_secs(5);
/// Between two tries, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Failures in a row after which all is listed again.
const LIST_AGAIN: u32 = 3;

/// What is heard of objects.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard<K> {
    /// These are all that there are.
    All(Vec<K>),
    /// This one is new, or another than before.
    There(K),
    /// This one is gone, or none of those that are followed any more.
    Gone(K),
}

/// Which objects are followed.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    /// By their labels.
    pub labels: Option<String>,
    /// By their fields.
    pub fields: Option<String>,
}

/// Follows the objects of `api`, for ever. What goes wrong is told, and passes.
pub fn follow<K>(api: Api<K>, selector: Selector, teller: Teller) -> impl Stream<Item = Heard<K>> + Send
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
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
    teller: Teller,
    at: At<K>,
    /// In a row.
    failures: u32,
}

/// How far a follower is.
enum At<K> {
    /// Nothing is known.
    Start,
    /// All is known up to this version.
    Version(String),
    /// The same, and more is heard since then.
    Watching { version: String, stream: BoxStream<'static, kube::Result<WatchEvent<K>>>, since: Instant },
}

/// Why a step failed.
enum Failure {
    /// What was known is too old to go on from there.
    Expired,
    /// The watch has ended sooner than it should.
    Ended,
    /// In words for people.
    Other(String),
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 410 => Self::Expired,
            kube::Error::Api(status) => Self::Other(status.message.clone()),
            error => Self::Other(text::chain(&error)),
        }
    }
}

impl<K> Follower<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
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
                self.teller.well();
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

    /// All objects, and the version at which they were so.
    async fn list(&mut self) -> Result<(Vec<K>, String), Failure> {
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let page = ListParams {
                label_selector: self.selector.labels.clone(),
                field_selector: self.selector.fields.clone(),
                limit: Some(PAGE),
                continue_token: next.take(),
                ..ListParams::default()
            };
            let list = answer(self.api.list(&page)).await?;
            all.extend(list.items);
            next = list.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                let version = list.metadata.resource_version.filter(|version| !version.is_empty());
                let version = version.ok_or_else(|| Failure::Other("a list has no version".to_owned()))?;
                return Ok((all, version));
            }
        }
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
        Ok(answer(self.api.watch(&params, version)).await?.boxed())
    }

    /// Tells what went wrong, and waits.
    async fn failed(&mut self, failure: Failure) {
        self.failures += 1;
        match failure {
            // That happens, and what comes next says whether it goes on.
            Failure::Expired | Failure::Ended => {}
            Failure::Other(words) => self.teller.failed(&words),
        }
        if self.failures.is_multiple_of(LIST_AGAIN) {
            self.at = At::Start;
        }
        let longest = FIRST_WAIT.saturating_mul(1 << self.failures.min(16)).min(LONGEST_WAIT);
        // Nodes that were all cut off at once do not come back all at once.
        tokio::time::sleep(longest.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

async fn answer<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(answered) => Ok(answered?),
        Err(_) => Err(Failure::Other(format!("no answer within {} s", PATIENCE.as_secs()))),
    }
}
