//! Lease of the controllers, which elects their leader ([`crate::kubernetes::lease`]) and leads nodes to it.

use std::collections::BTreeMap;

use kube::Client;

use crate::kubernetes::lease::Place;
pub use crate::kubernetes::lease::{Candidate, Leading, Timing};
use crate::kubernetes::standing::Teller;

/// Name of the Lease.
pub const NAME: &str = "guestlet-controller";
/// Annotation of the Lease with the address and port at which nodes reach the leader.
pub const ADDRESS: &str = "guestlet.io/address";
/// Annotation of the Lease with the certificate of the CA that vouches for the leader, in PEM.
pub const AUTHORITY: &str = "guestlet.io/certificate-authority";
/// Problem that is reported while the Lease cannot be used.
pub const TROUBLE: &str = "the Lease of the controllers cannot be read or written";

/// Information for nodes that the leader publishes in the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Address of the leader for nodes, as `IP:port`.
    pub address: String,
    /// Certificate of the CA that vouches for the leader; stays in the Lease after it is released.
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

/// Creates the candidate with this replica name for the Lease in a namespace.
pub fn candidate(client: Client, namespace: &str, name: &str, timing: Timing, teller: Teller) -> Candidate {
    let place = Place { namespace: namespace.to_owned(), name: NAME };
    Candidate::new(client, &place, name, timing, teller)
}
