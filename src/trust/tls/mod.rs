//! TLS 1.3 inside the stream that the host dials: the host is TLS's client, the guest its server. Each proves that it holds
//! the key of its certificate; whether that is a key to be trusted, [`guest`](super::guest) and the host half decide.
//!
//! No resumption and no tickets: a session that is taken up again would outlast the key that it began with.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::PrivateKeyDer;

use crate::trust::key::Key;

#[cfg(feature = "host")]
pub(super) mod client;
#[cfg(feature = "agent")]
pub(super) mod server;

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

fn private(key: &Key) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(key.pkcs8().clone_key())
}
