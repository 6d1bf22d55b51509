//! The control plane of a cluster: etcd, the API server, and what of the rest a test needs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::api::Api;
use crate::authority::Authority;
use crate::components::{Component, command, is_old};
use crate::patience::until;

/// Where the control plane runs, beside the first node.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const PORT: u16 = 6443;
const ETCD_PORT: u16 = 2379;
const PEERS_PORT: u16 = 2380;
/// Where programs would look for volume plugins of another kind.
pub const PLUGINS: &str = "/var/lib/volume-plugins";

/// The controllers that volumes and pods need, and those that make a Deployment's pods.
const CONTROLLERS: &str = "attachdetach,nodelifecycle,persistentvolume-binder,persistentvolume-expander,podgc,pv-protection,pvc-protection";
const DEPLOYMENTS: &str = "deployment,replicaset";

/// Whom the sidecars' service account is to the API server.
const SIDECARS: &str = "system:serviceaccount:kube-system:guestlet-csi";
const ACCOUNTS: &str = "system:serviceaccounts";

/// The control plane of a cluster without nodes.
pub struct ControlPlane {
    pub api: Api,
    pub api_server: Component,
    others: Vec<Component>,
    pub authority: Authority,
    /// Removed after those have ended who write to it.
    pub folder: tempfile::TempDir,
    site: Site,
}

/// Where a control plane runs.
#[derive(Clone, Copy)]
pub struct Site {
    /// All of it listens here.
    pub address: IpAddr,
    /// What each program is started by, if by anything.
    pub by: &'static [&'static str],
}

impl ControlPlane {
    /// Starts one, and waits until its API server answers.
    pub async fn start() -> Self {
        Self::start_with(CONTROLLERS.to_owned()).await
    }

    /// The same, where Deployments get their pods.
    pub async fn with_deployments() -> Self {
        Self::start_with(format!("{CONTROLLERS},{DEPLOYMENTS}")).await
    }

    async fn start_with(controllers: String) -> Self {
        let mut plane = Self::servers(Site { address: ADDRESS, by: &[] }).await;
        plane.authority.kubeconfig("sidecars", SIDECARS, ACCOUNTS, &plane.site.server());
        plane.add_controllers(&controllers);
        plane.add("kube-scheduler", &[]);
        plane
    }

    /// Starts etcd and the API server alone, and waits until that answers.
    pub async fn servers(site: Site) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new(folder.path());
        authority.serve("apiserver", site.address);
        authority.kubeconfig("test", "test", "system:masters", &site.server());
        let start = |log: &str, name: &str, options: &[String]| {
            Component::start(log, folder.path(), site.command(name, options))
        };
        let etcd = start("etcd", "etcd", &etcd(site, folder.path()));
        let mut api_server = start("apiserver", "kube-apiserver", &api_server(site, &authority));
        let api = Api::read(folder.path(), "test");
        until("the API server is ready", async || {
            assert!(api_server.runs(), "the API server has ended");
            api.is_ready().await.then_some(())
        })
        .await;
        Self { api, api_server, authority, folder, site, others: vec![etcd] }
    }

    /// Starts these controllers of Kubernetes.
    pub fn add_controllers(&mut self, controllers: &str) {
        let options = [format!("controllers={controllers}"), format!("flex-volume-plugin-dir={PLUGINS}")];
        self.add("kube-controller-manager", &options);
    }

    fn add(&mut self, name: &str, more: &[String]) {
        let config = self.kubeconfig(name, &format!("system:{name}"), "system:masters");
        let mut options = vec![format!("kubeconfig={}", config.display())];
        options.extend(["leader-elect=false", "secure-port=0"].map(str::to_owned));
        options.extend(is_old().then(|| "port=0".to_owned()));
        options.extend_from_slice(more);
        let command = self.site.command(name, &options);
        self.others.push(Component::start(name, self.folder.path(), command));
    }

    /// Where it listens.
    pub fn address(&self) -> IpAddr {
        self.site.address
    }

    /// A kubeconfig of this user of this group.
    pub fn kubeconfig(&self, name: &str, user: &str, group: &str) -> PathBuf {
        self.authority.kubeconfig(name, user, group, &self.site.server())
    }

    /// A kubeconfig of the kubelet of this node, which may be written again.
    pub fn kubelet_config(&self, node: &str) -> PathBuf {
        self.kubeconfig(node, &format!("system:node:{node}"), "system:nodes")
    }

    /// Where the credentials are by which the sidecars ask the API server, as [`Api::read`] finds them.
    pub fn sidecars(&self) -> &Path {
        self.folder.path()
    }
}

/// Where the API server listens that is started beside the first node.
pub fn endpoint() -> SocketAddr {
    SocketAddr::new(ADDRESS, PORT)
}

impl Site {
    /// The URL of the API server.
    fn server(self) -> String {
        format!("https://{}:{PORT}", self.address)
    }

    fn command(self, name: &str, options: &[String]) -> Vec<String> {
        let by = self.by.iter().map(|&word| word.to_owned());
        by.chain(command(name, options)).collect()
    }

    fn url(self, port: u16) -> String {
        format!("http://{}:{port}", self.address)
    }
}

fn etcd(site: Site, folder: &Path) -> Vec<String> {
    let (clients, peers) = (site.url(ETCD_PORT), site.url(PEERS_PORT));
    vec![
        format!("data-dir={}", folder.join("etcd").display()),
        format!("listen-client-urls={clients}"),
        format!("advertise-client-urls={clients}"),
        format!("listen-peer-urls={peers}"),
        format!("initial-advertise-peer-urls={peers}"),
        format!("initial-cluster=default={peers}"),
        "unsafe-no-fsync".to_owned(),
        "logger=zap".to_owned(),
    ]
}

fn api_server(site: Site, authority: &Authority) -> Vec<String> {
    let file = |option: &str, name: &str| format!("{option}={}", authority.file(name).display());
    let mut options = vec![
        format!("etcd-servers={}", site.url(ETCD_PORT)),
        format!("bind-address={}", site.address),
        // It never is told to anybody (endpoint-reconciler-type), but may not be a loopback address.
        format!("advertise-address={ADDRESS}"),
        format!("secure-port={PORT}"),
        file("client-ca-file", "ca.crt"),
        file("tls-cert-file", "apiserver.crt"),
        file("tls-private-key-file", "apiserver.key"),
        file("service-account-signing-key-file", "accounts.key"),
        file("service-account-key-file", "accounts.pub"),
        "service-account-issuer=https://cluster.test".to_owned(),
        "service-cluster-ip-range=198.18.0.0/16".to_owned(),
        "authorization-mode=Node,RBAC".to_owned(),
        "enable-admission-plugins=NodeRestriction".to_owned(),
        // Nobody makes the tokens that pods would be given.
        "disable-admission-plugins=ServiceAccount".to_owned(),
        "endpoint-reconciler-type=none".to_owned(),
    ];
    options.extend(is_old().then(|| "insecure-port=0".to_owned()));
    options
}
