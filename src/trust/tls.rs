//! TLS 1.3 inside the stream that the host dials: the host is TLS's client, the guest its server. Each proves that it holds
//! the key of its certificate; whether that is a key to be trusted, [`guest`](super::guest) and the host half decide.
//!
//! No resumption and no tickets: a session that is taken up again would outlast the key that it began with.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::ServerName;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::trust::certificate;
use crate::trust::key::Key;

/// The protocol that is spoken inside (ALPN, RFC 7301): HTTP/2 with the guestlet API.
pub const PROTOCOL: &[u8] = b"guestlet/1";
/// The first byte of a TLS connection: a handshake record (RFC 8446, 5.1).
pub const FIRST_BYTE: u8 = 0x16;
/// Bytes of the secret that both ends of a connection know, and nobody else.
pub const BINDING: usize = 32;
/// What that secret is made for (RFC 5705).
pub(super) const BINDING_LABEL: &[u8] = b"EXPORTER-guestlet-enrollment";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    ring::default_provider().signature_verification_algorithms
}

/// Decides whether a host half may come in with its certificate, and those that it sends after it.
pub(super) trait Doorkeeper: std::fmt::Debug + Send + Sync {
    /// # Errors
    /// Why not, as TLS tells it.
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
        Err(Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Takes any certificate of a guest whose key the guest holds: which key is the right one is known only to who dialled.
#[derive(Debug)]
struct AnyGuest;

impl ServerCertVerifier for AnyGuest {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match certificate::read(leaf) {
            Some(_) => Ok(ServerCertVerified::assertion()),
            None => Err(Error::InvalidCertificate(CertificateError::BadEncoding)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

fn private(key: &Key) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(key.pkcs8().clone_key())
}

/// What a guest speaks with.
///
/// # Errors
/// If its key cannot be used.
pub(super) fn server(key: &Key, doorkeeper: impl Doorkeeper + 'static) -> Result<Arc<ServerConfig>, Error> {
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

/// What a host half speaks with: its key and its certificate, with those of the CA that vouches for it.
///
/// # Errors
/// If the key cannot be used, or is not that of the certificate.
pub(super) fn client(key: &Key, chain: Vec<CertificateDer<'static>>) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyGuest))
        .with_client_auth_cert(chain, private(key))?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}
