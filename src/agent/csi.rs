//! Makes CSI's part of the agent: from the settings, and from what the host half says of this guest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use crate::config::agent::{CsiMode, CsiSettings};
use crate::csi::{self, Identity};
use crate::guest::Guest;
use crate::rpc::holder::Holder;
use crate::rpc::local;
use crate::supervise::Supervisor;
use crate::wire::proto::v1::WhoAmIResponse;

/// By this key kubelet is told on which host this guest is.
const HOST_KEY: &str = "guestlet.io/host";

/// Tells CSI's part who this guest is.
#[derive(Debug, Clone)]
pub struct Teller(watch::Sender<Option<Identity>>);

impl Teller {
    /// From now on it is this.
    pub fn tell(&self, told: &WhoAmIResponse) {
        let identity = identity(told);
        self.0.send_if_modified(|known| {
            let differs = identity.is_some() && *known != identity;
            if differs {
                known.clone_from(&identity);
            }
            differs
        });
    }
}

/// Starts serving kubelet, and the sidecars over the callback stream of `holder`. Who this guest is was kept in `folder`
/// by an earlier run, or is told.
pub fn start(
    settings: CsiSettings,
    folder: &Path,
    guest: &Guest,
    holder: Holder,
    supervisor: &mut Supervisor,
) -> Teller {
    let teller = Teller(watch::Sender::new(None));
    if let Some(told) = local::remembered(folder) {
        teller.tell(&told);
    }
    let make_root = match settings.mode {
        CsiMode::Off => return teller,
        CsiMode::Auto => false,
        CsiMode::On => true,
    };
    let CsiSettings { driver, kubelet_root, node_socket, controller_socket, topology, .. } = settings;
    if let Some(key) = topology.iter().find(|key| *key != HOST_KEY) {
        tracing::warn!("csi.topology: no host half tells {key:?}; known is {HOST_KEY:?}");
    }
    let kubelet_root = plain(&kubelet_root);
    let settings =
        csi::Settings { driver, kubelet_root, make_root, node_socket, controller_socket, topology };
    let (known, shutdown) = (teller.0.subscribe(), supervisor.shutdown());
    let channel = Arc::new(move || holder.channel());
    let work = csi::sockets::run(guest.clone(), settings, known, channel, shutdown.clone());
    supervisor.spawn("csi", async move {
        if let Err(error) = work.await {
            tracing::error!("kubelet is not served any more: {error}");
        }
        shutdown.cancelled().await;
        Ok(())
    });
    teller
}

/// Without a slash at its end, or two in it.
fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Nothing if it is not said which machine this is.
fn identity(told: &WhoAmIResponse) -> Option<Identity> {
    let node_id = Some(&told.vm_uid).filter(|uid| !uid.is_empty())?.clone();
    let host = told.host.as_ref().map(|host| host.host_name.clone()).filter(|name| !name.is_empty());
    Some(Identity {
        node_id,
        vm_name: told.vm_name.clone(),
        max_volumes: told.max_volumes,
        topology: host.map(|name| (HOST_KEY.to_owned(), name)).into_iter().collect(),
    })
}
