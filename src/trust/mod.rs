//! Identities: the keys of host halves and guests, and how each end proves its own to the other.
//!
//! Both ends have an Ed25519 key. A guest is given the public keys of the host halves that may control it; a
//! host half pins the key of each guest. Keys do not determine permissions: those are decided by the [`Peer`]
//! that is established for a connection.

pub mod anchors;
pub mod certificate;
pub mod enrollment;
pub mod fingerprint;
#[cfg(feature = "agent")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
pub mod key;
#[cfg(feature = "agent")]
pub mod keyring;
pub mod peer;
pub mod pem;
#[cfg(feature = "agent")]
pub mod provided;
pub mod public_key;
pub mod tls;

pub use fingerprint::Fingerprint;
pub use peer::Peer;
