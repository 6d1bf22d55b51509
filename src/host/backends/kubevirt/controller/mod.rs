//! Controller role: the tasks that one program performs for all VMs of the cluster, on whatever node they run.
//! The sessions with VMs belong to the node role; the controller knows which VMs exist.
//!
//! ```text
//!  API server ──VirtualMachines, VirtualMachineInstances──▶ roster ──▶ book ──Change──▶ fleet::Remote
//! ```
//!
//! One of the replicas is the leader, and only the leader changes VMs and claims. Nodes find it, and the CA
//! that vouches for it, in a [`lease`]. They present a token of their pod ([`join`]) to get a certificate from
//! its CA ([`certificates`]), and use that for everything else ([`tls`]).

mod book;
pub mod certificates;
pub mod join;
pub mod lasting;
pub mod lease;
pub mod listing;
mod private;
mod request;
mod roster;
pub mod tls;
mod wanted;

pub use book::{Kind, Options};
pub use roster::{Fact, Roster, Site};
