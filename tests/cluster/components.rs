//! The programs of Kubernetes, and the etcd under them, in namespaces where ports, processes and mounts are the test's own.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::api::Api;
use crate::authority::Authority;
use crate::cluster::until;
use crate::lab::run;

/// The machine that all of it runs on, and the name of its Node.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
pub const NODE: &str = "node-1";
const PORT: u16 = 6443;
const ETCD: &str = "http://127.0.0.1:2379";
/// Where programs would look for volume plugins of another kind.
const PLUGINS: &str = "/var/lib/volume-plugins";
/// Lines of a program's log that are shown when a test fails.
const LAST_LINES: usize = 400;

/// The controllers that volumes and pods need.
const CONTROLLERS: &str = "attachdetach,nodelifecycle,persistentvolume-binder,persistentvolume-expander,podgc,pv-protection,pvc-protection";

/// What kubelet wants the kernel's settings to be. It sees files with these in their places, so that it changes nothing.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Runs the test that calls this again where it sees no processes, networks and mounts but its own, and where all that it
/// starts ends with it; false in there.
pub fn is_outside() -> bool {
    let options = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let outside = crate::namespace::inside().is_none() && crate::namespace::run_inside(&options, &[]);
    if !outside {
        std::fs::create_dir_all("/run/guestlet").unwrap();
        for place in ["/var/lib", "/var/log", "/run/guestlet", "/mnt"] {
            run(&format!("mount -t tmpfs lab {place}"));
        }
        run(&format!("ip link set lo up; ip address add {ADDRESS}/32 dev lo"));
    }
    outside
}

/// A program that `make setup` builds or unpacks.
fn program(name: &str) -> String {
    let folder = std::env::var_os("KUBERNETES_BIN_DIR");
    let folder = folder.expect("KUBERNETES_BIN_DIR must name the directory of kubelet; make test sets it");
    let path = Path::new(&folder).join(name);
    assert!(path.is_file(), "{} is no file; run make setup", path.display());
    path.display().to_string()
}

/// A program that runs. It ends with this value, and with the test's namespace at the latest.
pub struct Component {
    command: Vec<String>,
    log: PathBuf,
    child: Child,
}

impl Component {
    /// Starts a program whose words go to `<name>.log` in `folder`.
    fn start(name: &str, folder: &Path, command: Vec<String>) -> Self {
        let log = folder.join(format!("{name}.log"));
        let child = spawn(&command, &log);
        Self { command, log, child }
    }

    /// Its process id.
    fn id(&self) -> String {
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
fn command(name: &str, options: &[String]) -> Vec<String> {
    let options = options.iter().map(|option| format!("--{option}"));
    std::iter::once(program(name)).chain(options).collect()
}

/// The control plane of a cluster without nodes.
pub struct ControlPlane {
    pub api: Api,
    pub api_server: Component,
    /// The kubeconfig of the Node's kubelet.
    pub kubelet_config: PathBuf,
    authority: Authority,
    folder: tempfile::TempDir,
    others: Vec<Component>,
}

impl ControlPlane {
    /// Starts one, and waits until its API server answers.
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new(folder.path());
        authority.serve("apiserver", ADDRESS);
        let api = Api::new(SocketAddr::new(ADDRESS, PORT), &authority);
        let mut others = vec![Component::start("etcd", folder.path(), command("etcd", &etcd(folder.path())))];
        let mut api_server =
            Component::start("apiserver", folder.path(), command("kube-apiserver", &api_server(&authority)));
        until("the API server is ready", async || {
            assert!(api_server.runs(), "the API server has ended");
            api.is_ready().await.then_some(())
        })
        .await;
        let controllers = [format!("controllers={CONTROLLERS}"), format!("flex-volume-plugin-dir={PLUGINS}")];
        for (name, more) in [("kube-controller-manager", &controllers[..]), ("kube-scheduler", &[])] {
            let config = authority.kubeconfig(name, &format!("system:{name}"), "system:masters", &server());
            let mut options = vec![format!("kubeconfig={}", config.display())];
            options.extend(["leader-elect=false", "port=0", "secure-port=0"].map(str::to_owned));
            options.extend_from_slice(more);
            others.push(Component::start(name, folder.path(), command(name, &options)));
        }
        let user = format!("system:node:{NODE}");
        let kubelet_config = authority.kubeconfig("kubelet", &user, "system:nodes", &server());
        Self { api, api_server, kubelet_config, authority, folder, others }
    }

    /// Starts a kubelet. `root` is its directory, whose mounts others see, too; `runtime` is the socket of a container
    /// runtime; `machine` is where the machine's own /sys is.
    pub fn kubelet(&mut self, root: &Path, runtime: &Path, machine: &str) -> Component {
        let config = self.folder.path().join("kubelet.json");
        std::fs::write(&config, kubelet_settings(&self.authority).to_string()).unwrap();
        let options = [
            format!("config={}", config.display()),
            format!("kubeconfig={}", self.kubelet_config.display()),
            format!("root-dir={}", root.display()),
            format!("cert-dir={}", self.folder.path().join("kubelet-pki").display()),
            format!("hostname-override={NODE}"),
            format!("node-ip={ADDRESS}"),
            "container-runtime=remote".to_owned(),
            format!("container-runtime-endpoint=unix://{}", runtime.display()),
            "v=2".to_owned(),
        ];
        let node = self.node(machine);
        let script = "cd \"$0\"; exec \"$@\"";
        let folder = self.folder.path().to_str().unwrap();
        let within = ["nsenter", "--mount", "--target", &node.id(), "sh", "-ec", script, folder];
        let command = within.map(str::to_owned).into_iter().chain(command("kubelet", &options)).collect();
        self.others.push(node);
        Component::start("kubelet", self.folder.path(), command)
    }

    /// A mount namespace in which kubelet sees the machine as it is, and settings of the kernel as it wants them. All
    /// kubelets are in this one, because they find what an earlier one has made by the paths that it has there.
    fn node(&self, machine: &str) -> Component {
        let folder = self.folder.path();
        let mut script = format!("mount --rbind {machine} /sys; ");
        for (name, value) in SETTINGS {
            let file = folder.join(name.replace('/', "."));
            std::fs::write(&file, value).unwrap();
            write!(script, "mount --bind {} /proc/sys/{name}; ", file.display()).unwrap();
        }
        script += "touch node; exec sleep infinity";
        let command = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", &script];
        let node = Component::start("node", folder, command.map(str::to_owned).to_vec());
        crate::lab::until("the node's mounts are there", || folder.join("node").exists());
        node
    }
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
    vec![
        format!("etcd-servers={ETCD}"),
        format!("bind-address={ADDRESS}"),
        format!("advertise-address={ADDRESS}"),
        format!("secure-port={PORT}"),
        "insecure-port=0".to_owned(),
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
    ]
}

fn kubelet_settings(authority: &Authority) -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": false },
            "x509": { "clientCAFile": authority.file("ca.crt") },
        },
        "authorization": { "mode": "AlwaysAllow" },
        "address": ADDRESS,
        "nodeStatusUpdateFrequency": "1s",
        "syncFrequency": "5s",
        "volumePluginDir": PLUGINS,
        // Pods are processes of the test, wherever that runs.
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "evictionHard": { "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%" },
        "featureGates": { "LocalStorageCapacityIsolation": false },
    })
}
