//! The controller role: what one program does for all VMs of the cluster, whatever node they run on. The VMs' sessions are
//! those of the node role; here it is known which VMs there are.
//!
//! ```text
//!  API server ──VirtualMachines, VirtualMachineInstances──▶ roster ──▶ book ──Change──▶ fleet::Remote
//! ```
//!
//! One of its replicas leads, and that alone changes VMs and claims. Nodes find it, and learn by whom it is vouched for, in
//! one [`lease`]. They come with a token of their pod ([`join`]) for a certificate of its CA ([`certificates`]), and with that
//! for everything else ([`tls`]).

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
