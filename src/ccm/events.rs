//! Events of the cluster: what people have to know of a Node or a Service. The same words about the same object are told once in an
//! hour, however often they come up.

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

/// The name under which events are written.
pub const COMPONENT: &str = "guestlet-ccm";
/// The namespace of events of objects that are in none.
const DEFAULT_NAMESPACE: &str = "default";
/// When the same is told again.
const AGAIN: Duration = Duration::from_secs(3600);
/// Characters of the words; the API server takes 1024.
const LONGEST: usize = 1000;
/// Things that are remembered to have been told.
const MOST: usize = 4096;

/// Whether something is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It is well.
    Normal,
    /// Somebody has to look at it.
    Warning,
}

/// What is to be told of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// Whether something is wrong.
    pub kind: Kind,
    /// One word.
    pub reason: String,
    /// In words.
    pub message: String,
}

impl News {
    /// That all is well.
    pub fn normal(reason: &str, message: impl Into<String>) -> Self {
        Self { kind: Kind::Normal, reason: reason.to_owned(), message: message.into() }
    }

    /// That something is wrong.
    pub fn warning(reason: &str, message: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, reason: reason.to_owned(), message: message.into() }
    }
}

/// Tells the cluster.
pub struct Recorder {
    client: Client,
    told: Mutex<BTreeMap<(String, String), (String, Instant)>>,
}

impl Recorder {
    /// One that writes with this client.
    pub fn new(client: Client) -> Self {
        Self { client, told: Mutex::default() }
    }

    /// Whether this is news of the object with that UID. It is not, from then on.
    fn is_new(&self, uid: &str, news: &News) -> bool {
        let now = Instant::now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() >= MOST {
            told.retain(|_, (_, when)| now.saturating_duration_since(*when) < AGAIN / 8);
        }
        let key = (uid.to_owned(), news.reason.clone());
        let is_told = told.get(&key).is_some_and(|(words, when)| {
            *words == news.message && now.saturating_duration_since(*when) < AGAIN
        });
        if !is_told && told.len() < MOST {
            told.insert(key, (news.message.clone(), now));
        }
        !is_told
    }

    /// Tells something of an object. What cannot be told is logged.
    pub async fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, news: &News) {
        let meta = object.meta();
        if !self.is_new(uid(meta), news) {
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
