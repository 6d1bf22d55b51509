//! Requests to the API server, each with a timeout, and the meaning of its refusals.

use std::time::Duration;

use kube::api::{Api, ListParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::Error;
use super::access::ApiServer;
use super::error::cause;

/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(30);
/// Objects in one page of a list.
const PAGE: u32 = 500;

/// Request to the API server, in the terms of roles.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Description, such as `list guests`.
    pub what: &'static str,
    /// Verb that a role has to grant.
    pub verb: &'static str,
    /// Resource, as in a role.
    pub resource: &'static str,
    /// Namespace; `None` for all namespaces.
    pub namespace: Option<&'a str>,
    /// Packaged role with this permission, and how to grant it.
    pub role: &'static str,
}

impl ApiServer {
    /// Waits for an answer, with a timeout.
    ///
    /// # Errors
    /// Fails with the meaning of the refusal.
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

    /// Lists all objects that match `parameters`, page by page.
    ///
    /// # Errors
    /// The errors of [`ApiServer::ask`].
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

/// Returns the API for objects of one namespace, or of all.
fn in_namespace<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}
