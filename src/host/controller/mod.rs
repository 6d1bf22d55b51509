//! The controller of a Kubernetes cluster, as the nodes of guestlet-host see it.
//!
//! ```text
//!  node ──Join────▶ serve ──whose token is it?──▶ certificate
//!       ──Ask─────▶ serve ──▶ ask ──does the VM run on that node?──▶ what answers guests about volumes and clusters
//!       ◀─Guests── nodes ◀──what has to be asked of a guest────────────┘
//! ```
//!
//! Which node calls is known from its certificate, and what it asks for a guest is answered as long as the API server says
//! that the guest's VM runs there: a node that somebody has taken over can do nothing for VMs elsewhere.

mod ask;
mod nodes;
mod serve;

pub use ask::Asked;
pub use nodes::Nodes;
pub use serve::{Joining, Server, serve};
