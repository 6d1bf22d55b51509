//! The controller role: what one program does for all VMs of the cluster, whatever node they run on. The VMs' sessions are
//! those of the node role; here it is known which VMs there are.
//!
//! ```text
//!  API server ──VirtualMachines, VirtualMachineInstances──▶ roster ──▶ book ──Change──▶ fleet::Remote
//! ```

mod book;
mod roster;
mod wanted;

pub use book::Options;
pub use roster::{Roster, Site};
