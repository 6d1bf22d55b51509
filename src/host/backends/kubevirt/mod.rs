//! VMs of a Kubernetes cluster, which KubeVirt runs: on Harvester, or any other cluster that has it.
//!
//! ```text
//!  API server of the host cluster
//!    │ VirtualMachineInstances, the Node          │ VirtualMachines, claims
//!    ▼                                            ▼
//!  node role, one on each node                  controller role, one at a time
//!    knows its node's VMs, dials them             makes claims, has KubeVirt plug them
//! ```
//!
//! Nothing is remembered but in the API: what a claim is and which VM is to have it are in its labels and annotations,
//! which VM has it is in the VMs' specs and statuses. Objects are read as far as [`objects`] says, and no further.

pub mod adopted;
mod adopting;
mod advice;
pub mod api;
pub mod authority;
pub mod balancers;
pub mod claims;
pub mod controller;
mod copies;
mod detach;
mod evidence;
pub mod gates;
pub mod hotplug;
pub mod interfaces;
pub mod names;
pub mod node;
pub mod objects;
mod read;
pub mod seen;
mod shared;
mod shares;
pub mod snapshots;
pub mod standing;
mod told;
pub mod volumes;
