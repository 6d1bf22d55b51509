//! CSI for the kubelet of this guest: its services, and the sockets on which kubelet finds them.
//!
//! ```text
//! kubelet ─▶ plugins_registry/<driver>-reg.sock ─▶ registration: who, and where
//!         ─▶ plugins/<driver>/csi.sock ─▶ identity
//!                                      └▶ node ─▶ guest::pod_volumes
//! sidecars ─▶ plugins/<driver>/controller/csi.sock ─▶ identity
//!                                                  └▶ relay ─▶ the host half
//! ```
//! [`sockets`] sees to it that the sockets are there whatever becomes of their folders; that of the registration only
//! while it is [known](Identity) who this guest is. `status` has every answer that is none.

pub mod identity;
mod node;
mod registration;
pub mod sockets;
mod status;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::time::Instant;

/// Who this guest is to the cluster that it is a node of: the host half's word.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// What lasts as long as the virtual machine does.
    pub node_id: String,
    /// Its name on the host.
    pub vm_name: String,
    /// Volumes that it may have at a time; 0 if that is not known.
    pub max_volumes: u32,
    /// Where it is, by the keys that can be asked for.
    pub topology: BTreeMap<String, String>,
}

/// What the settings say.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The driver's name.
    pub driver: String,
    /// kubelet's folder.
    pub kubelet_root: PathBuf,
    /// The folder is made if it is not there; else it is waited for.
    pub make_root: bool,
    /// The socket of the Identity and Node services.
    pub node_socket: PathBuf,
    /// The socket of the Identity and Controller services, if there is to be one.
    pub controller_socket: Option<PathBuf>,
    /// Keys of the topology that kubelet is told.
    pub topology: Vec<String>,
    /// Until when sidecars may be at work that know something else of the topology than what is set.
    pub stale_until: Option<Instant>,
}
