//! The Node that this guest is in its cluster: its labels follow the guest's topology, with kubelet's own credential, and
//! what the API server says of it is told to the host half.
//!
//! ```text
//!  files of kubelet ──▶ credential ──▶ list ──▶ watch (of this Node only) ──▶ Object ─┐
//!                          ▲            ▲ 410, or a conflict │                        ├─▶ plan ──patch──▶ API server
//!                          └─ rotated ──┴── error, backoff ──┘      guest's topology ─┘     └──▶ guest.topology.node
//! ```
//!
//! Nothing of this is in memory before kubelet has a credential. What is to be done is decided by `plan`, a pure
//! function of what is wanted and what is there, again with every change of either. While nothing changes there is one
//! request in five minutes or more.

mod certificate;
mod client;
mod credential;
mod end;
mod engine;
mod kubeconfig;
mod node;
mod plan;
mod yaml;

pub use engine::{Settings, run};
