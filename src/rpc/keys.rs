//! Requests of the host half that concern this guest's keys.

use std::fmt;
use std::sync::Arc;

use tonic::{Extensions, Status};

use crate::rpc::introduced::Binding;
use crate::sys::{blocking, error_chain};
use crate::trust::enrollment::Token;
use crate::trust::key::{KeyError, PublicKey};
use crate::trust::keyring::Keyring;
use crate::trust::{Fingerprint, Peer};
use crate::wire::proto::v1::replace_host_key_request::Step;

/// Finds the token that this guest was given; an error is why that cannot be found out. May block.
type FindToken = dyn Fn() -> Result<Option<Token>, String> + Send + Sync;

/// The keys, as the API needs them; clones share them.
#[derive(Clone)]
pub struct Keys {
    token: Arc<FindToken>,
    keyring: Keyring,
}

impl fmt::Debug for Keys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Keys")
    }
}

impl Keys {
    /// Creates the service for a guest whose enrollment token is returned by `token`.
    pub fn new(
        keyring: Keyring,
        token: impl Fn() -> Result<Option<Token>, String> + Send + Sync + 'static,
    ) -> Self {
        Self { token: Arc::new(token), keyring }
    }

    /// Prepares this guest's next key, or begins to use it.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` on a connection without keys, `INVALID_ARGUMENT` if `which` names no key, `INTERNAL` if it cannot
    /// be kept.
    pub async fn rotate(&self, request: &Extensions, which: &str) -> Result<PublicKey, Status> {
        let Some(Peer::Keyed(peer)) = request.get::<Arc<Peer>>().map(|peer| &**peer) else {
            return Err(Status::failed_precondition("this connection has no keys (TLS)"));
        };
        let which: Option<Fingerprint> = match which {
            "" => None,
            which => Some(which.parse().map_err(|error| Status::invalid_argument(format!("use: {error}")))?),
        };
        let rotated = self.keyring.change(peer.clone(), move |files, _| match which {
            None => files.prepare_next(),
            Some(which) => files.use_next(which),
        });
        rotated.await.map_err(|error| status(&error))
    }

    /// Lets the host half of a connection replace its own key.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` if it may not, `INVALID_ARGUMENT` if it says no key, `INTERNAL` if it cannot be kept.
    pub async fn replace_host_key(&self, request: &Extensions, step: Option<Step>) -> Result<(), Status> {
        let Some(Peer::Keyed(peer)) = request.get::<Arc<Peer>>().map(|peer| &**peer) else {
            return Err(status(&KeyError::NotReplaceable));
        };
        let peer = peer.clone();
        let replaced = match step {
            Some(Step::Next(spki)) => {
                let key = PublicKey::from_spki(&spki);
                let next = key.map_err(|_| Status::invalid_argument("next: it is not an Ed25519 key"))?;
                self.keyring.change(peer, move |files, peer| files.add_host(peer, next)).await
            }
            Some(Step::Retire(name)) => {
                let before =
                    name.parse().map_err(|error| Status::invalid_argument(format!("retire: {error}")))?;
                self.keyring.change(peer, move |files, peer| files.retire_host(peer, before)).await
            }
            None => return Err(Status::invalid_argument("step is missing")),
        };
        replaced.map_err(|error| status(&error))?;
        // Applies the new keys at once to new and existing connections.
        drop(self.keyring.standing().await);
        Ok(())
    }

    /// Forgets the keys, for root in the guest. Returns whether something still gives this guest keys.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` while file systems are frozen, `INTERNAL` if a file cannot be removed.
    pub async fn reset(&self) -> Result<bool, Status> {
        let is_keyed = self.keyring.reset().await.map_err(|error| status(&error))?;
        tracing::info!(is_keyed, "audit: a person in the guest: the keys are forgotten");
        Ok(is_keyed)
    }

    /// Shows on the connection of a request that this guest was given its token.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` without keys, or without a token.
    pub async fn proof(&self, request: &Extensions) -> Result<Vec<u8>, Status> {
        let binding = request.get::<Binding>().copied();
        let Binding(binding) =
            binding.ok_or_else(|| Status::failed_precondition("this connection has no keys (TLS)"))?;
        let find = Arc::clone(&self.token);
        match blocking::run(move || find()).await {
            Ok(Some(token)) => Ok(token.proof(&binding)),
            Ok(None) => Err(Status::failed_precondition("this guest was given no token (guestlet.enroll)")),
            Err(problem) => Err(Status::failed_precondition(format!("the token cannot be read: {problem}"))),
        }
    }
}

fn status(error: &KeyError) -> Status {
    let words = error_chain::words(error);
    match error {
        KeyError::NotReplaceable | KeyError::NoLongerTrusted | KeyError::Frozen(_) => {
            Status::failed_precondition(words)
        }
        _ => Status::internal(words),
    }
}
