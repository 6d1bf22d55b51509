//! The cloud controller manager of a guest's cluster (`guestlet-ccm`): Nodes and Services of type LoadBalancer, as the host half
//! has them. It has a credential of its own cluster, and none of the host's.
//!
//! ```text
//!  API server of the guest's cluster          agent of this node ──▶ host half
//!    │ Lease    │ Nodes        │ Services         │ guestlet.v1.Cloud
//!    ▼          ▼              ▼                  ▼
//!  one leads ─▶ nodes ────▶ services ◀── host, instances, balancers
//!               who is which VM; labels,      what a Service wants; its address,
//!               addresses, life and end       its end, and what has leaked
//! ```
//!
//! [`host`] calls the host half; `watching` keeps what it says of VMs ([`instance`]) and load balancers by long polls. [`nodes`] and
//! [`services`] each own their objects: a pure part decides from what is known, and what is to be done is done one step after the
//! other for each object, beside those of others (`queue`). `events` tells people, and `health` kubelet.
//!
//! Nothing is remembered but in the two APIs: a program that is started anew, or leads now, asks for everything once. While the
//! host half cannot be asked, everything stays as it was. Whatever is changed passes the [`Fence`], which is open only while this
//! replica leads.

mod events;
mod health;
pub mod host;
pub mod instance;
pub mod net;
pub mod nodes;
mod objects;
mod queue;
mod refused;
mod run;
pub mod services;
mod watching;

#[cfg(doc)]
use crate::kubernetes::fence::Fence;

pub use run::{Options, run};
