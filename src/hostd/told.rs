//! Reports on the state of the program: to Prometheus, to systemd, and about audit records.

use std::sync::Arc;

use anyhow::Context as _;

use super::{listen, notify, settle, spawn_until};
use crate::config::host::HostSettings;
use crate::host::fleet::Handle;
use crate::host::half::Half;
use crate::host::scrape;
use crate::supervise::Supervisor;
use crate::sys::tcp;

/// Starts the tasks that report to Prometheus and to systemd, and that report missing audit records.
pub(super) fn watch_over(
    supervisor: &mut Supervisor,
    metrics: Vec<scrape::Listener>,
    fleet: Handle,
    half: &Arc<Half>,
    subject: &scrape::Subject,
) {
    let shutdown = supervisor.shutdown();
    for listener in metrics {
        spawn_until(supervisor, "metrics", scrape::run(listener, subject.clone(), shutdown.clone()));
    }
    supervisor.spawn("audit", settle(Arc::clone(half), shutdown.clone()));
    supervisor.spawn("systemd", notify(fleet, shutdown));
}

/// Binds the socket for metrics, and their TCP port if one is configured.
pub(super) fn listen_for_metrics(settings: &HostSettings) -> anyhow::Result<Vec<scrape::Listener>> {
    let mut listeners = vec![scrape::Listener::Unix(listen(&settings.metrics_socket)?)];
    if let Some(address) = settings.metrics {
        let listener = tcp::listen(address);
        let listener = listener.with_context(|| format!("cannot serve the metrics at {address}"))?;
        listeners.push(scrape::Listener::Tcp(listener));
    }
    Ok(listeners)
}
