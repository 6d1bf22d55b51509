//! Requests to the API server that have a deadline, and lists, which come page by page.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// How long the server may take for an answer, or for the head of one that goes on.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// It did not come in time.
    #[error("the API server does not answer within {} s", DEADLINE.as_secs())]
    Late,
    /// It says no, or cannot be asked.
    #[error(transparent)]
    Answered(#[from] kube::Error),
}

/// Which objects are meant; all, if nothing is said.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    /// By their labels.
    pub labels: Option<String>,
    /// By their fields.
    pub fields: Option<String>,
    /// As they were at any time will do, as the server has them in its memory: it need not read all objects of the kind to find those
    /// that are meant. All come in one answer then.
    pub may_be_old: bool,
}

/// All objects of a list.
#[derive(Debug)]
pub struct Listed<K> {
    /// The objects.
    pub all: Vec<K>,
    /// The version at which they were so; empty if the server does not say it.
    pub version: String,
}

/// One answer to a list, whatever is read of each object.
#[derive(Deserialize)]
struct Page<S> {
    metadata: ListMeta,
    #[serde(default = "Vec::new")]
    items: Vec<S>,
}

/// The answer to a request, if it comes in time.
///
/// # Errors
/// If it does not, or is none.
pub async fn in_time<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Failed> {
    Ok(tokio::time::timeout(DEADLINE, request).await.map_err(|_| Failed::Late)??)
}

/// All objects that are meant, with at most so many in one answer: what one takes in memory is bounded by that.
///
/// # Errors
/// If one of the answers does not come.
pub async fn all<K>(api: &Api<K>, selector: &Selector, page: u32) -> Result<Listed<K>, Failed>
where
    K: Clone + Debug + DeserializeOwned,
{
    let (mut all, mut next) = (Vec::new(), None);
    loop {
        let version =
            if selector.may_be_old { ListParams::default().match_any() } else { ListParams::default() };
        let parameters = ListParams {
            label_selector: selector.labels.clone(),
            field_selector: selector.fields.clone(),
            limit: (!selector.may_be_old).then_some(page),
            continue_token: next.take(),
            ..version
        };
        let list = in_time(api.list(&parameters)).await?;
        all.extend(list.items);
        next = list.metadata.continue_.filter(|token| !token.is_empty());
        if next.is_none() {
            return Ok(Listed { all, version: list.metadata.resource_version.unwrap_or_default() });
        }
    }
}

/// Hands on each object of the kind `K`, of a namespace or of all, as far as `S` has it. There are at most so many in one
/// answer, and of those that were handed on nothing is kept.
///
/// # Errors
/// If one of the answers does not come.
pub async fn each<K, S>(
    client: &Client,
    namespace: Option<&str>,
    page: u32,
    mut found: impl FnMut(S),
) -> Result<(), Failed>
where
    K: Resource<DynamicType = ()>,
    S: DeserializeOwned,
{
    let list = kube::core::Request::new(K::url_path(&(), namespace));
    let mut next = None;
    loop {
        let parameters =
            ListParams { limit: Some(page), continue_token: next.take(), ..ListParams::default() };
        let request = list.list(&parameters).map_err(kube::Error::BuildRequest)?;
        let Page { metadata, items } = in_time(client.request::<Page<S>>(request)).await?;
        items.into_iter().for_each(&mut found);
        next = metadata.continue_.filter(|token| !token.is_empty());
        if next.is_none() {
            return Ok(());
        }
    }
}
