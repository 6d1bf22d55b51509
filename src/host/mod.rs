//! The host half: knows the VMs, and keeps a conversation with the agent in each of them.
//!
//! ```text
//!  backends ──Change──▶ fleet ◀──Request── api ◀── guestctl
//!  (qemu)               │   ▲
//!                 Machine   Report
//!                       ▼   │
//!                      session ──dials──▶ agent in the guest      (one for each VM)
//!                        ├── the host calls, events arrive         (talk)
//!                        └── the guest calls, on the same connection (callback)
//! ```
//!
//! [`admission`] decides which calls of the api a caller may make. Each call to a guest carries the caller on
//! whose behalf it is made ([`calls`]). Requests that the agent alone decides on are forwarded to it
//! ([`machine`]).
//!
//! A [`console`] belongs to the hypervisor, so it is reached without the fleet and the agents.
//!
//! [`disks`] are attached and detached without the fleet: the api calls the backend of the VM directly.
//! [`volumes`] are the disks kept for clusters; guests request them on the callback, in the protocol of [`csi`].
//!
//! [`cloud`] informs clusters of their VMs and provides the load balancers of their Services; guests call it on
//! the callback as well. `health_checks` has their agents check whether nodes accept traffic.
//!
//! Where a cluster runs the VMs, `guests` shows it their state; the fleet reports which VMs have changed
//! ([`changed`]). The program on each node then has the sessions, and forwards the calls of guests about volumes
//! to the program that keeps the volumes (`relay`, `controller`).
//!
//! [`fleet`] is one task that owns what is known of all VMs; all other tasks send it messages. Guests are assumed
//! to be hostile: their data is bounded by [`limits`] and cleaned by [`text`] before it is used.

pub mod admission;
pub mod api;
mod asked;
pub mod audit;
pub mod backends;
pub mod backoff;
mod beside;
pub mod callback;
pub mod caller;
pub mod calls;
pub mod changed;
mod clients;
pub mod cloud;
pub mod console;
pub mod contact;
#[cfg(feature = "kubevirt")]
pub mod controller;
pub mod conversation;
pub mod csi;
pub mod disks;
pub mod exec;
pub mod exporters;
pub mod files;
pub mod fleet;
pub mod for_guests;
pub mod forward;
pub mod gather;
#[cfg(feature = "kubevirt")]
pub mod guests;
pub mod half;
pub mod handed_on;
mod health_checks;
pub mod history;
pub mod intake;
mod introduced;
pub mod keys;
pub mod limits;
mod lines;
pub mod machine;
pub mod metered;
pub mod metrics;
pub mod order;
mod paced;
pub mod peer;
pub mod ping;
pub mod place;
pub mod rate;
mod receipts;
pub mod recent;
#[cfg(feature = "kubevirt")]
pub mod relay;
pub mod report;
pub mod rotation;
pub mod scrape;
pub mod session;
pub mod settings;
pub mod talk;
pub mod text;
pub mod topology;
pub mod trust;
mod unread;
pub mod volumes;
mod weight;
