//! Who a node is to the controller: a key that is made when the program starts and never leaves it, and the certificate that
//! the leader gives for it.

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

/// What is spoken inside (ALPN): gRPC.
const PROTOCOL: &[u8] = b"h2";

/// Why a node cannot speak with the leader.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// What the Lease has.
    #[error("the Lease of the controllers has no certificate of a CA (PEM)")]
    Authority,
    /// What the leader gave.
    #[error("cannot use the certificate that the controller gave")]
    Certificate(#[source] rustls::Error),
    /// No key can be made.
    #[error("cannot make a key")]
    Make(#[from] rcgen::Error),
}

/// The key of a node.
#[derive(Debug)]
pub struct NodeKey(KeyPair);

impl NodeKey {
    /// Makes a new one.
    ///
    /// # Errors
    /// If the kernel gives no random bytes.
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    /// The request for a certificate (PKCS #10, DER). It names nobody: who the node is says its token.
    ///
    /// # Errors
    /// If it cannot be signed.
    pub fn request(&self) -> Result<Vec<u8>, IdentityError> {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        Ok(parameters.serialize_request(&self.0)?.der().to_vec())
    }
}

/// What a node dials the leader with: it takes only one for whom this CA vouches as
/// [`SERVER_NAME`](super::super::controller::certificates::SERVER_NAME), and shows its own certificate if it has one.
///
/// # Errors
/// If there is no CA in the text, or the certificate is not for the key.
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

/// How long after it was given a certificate is to be replaced: half of the time that it is valid. This asks no clock, and so
/// does not depend on whether that of the node is right. `None` if it is none.
pub fn renew_after(certificate: &CertificateDer<'_>) -> Option<Duration> {
    let (from, to) = (certificate::begins(certificate)?, certificate::ends(certificate)?);
    Some(Duration::from_secs(to.as_secs().saturating_sub(from.as_secs())) / 2)
}
