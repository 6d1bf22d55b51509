//! Requests to the API server with a deadline, and lists, which are read page by page.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Timeout for an answer, or for the headers of a streamed one.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Reason why a request has no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The answer did not arrive in time.
    #[error("the API server does not answer within {} s", DEADLINE.as_secs())]
    Late,
    /// The server refused the request, or cannot be reached.
    #[error(transparent)]
    Answered(#[from] kube::Error),
}

/// Selection of objects; all of them if nothing is set.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    /// Label selector.
    pub labels: Option<String>,
    /// Field selector.
    pub fields: Option<String>,
    /// True if the server may answer from its cache, with a state of any age. It then need not read all objects of the
    /// kind to find the selected ones, and returns all of them in one answer.
    pub may_be_old: bool,
}

/// Complete list of objects.
#[derive(Debug)]
pub struct Listed<K> {
    /// Objects from all pages.
    pub all: Vec<K>,
    /// Resource version of the list; empty if the server does not report one.
    pub version: String,
}

/// One page of a list, with the fields of each object that `S` has.
#[derive(Deserialize)]
struct Page<S> {
    metadata: ListMeta,
    #[serde(default = "Vec::new")]
    items: Vec<S>,
}

/// Waits for the answer to a request, for at most `DEADLINE`.
///
/// # Errors
/// If the answer does not arrive in time, or is an error.
pub async fn in_time<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Failed> {
    Ok(tokio::time::timeout(DEADLINE, request).await.map_err(|_| Failed::Late)??)
}

/// Lists all selected objects, with at most `page` of them in one answer, which bounds the memory that an answer
/// takes.
///
/// # Errors
/// If one of the requests fails.
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

/// Passes each object of the kind `K` to `found`, of one namespace or of all, with the fields that `S` has. An
/// answer has at most `page` objects, and none is kept after it was passed on.
///
/// # Errors
/// If one of the requests fails.
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
