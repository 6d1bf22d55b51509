//! TLS on the leader's side: nodes verify that the CA vouches for it, and it verifies that the CA vouches for
//! them. A node without a certificate is accepted as an anonymous client.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{RootCertStore, ServerConfig};

use super::certificates::{Ca, CaError, LASTING};
use crate::trust::tls::provider;

/// Application protocol (ALPN): HTTP/2, for gRPC.
pub const PROTOCOL: &[u8] = b"h2";

/// Certificate of the leader, which is replaced after half of its validity.
#[derive(Debug)]
struct Leader {
    ca: Arc<Ca>,
    made: Mutex<(SystemTime, Arc<CertifiedKey>)>,
}

impl Leader {
    fn new(ca: Arc<Ca>) -> Result<Self, CaError> {
        let made = certify(&ca)?;
        Ok(Self { ca, made: Mutex::new((SystemTime::now(), made)) })
    }

    /// Returns the certificate for a handshake at this time.
    fn at(&self, now: SystemTime) -> Arc<CertifiedKey> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        // If the clock was set back, the certificate may not be valid yet, so replace it then too.
        let is_good = now.duration_since(made.0).is_ok_and(|age| age < LASTING / 2);
        if !is_good {
            match certify(&self.ca) {
                Ok(new) => *made = (now, new),
                Err(error) => tracing::error!("the certificate of the controller cannot be renewed: {error}"),
            }
        }
        Arc::clone(&made.1)
    }
}

fn certify(ca: &Ca) -> Result<Arc<CertifiedKey>, CaError> {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let certificate = ca.server_certificate(&pair)?;
    let key = any_ecdsa_type(&PrivateKeyDer::Pkcs8(pair.serialize_der().into()))?;
    Ok(Arc::new(CertifiedKey::new(vec![certificate], key)))
}

impl ResolvesServerCert for Leader {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.at(SystemTime::now()))
    }
}

impl Ca {
    /// Builds the TLS configuration for connections from nodes. A peer that shows a certificate has a valid one of
    /// this CA; use [`node_of`](super::certificates::node_of) to get the node's name.
    ///
    /// # Errors
    /// If no certificate can be generated.
    pub fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, CaError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate().clone())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            .allow_unauthenticated()
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(Leader::new(Arc::clone(self))?));
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A resumed session could outlast the certificate that it began with.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }
}

#[cfg(test)]
mod tests;
