//! Requests to the API server, each with a deadline, and what its refusals mean.

use std::time::Duration;

use kube::api::{Api, ListParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::Error;
use super::access::ApiServer;
use super::error::cause;

/// How long the API server may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Objects in one answer to a list.
const PAGE: u32 = 500;

/// What is asked for, in the words of roles.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// In words, such as `list guests`.
    pub what: &'static str,
    /// The verb that a role needs.
    pub verb: &'static str,
    /// The resource.
    pub resource: &'static str,
    /// The namespace; none is all of them.
    pub namespace: Option<&'a str>,
    /// The packaged role that has it, and how somebody is given it.
    pub role: &'static str,
}

impl ApiServer {
    /// Waits for an answer, but not for ever.
    ///
    /// # Errors
    /// What a refusal means.
    pub async fn ask<T>(
        &self,
        asked: Asked<'_>,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(PATIENCE, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.meaning(asked, error)),
            Err(_) => Err(Error::Late(self.url.clone())),
        }
    }

    fn meaning(&self, asked: Asked<'_>, error: kube::Error) -> Error {
        let kube::Error::Api(status) = error else {
            return match error {
                kube::Error::Auth(error) => Error::Credentials(self.url.clone(), error.to_string()),
                kube::Error::SerdeError(error) => {
                    Error::Refused { what: asked.what, message: format!("something unexpected ({error})") }
                }
                error => Error::Unreachable { url: self.url.clone(), why: cause(&error) },
            };
        };
        let Asked { what, verb, resource, namespace, role } = asked;
        match status.code {
            401 => Error::Unauthorized(self.url.clone()),
            403 => {
                let place =
                    namespace.map_or("all namespaces".to_owned(), |name| format!("the namespace {name}"));
                Error::Forbidden { message: status.message.clone(), verb, resource, place, role }
            }
            _ => Error::Refused { what, message: status.message.clone() },
        }
    }

    /// All objects that `parameters` select, page by page.
    ///
    /// # Errors
    /// As [`ApiServer::ask`].
    pub async fn list<K>(&self, asked: Asked<'_>, parameters: ListParams) -> Result<Vec<K>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api: Api<K> = in_namespace(&self.client, asked.namespace);
        let mut all = Vec::new();
        let mut parameters = parameters.limit(PAGE);
        loop {
            let page = self.ask(asked, api.list(&parameters)).await?;
            all.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(all),
            }
        }
    }
}

/// Objects of one namespace, or of all.
fn in_namespace<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}
