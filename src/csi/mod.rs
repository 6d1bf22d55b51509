//! CSI for the kubelet of this guest: its services, and the sockets on which kubelet finds them.
//!
//! ```text
//! kubelet ─▶ plugins_registry/<driver>-reg.sock ─▶ registration: who, and where
//!         ─▶ plugins/<driver>/csi.sock ─▶ identity
//!                                      └▶ node ─▶ guest::pod_volumes
//! sidecars ─▶ plugins/<driver>/controller/csi.sock ─▶ identity
//!                                                  └▶ relay ─▶ the host half
//! ```
//! [`sockets`] keeps the sockets in place, whatever happens to their directories. The socket of the
//! registration exists only while the [identity](Identity) of this guest is known. `status` maps errors to
//! the codes of CSI.

pub mod identity;
mod node;
mod registration;
pub mod sockets;
mod status;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::time::Instant;

/// Identity of this guest in the cluster that it is a node of, as reported by the host half.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Identifier that stays the same for the lifetime of the virtual machine.
    pub node_id: String,
    /// Name of the virtual machine on the host.
    pub vm_name: String,
    /// Volumes that it may have at a time; 0 if unknown.
    pub max_volumes: u32,
    /// Topology of the guest, by the keys that may be requested.
    pub topology: BTreeMap<String, String>,
}

/// Settings of the driver.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the driver.
    pub driver: String,
    /// Root directory of kubelet's state.
    pub kubelet_root: PathBuf,
    /// True if the root directory is created when it is missing; otherwise its creation is awaited.
    pub make_root: bool,
    /// Socket of the Identity and Node services.
    pub node_socket: PathBuf,
    /// Socket of the Identity and Controller services, if it is used.
    pub controller_socket: Option<PathBuf>,
    /// Keys of the topology that are reported to kubelet.
    pub topology: Vec<String>,
    /// Time until which sidecars may still be running that use a different topology setting.
    pub stale_until: Option<Instant>,
}
