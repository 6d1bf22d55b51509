//! Identity of the other end of a connection, as far as it is proved.

use rustls::pki_types::UnixTime;

use crate::trust::Fingerprint;

/// Caller of the guestlet API in a guest. The server puts it into the extensions of every request as
/// `Arc<Peer>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// Peer without proof of identity, which has only been able to open the channel.
    Plain,
    /// A host half that holds a key which the guest was given.
    Keyed(Keyed),
}

impl Peer {
    /// Returns whether both have proved the same key, or neither has proved one. Certificates are not compared,
    /// because that of a key is renewed from time to time.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Plain, Self::Plain) => true,
            (Self::Keyed(one), Self::Keyed(other)) => one.fingerprint == other.fingerprint,
            _ => false,
        }
    }
}

/// A host half that has proved its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyed {
    /// Names the key of the host half itself, not that of a CA which vouches for it.
    pub fingerprint: Fingerprint,
    /// Names the key that the guest was given: the same, or that of the CA.
    pub anchor: Fingerprint,
    /// URIs of the peer's certificate, such as `guestlet://production/host/node-1`. Only names that a CA has
    /// signed count, so the list is empty for a key that the guest was given itself.
    pub names: Vec<String>,
    /// The roles which the line of its key, or of its CA, gives it (`role=`).
    pub roles: Vec<String>,
    /// The end of what a CA has certified. A key that the guest was given itself has none.
    pub until: Option<UnixTime>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_host_half_is_the_same_with_a_certificate_that_was_renewed() {
        let peer = |key: &[u8], until| {
            let until = Some(UnixTime::since_unix_epoch(Duration::from_secs(until)));
            let (fingerprint, anchor) = (Fingerprint::of(key), Fingerprint::of(b"ca"));
            Peer::Keyed(Keyed { fingerprint, anchor, names: Vec::new(), roles: Vec::new(), until })
        };
        let cases = [
            (peer(b"one", 1), peer(b"one", 2), true),
            (peer(b"one", 1), peer(b"two", 1), false),
            (peer(b"one", 1), Peer::Plain, false),
            (Peer::Plain, Peer::Plain, true),
        ];
        for (one, other, expected) in cases {
            assert_eq!((one.is_same(&other), other.is_same(&one)), (expected, expected), "{one:?} {other:?}");
        }
    }
}
