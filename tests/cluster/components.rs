//! The programs of Kubernetes, and the etcd under them, in namespaces where ports, processes and mounts are the test's own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::api::Api;
use crate::authority::Authority;
use crate::cluster::until;
use crate::lab::run;

/// Where the control plane runs, beside the first node.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const PORT: u16 = 6443;
const ETCD: &str = "http://127.0.0.1:2379";
/// Where programs would look for volume plugins of another kind.
pub const PLUGINS: &str = "/var/lib/volume-plugins";
/// Lines of a program's log that are shown when a test fails.
const LAST_LINES: usize = 400;

/// The controllers that volumes and pods need, and those that make a Deployment's pods.
const CONTROLLERS: &str = "attachdetach,nodelifecycle,persistentvolume-binder,persistentvolume-expander,podgc,pv-protection,pvc-protection";
const DEPLOYMENTS: &str = "deployment,replicaset";

/// Whom the sidecars' service account is to the API server.
const SIDECARS: &str = "system:serviceaccount:kube-system:guestlet-csi";
const ACCOUNTS: &str = "system:serviceaccounts";

/// The namespaces of a cluster: options of unshare(1).
pub const NAMESPACES: [&str; 6] = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// Runs the test that calls this again where it sees no processes, networks and mounts but its own, and where all that it
/// starts ends with it; false in there.
pub fn is_outside() -> bool {
    crate::stand_in::play_if_meant();
    let outside = crate::namespace::inside().is_none() && crate::namespace::run_inside(&NAMESPACES, &[]);
    if !outside {
        settle();
    }
    outside
}

/// Makes new namespaces a place for a cluster.
pub fn settle() {
    std::fs::create_dir_all("/run/guestlet").unwrap();
    for place in ["/var/lib", "/var/log", "/run/guestlet", "/mnt"] {
        run(&format!("mount -t tmpfs lab {place}"));
    }
    // The nodes', and those of all pods.
    run("ip link set lo up; ip address add 192.0.2.1/32 dev lo; ip address add 192.0.2.2/32 dev lo");
    run("ip address add 198.18.0.1/15 dev lo");
}

/// A program that `make setup` builds or unpacks.
pub fn program(name: &str) -> String {
    let folder = std::env::var_os("KUBERNETES_BIN_DIR");
    let folder = folder.expect("KUBERNETES_BIN_DIR must name the directory of kubelet; make test sets it");
    let path = Path::new(&folder).join(name);
    assert!(path.is_file(), "{} is no file; run make setup", path.display());
    path.display().to_string()
}

/// The minor version of Kubernetes that the tests were given.
pub fn release() -> u32 {
    let version = run(&format!("{} --version", program("kubelet")));
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse().ok());
    minor.unwrap_or_else(|| panic!("{version} is no version of kubelet"))
}

/// Whether options are to be given that newer releases no longer have, because without them the older ones would listen
/// on ports without TLS, or look for Docker.
pub fn is_old() -> bool {
    release() < 24
}

/// A program that runs. It ends with this value, and with the test's namespace at the latest.
pub struct Component {
    command: Vec<String>,
    log: PathBuf,
    child: Child,
}

impl Component {
    /// Starts a program whose words go to `<name>.log` in `folder`.
    pub fn start(name: &str, folder: &Path, command: Vec<String>) -> Self {
        let log = folder.join(format!("{name}.log"));
        let child = spawn(&command, &log);
        Self { command, log, child }
    }

    /// Its process id.
    pub fn id(&self) -> String {
        self.child.id().to_string()
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Ends it as hard as can be.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again after it was killed.
    pub fn again(&mut self) {
        self.child = spawn(&self.command, &self.log);
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
            eprintln!("the last lines of {}:\n{last}", self.log.display());
        }
    }
}

