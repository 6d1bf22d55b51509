//! Selection of the cluster and of the credentials for it: from a kubeconfig, or from the service account of
//! a pod.

use std::path::PathBuf;

use clap::Args;
use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, client::ClientBuilder};

use super::error::cause;
use super::{Error, proxies};

/// What people say of it.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Clusters")]
pub struct Access {
    /// Ask in the cluster of this kubeconfig, by its API server
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Ask in the cluster of this context of the kubeconfig, which may then also be one in $KUBECONFIG or ~/.kube/config
    #[arg(long, global = true, value_name = "NAME", hide_short_help = true)]
    pub context: Option<String>,
    /// The namespace of VMs that are named without one; ls and watch show those in it only
    #[arg(short, long, global = true, value_name = "NAME", hide_short_help = true)]
    pub namespace: Option<String>,
    /// VMs of all namespaces, also if the context names one
    #[arg(short = 'A', long, global = true, conflicts_with = "namespace", hide_short_help = true)]
    pub all_namespaces: bool,
    /// Ask only the host half of this node, as guestctl on the node itself would
    #[arg(long, global = true, value_name = "NAME", hide_short_help = true)]
    pub node: Option<String>,
}

/// API server of a cluster.
#[derive(Clone)]
pub struct ApiServer {
    /// Client of the API server.
    pub client: Client,
    /// URL of the API server.
    pub url: String,
    /// Namespace of the kubeconfig's context.
    pub namespace: Option<String>,
}

impl Access {
    /// Returns whether the options name a cluster.
    pub fn names_a_cluster(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }

    /// Returns whether an option is given that only has a meaning in a cluster.
    pub fn is_for_a_cluster(&self) -> bool {
        self.namespace.is_some() || self.all_namespaces || self.node.is_some()
    }

    /// Determines the API server and the credentials for it. No request is sent yet.
    ///
    /// # Errors
    /// Fails if no kubeconfig names a cluster and this is not a pod, or if the kubeconfig cannot be used.
    pub async fn api_server(&self) -> Result<ApiServer, Error> {
        // Without an explicit provider, rustls would use the one that the program is built with, and panic if there
        // are two.
        drop(rustls::crypto::ring::default_provider().install_default());
        let (config, namespace) = match self.kubeconfig()? {
            Some((name, kubeconfig)) => {
                let context = self.context.clone().or_else(|| kubeconfig.current_context.clone());
                let context = context.unwrap_or_default();
                let config = self.config(kubeconfig.clone()).await;
                let mut config = config.map_err(|error| Error::Kubeconfig(name, Box::new(error)))?;
                let proxy = proxies::proxy(&kubeconfig, &context, &config.cluster_url);
                config.proxy_url =
                    proxy.map_err(|why| Error::Unreachable { url: config.cluster_url.to_string(), why })?;
                (config, namespace(&kubeconfig, &context))
            }
            None => (Config::incluster().map_err(|_| Error::NoKubeconfig)?, None),
        };
        let url = config.cluster_url.to_string();
        let client = ClientBuilder::try_from(config)
            .map_err(|error| Error::Credentials(url.clone(), cause(&error)))?;
        Ok(ApiServer { client: client.build(), url, namespace })
    }

    /// Checks that no credential plugin has to be run: for requests that the user has not made explicitly, such
    /// as shell completion.
    ///
    /// # Errors
    /// Fails if a plugin has to be run, or no kubeconfig can be read.
    pub fn without_programs(&self) -> Result<&Self, Error> {
        let Some((name, kubeconfig)) = self.kubeconfig()? else { return Ok(self) };
        let context = self.context.as_ref().or(kubeconfig.current_context.as_ref());
        let named = kubeconfig.contexts.iter().find(|named| Some(&named.name) == context);
        let user = named.and_then(|named| named.context.as_ref()?.user.as_ref());
        let named = kubeconfig.auth_infos.iter().find(|named| Some(&named.name) == user);
        match named.and_then(|named| named.auth_info.as_ref()) {
            Some(user) if user.exec.is_some() || user.auth_provider.is_some() => {
                Err(Error::NeedsProgram(name))
            }
            _ => Ok(self),
        }
    }

    async fn config(&self, kubeconfig: Kubeconfig) -> Result<Config, KubeconfigError> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        Config::from_custom_kubeconfig(kubeconfig, &options).await
    }

    /// Reads the kubeconfig that is named, or merges those of the environment. Returns it with a name for
    /// messages; `None` if there is none.
    fn kubeconfig(&self) -> Result<Option<(String, Kubeconfig)>, Error> {
        let read = |path: &PathBuf| {
            let name = path.display().to_string();
            match Kubeconfig::read_from(path) {
                Ok(kubeconfig) => Ok(Some((name, kubeconfig))),
                Err(KubeconfigError::ReadConfig(error, _))
                    if error.kind() == std::io::ErrorKind::NotFound && self.kubeconfig.is_none() =>
                {
                    Ok(None)
                }
                Err(error) => Err(Error::Kubeconfig(name, Box::new(error))),
            }
        };
        let mut merged: Option<(String, Kubeconfig)> = None;
        for path in self.paths() {
            let Some((name, next)) = read(&path)? else { continue };
            merged = Some(match merged {
                None => (name, next),
                Some((names, before)) => {
                    let names = format!("{names}, {name}");
                    let both = before.merge(next);
                    let both = both.map_err(|error| Error::Kubeconfig(names.clone(), Box::new(error)))?;
                    (names, both)
                }
            });
        }
        Ok(merged)
    }

    /// Returns the paths of kubeconfigs in kubectl's order. Any of those that were not named on the command line
    /// may be missing.
    fn paths(&self) -> Vec<PathBuf> {
        if let Some(path) = &self.kubeconfig {
            return vec![path.clone()];
        }
        let listed = std::env::var_os("KUBECONFIG").unwrap_or_default();
        let listed: Vec<_> =
            std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect();
        if !listed.is_empty() {
            return listed;
        }
        std::env::home_dir().map(|home| home.join(".kube/config")).into_iter().collect()
    }
}

/// Returns the namespace of a context.
fn namespace(kubeconfig: &Kubeconfig, context: &str) -> Option<String> {
    let named = kubeconfig.contexts.iter().find(|named| named.name == context)?;
    named.context.as_ref()?.namespace.clone().filter(|namespace| !namespace.is_empty())
}
