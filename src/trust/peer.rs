//! Who is at the other end of a connection, as far as that is proved.

use crate::trust::Fingerprint;

/// Who calls a guest over the guestlet API. The server puts it into the extensions of every request as `Arc<Peer>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// Has proved nothing: whoever could open the channel.
    Plain,
    /// A host half that holds a key which the guest was given.
    Keyed(Keyed),
}

/// A host half that has proved its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyed {
    /// Names the key of the host half itself, not that of a CA which vouches for it.
    pub fingerprint: Fingerprint,
    /// Names the key that the guest was given: the same, or that of the CA.
    pub anchor: Fingerprint,
    /// The URIs of its certificate, such as `guestlet://production/host/node-1`; only a CA's word counts, so there are none
    /// for a key that the guest was given itself.
    pub names: Vec<String>,
    /// The roles which the line of its key, or of its CA, gives it (`role=`).
    pub roles: Vec<String>,
}
