//! guestlet: one light agent inside every guest VM and one controller half on every host, which communicate over
//! virtio-vsock.
//!
//! The rooms (top-level modules), and which may import which (held by `tests/architecture.rs`):
//!
//! ```text
//! bin ─┬─ agent ─┬─ qga ──┐
//!      │         ├─ rpc ──┼─ guest ── sys
//!      │         ├─ csi ──┤
//!      │         ├─ cloud
//!      │         ├─ topology
//!      │         ├─ policy ── trust
//!      │         └─ config, transport
//!      ├─ hostd ─┬─ host ──── access, transport, sys
//!      │         └─ config ── access
//!      ├─ ctl ────── transport
//!      ├─ ccm ────── kubernetes, transport
//!      ├─ status ─── transport
//!      ├─ doctor ─── status, config, privileges
//!      ├─ thaw ───── guest, status
//!      └─ applications
//! ```
//!
//! `kubernetes` is the common code of clients of an API server. `wire` (framings and protobuf) may be imported by
//! every protocol; it imports nothing. `trust` has the keys of both ends of a session. `policy` decides who may do
//! what in a guest, for `qga` and `rpc`; `access` decides which users of a host may make which requests.
//! `addresses` parses the IP addresses of settings and requests. `receipt` is the record of a freeze, for guests
//! and hosts. `applications` are clients of databases in processes of their own, which `guest` starts. `metrics`
//! is what guests measure and `events` is what happens in them, both for guests and hosts. `text` formats sizes
//! and tables for users; `labels` knows which labels Kubernetes accepts, and selects by them; `pace` limits work
//! that others cause. `copies` reads and writes the files of a copy, in a guest for `rpc` and here for `ctl`.
//! `turns` gives one operation at a time the right to work on an object. `supervise` owns every task. `agent` and
//! `hostd` are the assemblies: they read `config`, as do `doctor` and `privileges`, which report to users and to
//! systemd what the settings amount to.

#[cfg(feature = "host")]
pub mod access;
#[cfg(feature = "host")]
pub mod addresses;
#[cfg(feature = "agent")]
pub mod agent;
#[cfg(feature = "agent")]
pub mod applications;
#[cfg(feature = "ccm")]
pub mod ccm;
#[cfg(feature = "agent")]
pub mod cloud;
pub mod config;
#[cfg(any(feature = "agent", feature = "ctl"))]
pub mod copies;
#[cfg(feature = "agent")]
pub mod csi;
#[cfg(feature = "ctl")]
pub mod ctl;
#[cfg(feature = "agent")]
pub mod doctor;
pub mod events;
#[cfg(feature = "agent")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
#[cfg(feature = "host")]
pub mod hostd;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod labels;
pub mod metrics;
pub mod pace;
#[cfg(feature = "agent")]
pub mod policy;
#[cfg(feature = "agent")]
pub mod privileges;
#[cfg(feature = "agent")]
pub mod qga;
pub mod receipt;
#[cfg(feature = "agent")]
pub mod rpc;
#[cfg(feature = "agent")]
pub mod status;
pub mod supervise;
pub mod sys;
pub mod text;
#[cfg(feature = "agent")]
pub mod thaw;
#[cfg(feature = "agent")]
pub mod topology;
pub mod transport;
#[cfg(feature = "trust")]
pub mod trust;
#[cfg(any(feature = "agent", feature = "host"))]
pub mod turns;
pub mod wire;

/// Version of this package, as reported by `--version` and `GuestInfo.agent_version`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
