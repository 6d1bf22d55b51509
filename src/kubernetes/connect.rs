//! Connection of guestlet's programs to the API server of a cluster.

use std::path::Path;
use std::time::Duration;

use kube::Config;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

/// Read timeout of a connection. A watch is silent while nothing happens, but the server ends it before this time.
const SILENCE: Duration = Duration::from_secs(310);

/// Reason why the API server's address or credentials are unknown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This is not a pod with a service account.
    #[error("this is not a pod with a service account; outside a pod, name a kubeconfig with --kubeconfig")]
    InCluster(#[from] InClusterError),
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {0}")]
    Kubeconfig(String, #[source] Box<KubeconfigError>),
}

/// Returns the API server's address and the credentials: from this kubeconfig, or from the pod's service account.
/// The token of a pod expires, so it is read again while it is used.
///
/// # Errors
/// If the kubeconfig cannot be used, or without one, if this is not a pod with a service account.
pub async fn config(kubeconfig: Option<&Path>) -> Result<Config, Error> {
    // Without an explicit choice, kube would take the provider that the program is built with, and panic if there are
    // two.
    drop(rustls::crypto::ring::default_provider().install_default());
    let mut config = match kubeconfig {
        None => Config::incluster()?,
        Some(path) => {
            let wrong = |error| Error::Kubeconfig(path.display().to_string(), Box::new(error));
            let kubeconfig = Kubeconfig::read_from(path).map_err(wrong)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrong)?
        }
    };
    (config.read_timeout, config.reset_reader_on_write) = (Some(SILENCE), true);
    Ok(config)
}
