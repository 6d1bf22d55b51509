//! The controller role: what one program does for all VMs of the cluster, whatever node they run on. The VMs' sessions are
//! those of the node role; here it is known which VMs there are.
//!
//! ```text
//!  API server ──VirtualMachines, VirtualMachineInstances──▶ roster ──▶ book ──Change──▶ fleet::Remote
//! ```
//!
//! One of its replicas leads, and that alone changes VMs and claims: nodes find it, and learn by whom it is vouched for, in
//! one [`lease`].

mod book;
pub mod lease;
mod roster;
mod wanted;

pub use book::Options;
pub use roster::{Roster, Site};
