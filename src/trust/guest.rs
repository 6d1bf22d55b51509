//! The guest's end: which host halves it lets in, and how a connection begins.
//!
//! ```text
//!                ┌── no key was ever given ──▶ plain, as far as the channel lets it in
//!  first byte ───┤
//!                │                  ┌─ TLS ──▶ handshake ── key or CA among the anchors ──▶ keyed
//!                └── keys ──────────┤                   └── else ─────────────────────────▶ refused
//!                                   └─ else ─── plain roles are granted ──▶ plain,  else refused
//! ```

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use crate::transport::listen::Incoming;
use crate::transport::{BoxStream, Stream, first_byte};
use crate::trust::anchors::Anchor;
use crate::trust::certificate::{self, Certified};
use crate::trust::key::Key;
use crate::trust::peer::Keyed;
use crate::trust::tls::server::Doorkeeper;
use crate::trust::tls::{self, BINDING, BINDING_LABEL, FIRST_BYTE, PROTOCOL};
use crate::trust::{Fingerprint, Peer};

/// Timeout for the first byte of a peer.
const FIRST: Duration = Duration::from_secs(5);
/// The fatal alert `no_application_protocol` (RFC 8446, 6): no keys, and so no guestlet/1.
const NO_KEYS: [u8; 7] = [0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 120];
/// Time that a client may take to disconnect after it was refused, and the maximum number of bytes that are
/// read from it meanwhile.
const FAREWELL: Duration = Duration::from_secs(1);
const MOST_IGNORED: u64 = 64 * 1024;
/// Timeout for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Reliability of a guest's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Clock that was set from a time source: the dates of certificates are checked.
    Set(UnixTime),
    /// Clock that may be years off, as early in the boot: the dates of certificates are ignored.
    Unset,
}

/// The keys of a guest that was given any.
#[derive(Debug, Clone)]
pub struct Keys {
    /// Private key of the guest.
    pub key: Arc<Key>,
    /// Keys of the host halves and CAs that are accepted.
    pub anchors: Arc<[Anchor]>,
    /// Clock of the guest.
    pub clock: Clock,
    /// Peers without a key are let in, too: for the few roles that the settings leave them.
    pub plain: bool,
}

/// State of a guest's keys.
#[derive(Debug, Clone)]
pub enum Standing {
    /// Guest that was never given a key: every peer that can open the channel is accepted.
    Plain,
    /// Guest that was given keys.
    Keyed(Keys),
    /// Guest that was given keys, and whose own key cannot be used, for this reason: no peer is accepted.
    Unusable(String),
}

/// A connection that has begun.
pub struct Greeted {
    /// Carries the guestlet API.
    pub stream: BoxStream,
    /// Identity of the peer.
    pub peer: Peer,
    /// With keys: a secret of both ends of this very connection (RFC 9266).
    pub binding: Option<[u8; BINDING]>,
}

/// Reason why a peer is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The channel's rule, without keys.
    #[error("{0}")]
    Channel(String),
    /// Peer without a key, where one is required.
    #[error("it uses no key, but this guest was given keys (guestlet trust ls) and accepts only those")]
    Plain,
    /// Peer that uses TLS, where this guest has no keys.
    #[error("it speaks TLS, but this guest was not given the key of a host half yet")]
    NoKeys,
    /// Peer whose key is not among those that this guest was given.
    #[error("its key {0} is not among those that this guest was given (guestlet trust ls)")]
    Unknown(Fingerprint),
    /// Peer whose certificate is not acceptable.
    #[error("its certificate is refused: {0}")]
    Certificate(String),
    /// Peer that violates TLS.
    #[error("the handshake failed: {0}")]
    Handshake(#[source] io::Error),
    /// Peer that sends nothing, or too little, before the deadline.
    #[error("the handshake did not begin within {} s", .0.as_secs())]
    Late(Duration),
    /// Peer that disconnected.
    #[error("it closed the connection")]
    Gone,
    /// Failure of this guest: its own key cannot be used.
    #[error("{0}")]
    Unusable(String),
}

