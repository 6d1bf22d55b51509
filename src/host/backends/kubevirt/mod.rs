//! VMs of a Kubernetes cluster that are run by KubeVirt: on Harvester, or on any other cluster with KubeVirt.
//!
//! ```text
//!  API server of the host cluster
//!    │ VirtualMachineInstances, the Node          │ VirtualMachines, claims
//!    ▼                                            ▼
//!  node role, one on each node                  controller role, one at a time
//!    knows its node's VMs, dials them             creates claims, requests hot-plugs from KubeVirt
//! ```
//!
//! All state is stored in the API: the properties of a volume, and the VM that it is published to, are in the
//! labels and annotations of its claim, and the VM that has it is shown by the VMs' specs and statuses. Only
//! the fields in [`objects`] are read.

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
