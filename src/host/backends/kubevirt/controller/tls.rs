//! The leader's end of TLS: nodes see whether the CA vouches for it, and it sees whether the CA vouches for them. A node that
//! has no certificate yet is let in as nobody.

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

/// What is spoken inside (ALPN): gRPC.
pub const PROTOCOL: &[u8] = b"h2";

/// The leader's certificate, which is replaced when half of its time is over.
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

    /// The certificate for a handshake at this time.
    fn at(&self, now: SystemTime) -> Arc<CertifiedKey> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back counts as well: the certificate may not be valid yet.
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
    /// What the leader takes nodes in with. Whoever shows a certificate has one of the CA that is valid; whose it is says
    /// [`node_of`](super::certificates::node_of).
    ///
    /// # Errors
    /// If no certificate can be made.
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
        // A session that is taken up again would outlast the certificate that it began with.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }
}

#[cfg(test)]
mod tests;
