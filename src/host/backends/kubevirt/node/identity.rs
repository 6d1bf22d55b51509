//! Identity of a node towards the controller: a key that is generated when the program starts and never leaves
//! it, and the certificate that the leader issues for it.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};

use crate::trust::certificate;
use crate::trust::tls::provider;

/// Application protocol (ALPN): HTTP/2, for gRPC.
const PROTOCOL: &[u8] = b"h2";

/// Reason why a node cannot talk to the leader.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The Lease contains no usable CA certificate.
    #[error("the Lease of the controllers has no certificate of a CA (PEM)")]
    Authority,
    /// The certificate that the leader issued is unusable.
    #[error("cannot use the certificate that the controller gave")]
    Certificate(#[source] rustls::Error),
    /// No key can be generated.
    #[error("cannot make a key")]
    Make(#[from] rcgen::Error),
}

/// Private key of a node.
#[derive(Debug)]
pub struct NodeKey(KeyPair);

impl NodeKey {
    /// Generates a key.
    ///
    /// # Errors
    /// If the kernel provides no random bytes.
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    /// Builds the request for a certificate (PKCS #10, DER). It contains no name, because the token identifies the
    /// node.
    ///
    /// # Errors
    /// If it cannot be signed.
    pub fn request(&self) -> Result<Vec<u8>, IdentityError> {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        Ok(parameters.serialize_request(&self.0)?.der().to_vec())
    }
}

/// Builds the TLS configuration for connections to the leader. It accepts only a server for which this CA
/// vouches as [`SERVER_NAME`](super::super::controller::certificates::SERVER_NAME), and presents the node's own
/// certificate, if it has one.
///
/// # Errors
/// If the text contains no CA certificate, or the node's certificate does not match its key.
pub fn client_config(
    authority_pem: &str,
    own: Option<(&NodeKey, &CertificateDer<'static>)>,
) -> Result<Arc<ClientConfig>, IdentityError> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_slice(authority_pem.as_bytes());
    roots.add(authority.map_err(|_| IdentityError::Authority)?).map_err(|_| IdentityError::Authority)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(IdentityError::Certificate)?
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((NodeKey(key), certificate)) => {
            let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
            let chain = vec![certificate.clone()];
            builder.with_client_auth_cert(chain, key).map_err(IdentityError::Certificate)?
        }
    };
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns the time after which a certificate is to be renewed, counted from its issue: half of its validity.
/// This needs no clock, and so works even if the node's clock is wrong. `None` if the certificate cannot be
/// parsed.
pub fn renew_after(certificate: &CertificateDer<'_>) -> Option<Duration> {
    let (from, to) = (certificate::begins(certificate)?, certificate::ends(certificate)?);
    Some(Duration::from_secs(to.as_secs().saturating_sub(from.as_secs())) / 2)
}
