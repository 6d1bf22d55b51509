//! Keys: who a host half or a guest is, and how each proves it to the other.
//!
//! Both ends have an Ed25519 key. A guest is given the public keys of the host halves that may command it; a host half
//! pins the key of each guest. Neither is about what a peer may do: that is decided from the [`Peer`] that a connection
//! turned out to have.

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
