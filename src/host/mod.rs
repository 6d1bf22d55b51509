//! The controller half: which VMs there are, and the conversation with the agent in each of them.
//!
//! ```text
//!  backends ──Change──▶ fleet ◀──Request── api ◀── guestctl
//!  (qemu)               │   ▲
//!                 Machine   Report
//!                       ▼   │
//!                      session ──dials──▶ agent in the guest      (one for each VM)
//!                        ├── the host asks, events come            (talk)
//!                        └── the guest asks, on the same connection (callback)
//! ```
//!
//! Who may ask the api for what is decided in [`admission`]; on whose behalf a guest is called goes with the call
//! ([`calls`]); what the agent decides on alone is handed on ([`machine`]).
//!
//! A [`console`] is the hypervisor's, so that it, too, is reached past the fleet and the agents.
//!
//! [`disks`] come and go past the fleet: from the api straight to the backend that has the VM. [`volumes`] are what
//! clusters have of them; their guests ask for them by the callback, in the words of [`csi`].
//!
//! What clusters are told of their VMs, and the load balancers of their Services, are in [`cloud`], which guests ask by the
//! callback as well; `health_checks` has their agents look whether nodes take traffic.
//!
//! Where a cluster runs the VMs, `guests` tells it of them: which have changed the fleet says ([`changed`]). There the program on
//! each node has the sessions, and hands what guests ask of volumes on to the one that keeps these (`relay`, `controller`).
//!
//! [`fleet`] is one task and owns what is known of all VMs; everybody else sends it messages. Guests are
//! taken for hostile: what they say is bounded by [`limits`], and cleaned by [`text`], before it goes on.

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
