//! Shares on Harvester: a claim of volume mode `Filesystem` is served by an NFS server of Harvester's storage for as long as an
//! object of the kind NetworkFilesystem wants it. Guests reach it over the network; KubeVirt has no part in it.
//!
//! ```text
//!  claim                                     NetworkFilesystem (namespace harvester-system, named as the PersistentVolume)
//!    guestlet.io/shared-with: [a, b]           spec.desiredState: Enabled     status.state: Enabled, status.endpoint: ADDRESS
//!    no VM left                                spec.desiredState: Disabled    status.state: Disabled
//!    deleted                                   deleted before it
//! ```
//!
//! Whom a share is shared with stands in the claim, and is written before the object is asked for anything. Two programs may
//! be at it at once, when a leader does not know yet that it is none any more: **who ends a share reads the object first and
//! the claim after it; who serves it writes the claim first and the object after it**, each time with something new
//! (an annotation with the claim's version), and both write the object only as it was read. So either the one that ends it sees
//! the VM in the claim, or its write is refused.
//!
//! `object` decides what is next for an object, `requests` asks the API server, `sharing` does it, and `upkeep` looks now and
//! then whether it is done.

mod object;
mod requests;
mod sharing;
mod upkeep;

pub use upkeep::Upkeep;
