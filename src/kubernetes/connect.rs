//! How a program of guestlet reaches the API server of a cluster.

use std::path::Path;
use std::time::Duration;

use kube::Config;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};

/// How long a connection may be silent. A watch is, for as long as nothing happens, and the server ends it sooner.
const SILENCE: Duration = Duration::from_secs(310);

/// Why it is not known how to reach it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This is no pod that may ask it.
    #[error("this is not a pod with a service account; outside a pod, name a kubeconfig with --kubeconfig")]
    InCluster(#[from] InClusterError),
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {0}")]
    Kubeconfig(String, #[source] Box<KubeconfigError>),
}

/// Where the API server is and who asks it: as this kubeconfig says, or as a pod is told. A pod's token is read again
/// while it is used, because it expires.
///
/// # Errors
/// If neither says it.
pub async fn config(kubeconfig: Option<&Path>) -> Result<Config, Error> {
    // Without a word kube would take whichever the program is built with, and panic where there are two.
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
