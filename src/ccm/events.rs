//! Events of the cluster, with what people have to know of a Node or a Service. The same message about the
//! same object is recorded once per hour, however often it comes up. Each object gets a burst of a few events
//! and then one per minute, because the messages originate in guests and the API server is shared.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use tokio::time::Instant;

use crate::ccm::objects::{name, uid};
use crate::kubernetes::lists;
use crate::pace::{Count, Rate};

/// Component name in the events.
pub const COMPONENT: &str = "guestlet-ccm";
/// Namespace of events about cluster-scoped objects.
const DEFAULT_NAMESPACE: &str = "default";
/// Time after which the same message is recorded again.
const AGAIN: Duration = Duration::from_secs(3600);
/// Limit of the characters of a message; the API server accepts 1024.
const LONGEST: usize = 1000;
/// Limit of the messages that are remembered, and of the objects whose events are counted separately.
const MOST: usize = 4096;
/// Limit on the events of one object.
const RATE: Rate = Rate { burst: 10, again: Duration::from_secs(60) };

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Normal operation.
    Normal,
    /// Problem that needs attention.
    Warning,
}

/// Event that is to be recorded about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// Severity of the event.
    pub kind: Kind,
    /// Reason of the event, in one word.
    pub reason: String,
    /// Message for people.
    pub message: String,
}

impl News {
    /// Returns an event about normal operation.
    pub fn normal(reason: &str, message: impl Into<String>) -> Self {
        Self { kind: Kind::Normal, reason: reason.to_owned(), message: message.into() }
    }

    /// Returns an event about a problem.
    pub fn warning(reason: &str, message: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, reason: reason.to_owned(), message: message.into() }
    }
}

/// Recorder of events about the cluster's objects.
pub struct Recorder {
    client: Client,
    told: Mutex<Told>,
}

/// Record of past events, for deduplication and rate limits.
#[derive(Debug, Default)]
struct Told {
    /// Last message and its time, by UID and reason.
    words: BTreeMap<(String, String), (String, Instant)>,
    /// Number of events of each object, by UID.
    counted: BTreeMap<String, Count>,
}

impl Recorder {
    /// Creates a recorder that writes with this client.
    pub fn new(client: Client) -> Self {
        Self { client, told: Mutex::default() }
    }

    fn is_news(&self, uid: &str, news: &News) -> bool {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).is_news(uid, news, Instant::now())
    }

    /// Records an event about an object, and logs it. A failure to write the event is only logged.
    pub async fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, news: &News) {
        let meta = object.meta();
        if !self.is_news(uid(meta), news) {
            return;
        }
        let (kind, of) = (K::kind(&()), name(meta));
        match news.kind {
            Kind::Normal => {
                tracing::info!(object = %format_args!("{kind} {of}"), "{}: {}", news.reason, news.message);
            }
            Kind::Warning => {
                tracing::warn!(object = %format_args!("{kind} {of}"), "{}: {}", news.reason, news.message);
            }
        }
        let namespace = meta.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events = Api::<Event>::namespaced(self.client.clone(), namespace);
        let made =
            lists::in_time(events.create(&PostParams::default(), &event(object, namespace, news))).await;
        if let Err(error) = made {
            tracing::warn!("cannot write an event of the {kind} {of}: {error}");
        }
    }
}

impl Told {
    /// Reports whether this event about the object with that UID is to be recorded, and remembers it as recorded
    /// if so.
    fn is_news(&mut self, uid: &str, news: &News, now: Instant) -> bool {
        let key = (uid.to_owned(), news.reason.clone());
        let is_told = self.words.get(&key).is_some_and(|(words, when)| {
            *words == news.message && now.saturating_duration_since(*when) < AGAIN
        });
        if is_told || !self.has_room(uid, now) {
            return false;
        }
        if self.words.len() >= MOST {
            self.words.retain(|_, (_, when)| now.saturating_duration_since(*when) < AGAIN / 8);
        }
        if self.words.len() < MOST || self.words.contains_key(&key) {
            self.words.insert(key, (news.message.clone(), now));
        }
        true
    }

    /// Takes one event from the object's allowance and reports whether it was available. Objects beyond the limit
    /// of those that are counted separately share one allowance.
    fn has_room(&mut self, uid: &str, now: Instant) -> bool {
        if self.counted.len() >= MOST {
            self.counted.retain(|_, count| !count.is_over(now));
        }
        let is_known = self.counted.contains_key(uid) || self.counted.len() < MOST;
        let key = if is_known { uid } else { "" };
        self.counted.entry(key.to_owned()).or_insert_with(|| Count::new(now)).take(RATE, now)
    }
}

fn event<K: Resource<DynamicType = ()>>(object: &K, namespace: &str, news: &News) -> Event {
    let (meta, now) = (object.meta(), Time(Timestamp::now()));
    let message: String = news.message.chars().filter(|one| !one.is_control()).take(LONGEST).collect();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{:016x}", name(meta), fastrand::u64(..))),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(K::api_version(&()).into_owned()),
            kind: Some(K::kind(&()).into_owned()),
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            ..ObjectReference::default()
        },
        type_: Some(if news.kind == Kind::Normal { "Normal" } else { "Warning" }.to_owned()),
        reason: Some(news.reason.clone()),
        message: Some(message),
        source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: None }),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_object_that_changes_all_the_time_has_a_few_events() {
        let (mut told, start) = (Told::default(), Instant::now());
        let mut count = |uid: &str, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            let flaps =
                (0..1000).map(|turn| News::warning("BackendsUnhealthy", format!("node {} fails", turn % 2)));
            flaps.filter(|news| told.is_news(uid, news, now)).count()
        };
        assert_eq!((count("a", 0), count("a", 0), count("b", 0)), (10, 0, 10));
        assert_eq!((count("a", 59), count("a", 60), count("a", 61)), (0, 1, 0));
        assert_eq!(count("a", 3600), 10);
        let same = News::normal("Ready", "it is");
        let mut told = Told::default();
        assert!(told.is_news("a", &same, start) && !told.is_news("a", &same, start));
        assert!(told.is_news("a", &same, start + AGAIN));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let (mut told, now) = (Told::default(), Instant::now());
        let news = News::normal("Ready", "it is");
        let count = (0..20_000).filter(|number| told.is_news(&number.to_string(), &news, now)).count();
        assert_eq!((told.words.len(), told.counted.len()), (MOST, MOST + 1));
        assert_eq!(count, MOST + 10);
        assert!(told.is_news("later", &news, now + RATE.again * RATE.burst));
        assert!(told.counted.len() < 10);
    }
}
