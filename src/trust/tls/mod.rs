//! TLS 1.3 inside the stream that the host dials: the host is TLS's client, the guest its server. Each proves that it holds
//! the key of its certificate; whether that is a key to be trusted, [`guest`](super::guest) and the host half decide.
//!
//! No resumption and no tickets: a session that is taken up again would outlast the key that it began with.

use std::sync::{Arc, LazyLock};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

use crate::trust::key::Key;

#[cfg(feature = "host")]
pub(super) mod client;
#[cfg(feature = "agent")]
pub(super) mod server;

/// The protocol that is spoken inside (ALPN, RFC 7301): HTTP/2 with the guestlet API.
pub const PROTOCOL: &[u8] = b"guestlet/1";
/// The first byte of a TLS connection: a handshake record (RFC 8446, 5.1).
pub const FIRST_BYTE: u8 = 0x16;
/// Length in bytes of the secret that only the two ends of a connection share.
pub const BINDING: usize = 32;
/// Signature scheme of both ends, for the only type of key that they have.
const SCHEMES: [SignatureScheme; 1] = [SignatureScheme::ED25519];
/// Exporter label of the secret for enrollment (RFC 5705).
pub(super) const BINDING_LABEL: &[u8] = b"EXPORTER-guestlet-enrollment";

static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));

/// The cryptography of all TLS of guestlet.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::clone(&PROVIDER)
}

/// Verifies that the peer holds the key of the certificate that it presents; both ends require this of each
/// other.
fn verify(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    let algorithms = &PROVIDER.signature_verification_algorithms;
    rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
}

/// Returns the error for a signature of TLS 1.2.
fn too_old() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("only TLS 1.3 is spoken".to_owned()))
}

fn private(key: &Key) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(key.pkcs8().clone_key())
}