impl Refused {
    /// A word for it in audit records, by which refusals are counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Channel(_) => "channel",
            Self::Plain => "plain",
            Self::NoKeys => "no-keys",
            Self::Unknown(_) => "unknown-key",
            Self::Certificate(_) => "certificate",
            Self::Handshake(_) => "handshake",
            Self::Late(_) => "late",
            Self::Gone => "gone",
            Self::Unusable(_) => "unusable",
        }
    }

    /// Returns the identity that the peer has shown: a fingerprint, `plain` without a key, or an empty text if it
    /// is unknown.
    pub fn shown(&self) -> String {
        match self {
            Self::Channel(_) | Self::Plain => "plain".to_owned(),
            Self::Unknown(fingerprint) => fingerprint.to_string(),
            _ => String::new(),
        }
    }
}

/// Informs a TLS client that this guest has no keys, and waits until it disconnects.
async fn say_no(mut stream: impl Stream) -> io::Result<()> {
    stream.write_all(&NO_KEYS).await?;
    stream.shutdown().await?;
    // If the stream were closed with unread data, the alert could be lost.
    tokio::io::copy(&mut stream.take(MOST_IGNORED), &mut tokio::io::sink()).await?;
    Ok(())
}

/// The extended key usage of TLS clients, 1.3.6.1.5.5.7.3.2 in DER.
const CLIENT_AUTH: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x02];

/// Finds out what a peer speaks, and whether it is let in.
///
/// # Errors
/// If it is not: the connection is closed.
pub async fn greet(incoming: Incoming, standing: Standing) -> Result<Greeted, Refused> {
    let keys = match standing {
        Standing::Unusable(reason) => return Err(Refused::Unusable(reason)),
        Standing::Plain => None,
        Standing::Keyed(keys) => Some(keys),
    };
    let lets_in_plain = keys.as_ref().is_none_or(|keys| keys.plain);
    let Incoming { stream, plain_refusal } = incoming;
    let first = timeout(FIRST, first_byte::wait(stream)).await.map_err(|_| Refused::Late(FIRST))?;
    let (first, stream) = first.map_err(|_| Refused::Gone)?;
    match (first == FIRST_BYTE, keys) {
        (true, Some(keys)) => {
            let stream = Box::new(stream) as BoxStream;
            timeout(HANDSHAKE, shake(stream, keys)).await.map_err(|_| Refused::Late(HANDSHAKE))?
        }
        (true, None) => {
            // The client then knows that its TLS was understood, and may try again without keys.
            drop(timeout(FAREWELL, say_no(stream)).await);
            Err(Refused::NoKeys)
        }
        (false, _) if !lets_in_plain => Err(Refused::Plain),
        (false, _) => match plain_refusal {
            Some(refusal) => Err(Refused::Channel(refusal)),
            None => Ok(Greeted { stream: Box::new(stream), peer: Peer::Plain, binding: None }),
        },
    }
}

async fn shake(stream: BoxStream, keys: Keys) -> Result<Greeted, Refused> {
    let unusable = |error: rustls::Error| Refused::Unusable(error.to_string());
    let judged = Arc::new(OnceLock::new());
    let door = Door { anchors: keys.anchors, clock: keys.clock, judged: Arc::clone(&judged) };
    let acceptor = TlsAcceptor::from(tls::server::config(&keys.key, door).map_err(unusable)?);
    let accepted = acceptor.accept(stream).await;
    // The reason for refusing the certificate is more precise than the TLS error that results from it.
    let keyed = match judged.get() {
        Some(Err(refusal)) => return Err(refusal.refused()),
        Some(Ok(keyed)) => keyed.clone(),
        None => match accepted {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(Refused::Gone),
            Err(error) => return Err(Refused::Handshake(error)),
            Ok(_) => return Err(Refused::Certificate("there is no certificate".to_owned())),
        },
    };
    let stream = accepted.map_err(Refused::Handshake)?;
    let connection = stream.get_ref().1;
    if connection.alpn_protocol() != Some(PROTOCOL) {
        return Err(Refused::Handshake(io::Error::other("the peer does not offer guestlet/1 (ALPN)")));
    }
    let mut binding = [0; BINDING];
    connection.export_keying_material(&mut binding, BINDING_LABEL, None).map_err(unusable)?;
    Ok(Greeted { stream: Box::new(stream), peer: Peer::Keyed(keyed), binding: Some(binding) })
}

/// Reason why a certificate is refused.
#[derive(Debug, Clone)]
enum Refusal {
    /// Neither its key nor that of its CA was given.
    Unknown(Fingerprint),
    /// Faulty certificate, as a TLS error and in words.
    Wrong(CertificateError, String),
}

