//! Requests whose answers contain secrets. The Kubernetes client logs an answer that it cannot parse, and the
//! parser's error quotes it; so these answers are parsed here, and none of their contents is logged or returned
//! in an error.

use std::time::Duration;

use kube::api::{GetParams, PostParams};
use kube::core::Request;
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::api;

/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reason why a request has no usable answer.
#[derive(Debug)]
pub(super) struct Failure {
    /// HTTP status code of a refusal.
    pub(super) code: Option<u16>,
    /// Description for people.
    pub(super) words: String,
}

impl Failure {
    fn new(words: impl Into<String>) -> Self {
        Self { code: None, words: words.into() }
    }
}

/// Reads the object with this name in a namespace.
pub(super) async fn get<K>(client: &Client, namespace: &str, name: &str) -> Result<K, Failure>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let request = Request::new(K::url_path(&(), Some(namespace))).get(name, &GetParams::default());
    ask(client, request).await
}

/// Creates an object; returns it as the API server stores it.
pub(super) async fn create<K>(client: &Client, namespace: Option<&str>, object: &K) -> Result<K, Failure>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned,
{
    let body = serde_json::to_vec(object).map_err(|_| Failure::new("it cannot be written as JSON"))?;
    let request = Request::new(K::url_path(&(), namespace)).create(&PostParams::default(), body);
    ask(client, request).await
}

async fn ask<K: DeserializeOwned>(
    client: &Client,
    request: Result<http::Request<Vec<u8>>, impl std::error::Error>,
) -> Result<K, Failure> {
    let request = request.map_err(|error| Failure::new(error.to_string()))?;
    let asked = tokio::time::timeout(PATIENCE, client.request_text(request)).await;
    let late = |_| Failure::new(format!("the API server does not answer within {} s", PATIENCE.as_secs()));
    let text = asked
        .map_err(late)?
        .map_err(|error| Failure { code: api::code(&error), words: api::words(&error) })?;
    serde_json::from_str(&text).map_err(|_| Failure::new("the answer of the API server cannot be read"))
}
