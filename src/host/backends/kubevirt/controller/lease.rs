//! The Lease of the controllers, by which one of them leads ([`crate::kubernetes::lease`]) and nodes find it.

use std::collections::BTreeMap;

use kube::Client;

use crate::kubernetes::lease::Place;
pub use crate::kubernetes::lease::{Candidate, Leading, Timing};
use crate::kubernetes::standing::Teller;

/// The name of the Lease.
pub const NAME: &str = "guestlet-controller";
/// Its annotation with the address and port at which nodes reach the leader.
pub const ADDRESS: &str = "guestlet.io/address";
/// Its annotation with the certificate of the CA that vouches for the leader, PEM.
pub const AUTHORITY: &str = "guestlet.io/certificate-authority";
/// What is told of it where it does not work.
pub const TROUBLE: &str = "the Lease of the controllers cannot be read or written";

/// What nodes are told by whoever leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// `IP:port` at which they reach it.
    pub address: String,
    /// Who vouches for it; stays when the Lease is given up.
    pub authority_pem: String,
}

impl From<Notice> for crate::kubernetes::lease::Notice {
    fn from(notice: Notice) -> Self {
        Self {
            while_held: BTreeMap::from([(ADDRESS, notice.address)]),
            lasting: BTreeMap::from([(AUTHORITY, notice.authority_pem)]),
        }
    }
}

/// The replica of this name among the candidates for the Lease in a namespace.
pub fn candidate(client: Client, namespace: &str, name: &str, timing: Timing, teller: Teller) -> Candidate {
    let place = Place { namespace: namespace.to_owned(), name: NAME };
    Candidate::new(client, &place, name, timing, teller)
}