impl Refusal {
    fn refused(&self) -> Refused {
        match self {
            Self::Unknown(fingerprint) => Refused::Unknown(*fingerprint),
            Self::Wrong(_, words) => Refused::Certificate(words.clone()),
        }
    }

    fn wrong(error: &webpki::Error) -> Self {
        let told = match error {
            webpki::Error::CertExpired { .. } => CertificateError::Expired,
            webpki::Error::CertNotValidYet { .. } => CertificateError::NotValidYet,
            webpki::Error::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
            _ => CertificateError::BadEncoding,
        };
        Self::Wrong(told, error.to_string())
    }
}

/// Judges the certificate of one peer.
#[derive(Debug)]
struct Door {
    anchors: Arc<[Anchor]>,
    clock: Clock,
    judged: Arc<OnceLock<Result<Keyed, Refusal>>>,
}

impl Doorkeeper for Door {
    fn let_in(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
    ) -> Result<(), CertificateError> {
        match self.judged.get_or_init(|| recognize(&self.anchors, self.clock, leaf, others)) {
            Ok(_) => Ok(()),
            Err(Refusal::Unknown(_)) => Err(CertificateError::UnknownIssuer),
            Err(Refusal::Wrong(error, _)) => Err(error.clone()),
        }
    }
}

/// Identifies the owner of the certificate `leaf`. It is accepted if its key is an anchor itself, whatever
/// else it contains; or if it names a host, is signed by a CA whose key is an anchor, is meant for clients,
/// and is valid now.
fn recognize(
    anchors: &[Anchor],
    clock: Clock,
    leaf: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
) -> Result<Keyed, Refusal> {
    let unreadable = || {
        Refusal::Wrong(
            CertificateError::BadEncoding,
            "it is not an X.509 certificate with an Ed25519 key".to_owned(),
        )
    };
    let Certified { key, names } = certificate::read(leaf).ok_or_else(unreadable)?;
    let fingerprint = key.fingerprint();
    if let Some(anchor) = anchors.iter().find(|anchor| anchor.public_key == key && !anchor.is_ca) {
        return Ok(Keyed {
            fingerprint,
            anchor: fingerprint,
            names: Vec::new(),
            roles: anchor.roles.clone(),
            until: None,
        });
    }
    let [ca] = others else { return Err(Refusal::Unknown(fingerprint)) };
    let issuer = certificate::read(ca).ok_or_else(unreadable)?.key;
    let anchor = anchors.iter().find(|anchor| anchor.public_key == issuer && anchor.is_ca);
    let anchor = anchor.ok_or(Refusal::Unknown(fingerprint))?;
    let names: Vec<_> = names.into_iter().filter(|name| is_of_a_host(name)).collect();
    if names.is_empty() {
        let words = "its certificate has no name such as guestlet://CLUSTER/host/NAME".to_owned();
        return Err(Refusal::Wrong(CertificateError::NotValidForName, words));
    }
    let trusted = anchor_from_trusted_cert(ca).map_err(|error| Refusal::wrong(&error))?;
    let parsed = EndEntityCert::try_from(leaf).map_err(|error| Refusal::wrong(&error))?;
    let at = match clock {
        Clock::Set(now) => now,
        Clock::Unset => certificate::begins(leaf).ok_or_else(unreadable)?,
    };
    parsed
        .verify_for_usage(
            &[webpki::ring::ED25519],
            &[trusted],
            &[],
            at,
            KeyUsage::required(CLIENT_AUTH),
            None,
            None,
        )
        .map_err(|error| Refusal::wrong(&error))?;
    let until = Some(certificate::ends(leaf).ok_or_else(unreadable)?);
    Ok(Keyed { fingerprint, anchor: anchor.fingerprint, names, roles: anchor.roles.clone(), until })
}

/// Returns whether a name is `guestlet://CLUSTER/host/NAME`, with neither part empty.
fn is_of_a_host(name: &str) -> bool {
    let parts = name.strip_prefix("guestlet://").map(|rest| rest.split('/').collect::<Vec<_>>());
    matches!(parts.as_deref(), Some([cluster, "host", host]) if !cluster.is_empty() && !host.is_empty())
}

#[cfg(test)]
mod tests;
