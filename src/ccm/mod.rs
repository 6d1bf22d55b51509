//! Cloud controller manager of a guest cluster (`guestlet-ccm`): keeps Nodes and Services of type
//! LoadBalancer in agreement with the host half. It has a credential of its own cluster, and none of the
//! host's.
//!
//! ```text
//!  API server of the guest's cluster          agent of this node ──▶ host half
//!    │ Lease    │ Nodes        │ Services         │ guestlet.v1.Cloud
//!    ▼          ▼              ▼                  ▼
//!  one leads ─▶ nodes ────▶ services ◀── host, instances, balancers
//!               which VM each is; labels,     requests of Services, addresses,
//!               addresses, life and end       releases, and leaks
//! ```
//!
//! [`host`] calls the host half. `watching` follows VMs ([`instance`]) and load balancers by long polls.
//! [`nodes`] and [`services`] each own their objects: a pure part decides from what is known, and the
//! resulting jobs run one after the other for each object, in parallel with those of other objects (`queue`).
//! `events` informs people, and `health` kubelet.
//!
//! State is kept only in the two APIs: a program that has just started or become leader requests everything
//! once. While the host half cannot be reached, everything stays as it was. Every change passes the
//! [`Fence`], which is open only while this replica leads.

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
