//! The Node that this guest is in its cluster. Its labels follow the guest's topology, using kubelet's own
//! credential, and its state in the API server is reported to the host half.
//!
//! ```text
//!  files of kubelet ──▶ credential ──▶ list ──▶ watch (of this Node only) ──▶ Object ─┐
//!                          ▲            ▲ 410, or a conflict │                        ├─▶ plan ──patch──▶ API server
//!                          └─ rotated ──┴── error, backoff ──┘      guest's topology ─┘     └──▶ guest.topology.node
//! ```
//!
//! Nothing of this is in memory before kubelet has a credential. `plan`, a pure function of the desired and the
//! actual state, decides what to do, and runs again on every change of either. While nothing changes, a request is
//! made every five minutes or less often.

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