fn spawn(command: &[String], log: &Path) -> Child {
    let folder = log.parent().unwrap();
    let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
    Command::new(&command[0])
        .args(&command[1..])
        // None of them has anything to do with the directory that the tests run in.
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// A command line of a program and its options, `name=value` each.
pub fn command(name: &str, options: &[String]) -> Vec<String> {
    let options = options.iter().map(|option| format!("--{option}"));
    std::iter::once(program(name)).chain(options).collect()
}

/// The control plane of a cluster without nodes.
pub struct ControlPlane {
    pub api: Api,
    pub api_server: Component,
    pub authority: Authority,
    pub folder: tempfile::TempDir,
    _others: Vec<Component>,
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
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new(folder.path());
        authority.serve("apiserver", ADDRESS);
        authority.kubeconfig("sidecars", SIDECARS, ACCOUNTS, &server());
        authority.kubeconfig("test", "test", "system:masters", &server());
        let api = Api::read(folder.path(), "test");
        let mut others = vec![Component::start("etcd", folder.path(), command("etcd", &etcd(folder.path())))];
        let mut api_server =
            Component::start("apiserver", folder.path(), command("kube-apiserver", &api_server(&authority)));
        until("the API server is ready", async || {
            assert!(api_server.runs(), "the API server has ended");
            api.is_ready().await.then_some(())
        })
        .await;
        let controllers = [format!("controllers={controllers}"), format!("flex-volume-plugin-dir={PLUGINS}")];
        for (name, more) in [("kube-controller-manager", &controllers[..]), ("kube-scheduler", &[])] {
            let config = authority.kubeconfig(name, &format!("system:{name}"), "system:masters", &server());
            let mut options = vec![format!("kubeconfig={}", config.display())];
            options.extend(["leader-elect=false", "secure-port=0"].map(str::to_owned));
            options.extend(is_old().then(|| "port=0".to_owned()));
            options.extend_from_slice(more);
            others.push(Component::start(name, folder.path(), command(name, &options)));
        }
        Self { api, api_server, authority, folder, _others: others }
    }

    /// A kubeconfig of the kubelet of this node, which may be written again.
    pub fn kubelet_config(&self, node: &str) -> PathBuf {
        self.authority.kubeconfig(node, &format!("system:node:{node}"), "system:nodes", &server())
    }

    /// Where the credentials are by which the sidecars ask the API server, as [`Api::read`] finds them.
    pub fn sidecars(&self) -> &Path {
        self.folder.path()
    }
}

/// Where the API server listens.
pub fn endpoint() -> SocketAddr {
    SocketAddr::new(ADDRESS, PORT)
}

/// The URL of the API server.
fn server() -> String {
    format!("https://{ADDRESS}:{PORT}")
}

fn etcd(folder: &Path) -> [String; 5] {
    [
        format!("data-dir={}", folder.join("etcd").display()),
        format!("listen-client-urls={ETCD}"),
        format!("advertise-client-urls={ETCD}"),
        "unsafe-no-fsync".to_owned(),
        "logger=zap".to_owned(),
    ]
}

fn api_server(authority: &Authority) -> Vec<String> {
    let file = |option: &str, name: &str| format!("{option}={}", authority.file(name).display());
    let mut options = vec![
        format!("etcd-servers={ETCD}"),
        format!("bind-address={ADDRESS}"),
        format!("advertise-address={ADDRESS}"),
        format!("secure-port={PORT}"),
        file("client-ca-file", "ca.crt"),
        file("tls-cert-file", "apiserver.crt"),
        file("tls-private-key-file", "apiserver.key"),
        file("service-account-signing-key-file", "accounts.key"),
        file("service-account-key-file", "accounts.pub"),
        "service-account-issuer=https://cluster.test".to_owned(),
        "service-cluster-ip-range=198.51.100.0/24".to_owned(),
        "authorization-mode=Node,RBAC".to_owned(),
        "enable-admission-plugins=NodeRestriction".to_owned(),
        // Nobody makes the tokens that pods would be given.
        "disable-admission-plugins=ServiceAccount".to_owned(),
        "endpoint-reconciler-type=none".to_owned(),
    ];
    options.extend(is_old().then(|| "insecure-port=0".to_owned()));
    options
}
