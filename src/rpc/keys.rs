//! What the host half asks of this guest's keys.

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
    /// Those of a guest whose token `token` finds.
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
        if !matches!(request.get::<Arc<Peer>>().map(|peer| &**peer), Some(Peer::Keyed(_))) {
            return Err(Status::failed_precondition("this connection has no keys (TLS)"));
        }
        let which: Option<Fingerprint> = match which {
            "" => None,
            which => Some(which.parse().map_err(|error| Status::invalid_argument(format!("use: {error}")))?),
        };
        let rotated = self.keyring.change(move |files| match which {
            None => files.prepare_next(),
            Some(which) => files.use_next(which),
        });
        rotated.await.map_err(|error| Status::internal(error_chain::words(&error)))
    }

    /// Lets the host half of a connection replace its own key.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` if it may not, `INVALID_ARGUMENT` if it says no key, `INTERNAL` if it cannot be kept.
    pub async fn replace_host_key(&self, request: &Extensions, step: Option<Step>) -> Result<(), Status> {
        let peer = request.get::<Arc<Peer>>().map(Arc::clone);
        let keyed = move || match peer.as_deref() {
            Some(Peer::Keyed(keyed)) => Ok(keyed.clone()),
            _ => Err(KeyError::NotReplaceable),
        };
        let replaced = match step {
            Some(Step::Next(spki)) => {
                let key = PublicKey::from_spki(&spki);
                let next = key.map_err(|_| Status::invalid_argument("next: it is no Ed25519 key"))?;
                self.keyring.change(move |files| files.add_host(&keyed()?, next)).await
            }
            Some(Step::Retire(name)) => {
                let before =
                    name.parse().map_err(|error| Status::invalid_argument(format!("retire: {error}")))?;
                self.keyring.change(move |files| files.retire_host(&keyed()?, before)).await
            }
            None => return Err(Status::invalid_argument("step is missing")),
        };
        replaced.map_err(|error| match error {
            KeyError::NotReplaceable => Status::failed_precondition(error.to_string()),
            error => Status::internal(error_chain::words(&error)),
        })?;
        // Who is let in, and who may stay, follows at once.
        drop(self.keyring.standing().await);
        Ok(())
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
