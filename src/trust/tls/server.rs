//! The guest's end of TLS.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
};

use super::{PROTOCOL, SCHEMES, private, provider};
use crate::trust::certificate;
use crate::trust::key::Key;

/// Decides whether a host half may come in with its certificate, and those that it sends after it.
pub(in crate::trust) trait Doorkeeper: std::fmt::Debug + Send + Sync {
    /// # Errors
    /// The reason for the refusal, as a TLS error.
    fn let_in(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
    ) -> Result<(), CertificateError>;
}

#[derive(Debug)]
struct Verifier<D>(D);

impl<D: Doorkeeper> ClientCertVerifier for Verifier<D> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.let_in(leaf, others).map_err(Error::InvalidCertificate)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        super::too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        super::verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}

/// Returns the TLS configuration of a guest.
///
/// # Errors
/// If its key cannot be used.
pub(in crate::trust) fn config(
    key: &Key,
    doorkeeper: impl Doorkeeper + 'static,
) -> Result<Arc<ServerConfig>, Error> {
    let leaf = certificate::self_signed(key, certificate::End::Guest)
        .map_err(|error| Error::General(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(Verifier(doorkeeper)))
        .with_single_cert(vec![leaf], private(key))?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}
