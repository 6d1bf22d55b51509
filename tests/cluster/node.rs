//! A node: kubelet, the agent, a container runtime, and the machine's disks. Nodes share processes and networks; each has an
//! address and a mount namespace of its own, where `/var/lib/kubelet` is its kubelet's directory.
//!
//! ```text
//!     the test's own mounts, and the first agent     /sys: the first machine
//!      ├─ each further agent                         /sys: its machine
//!      └─ the node                                   /sys: the real one; /var/lib/kubelet
//!          ├─ kubelet
//!          └─ each container                         what it mounts is its own
//! ```
//!
//! What is mounted below a kubelet's directory is seen by all of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use crate::cluster::until;
use crate::components::{Component, command, is_old};
use crate::disk::Machine;
use crate::half::Half;
use crate::lab::{Lab, run};
use crate::plane::{ControlPlane, PLUGINS};
use crate::runtime::Runtime;

/// What kubelet wants the kernel's settings to be. It sees files with these in their places, so that it changes nothing.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Who a node is: the name of its Node, its address, and what the host half calls its machine.
pub struct Who {
    pub name: &'static str,
    pub address: &'static str,
    pub machine: &'static str,
}

pub const NODES: [Who; 2] = [
    Who { name: "node-1", address: "192.0.2.1", machine: crate::lab::NODE },
    Who { name: "node-2", address: "192.0.2.2", machine: "7a2d7b5f-9c0b-4b68-8b63-1e7e6e5d3c22" },
];

/// One of them. What is first here ends first.
pub struct Node {
    pub who: &'static Who,
    pub kubelet: Component,
    pub lab: Lab,
    pub runtime: Runtime,
    machine: Arc<Machine>,
    /// Holds the mount namespace.
    _mounts: Component,
}

impl Node {
    /// Starts one whose machine is there, and has its host half known to it. `settings` are lines of `[csi]`.
    pub async fn start(
        number: usize,
        machine: &Arc<Machine>,
        plane: &ControlPlane,
        half: &Half,
        settings: &str,
    ) -> Self {
        let who = &NODES[number];
        let kubeconfig = plane.kubelet_config(who.name);
        let settings = format!("{settings}\n[topology]\nkubeconfig = '{}'", kubeconfig.display());
        let tree = (machine.tree() != "/sys").then(|| machine.tree());
        let mut lab = Lab::unknown_on(tree, &settings);
        let root = lab.root().display().to_string();
        let mounts = mounts(&plane.folder.path().join(who.name), &machine.real(), &root);
        let (runtime, socket) =
            (Runtime::new(number, &mounts.id(), plane.sidecars()), lab.path("runtime.sock"));
        runtime.serve(&socket);
        let kubelet = kubelet(who, plane, &lab.root(), &socket, &mounts.id());
        half.answer_for(who.machine, &mut lab).await;
        Self { who, kubelet, lab, runtime, machine: machine.clone(), _mounts: mounts }
    }

    /// The mounts of volumes below kubelet's root.
    pub fn mounts(&self) -> Vec<String> {
        let root = self.lab.root();
        let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let places = list.lines().filter_map(|line| line.split(' ').nth(4));
        places
            .filter(|place| Path::new(place).starts_with(&root) && Path::new(place) != root)
            .map(str::to_owned)
            .collect()
    }

    /// Kills the agent, and starts it again; its host half comes back to it.
    pub async fn kill_agent(&mut self, half: &Half) {
        self.lab.kill();
        self.start_agent(half).await;
    }

    /// Starts the agent after it was killed.
    async fn start_agent(&mut self, half: &Half) {
        self.lab.start();
        until("the agent listens", async || listens(&self.lab.path("control.sock")).then_some(())).await;
        half.answer_for(self.who.machine, &mut self.lab).await;
    }

    /// The agent's host half goes, and comes back to it.
    pub async fn break_channel(&mut self, half: &Half) {
        self.lab.leave();
        half.answer_for(self.who.machine, &mut self.lab).await;
    }

    /// What kubelet has left of pods and volumes.
    pub fn left(&self) -> Vec<PathBuf> {
        let root = self.lab.root();
        let folders = ["pods", "plugins/kubernetes.io/csi/pv", "plugins/kubernetes.io/csi/volumeDevices"];
        let entries = folders.iter().filter_map(|folder| std::fs::read_dir(root.join(folder)).ok()).flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        // What these two have is beside them, too.
        paths.filter(|path| !path.ends_with("staging") && !path.ends_with("publish")).collect()
    }

    /// Kills kubelet, and starts it again.
    pub fn kill_kubelet(&mut self) {
        self.kubelet.kill();
        self.kubelet.again();
    }

    /// The machine loses its power: what ran has ended, and what was mounted is not.
    pub fn lose_power(&mut self) {
        self.kubelet.kill();
        self.runtime.kill();
        self.lab.kill();
        self.machine.let_go(&self.lab.root());
        for place in self.mounts().iter().rev() {
            run(&format!("umount --lazy '{place}'"));
        }
        // That of /run.
        for name in ["identity.json", "control.sock", "agent.sock"] {
            let _ = std::fs::remove_file(self.lab.path(name));
        }
    }

    /// The machine is switched on again.
    pub async fn boot(&mut self, half: &Half) {
        self.start_agent(half).await;
        self.kubelet.again();
    }
}

/// Whether a process listens on this socket, whose file another may have left behind. Nobody has to be dialled for that.
fn listens(socket: &Path) -> bool {
    const LISTENING: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.last() == socket.to_str()
    })
}

/// A mount namespace in which kubelet sees the machine as it is, and settings of the kernel as it wants them. All
/// kubelets of a node are in this one, because they find what an earlier one has made by the paths that it has there.
fn mounts(folder: &Path, machine: &str, root: &str) -> Component {
    std::fs::create_dir(folder).unwrap();
    let mut script = format!("mount --rbind {machine} /sys; mount -t tmpfs log /var/log; ");
    // Not those that are mounted below.
    write!(script, "mkdir -p /var/lib/kubelet; mount --bind --make-private {root} /var/lib/kubelet; ")
        .unwrap();
    for (name, value) in SETTINGS {
        let file = folder.join(name.replace('/', "."));
        std::fs::write(&file, value).unwrap();
        write!(script, "mount --bind {} /proc/sys/{name}; ", file.display()).unwrap();
    }
    script += "touch ready; exec sleep infinity";
    let command = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", &script];
    let node = Component::start("mounts", folder, command.map(str::to_owned).to_vec());
    crate::lab::until("the node's mounts are there", || folder.join("ready").exists());
    node
}

/// Starts a kubelet in the mount namespace of this process. `root` is its directory, whose mounts others see, too; `runtime`
/// is the socket of a container runtime.
fn kubelet(who: &Who, plane: &ControlPlane, root: &Path, runtime: &Path, mounts: &str) -> Component {
    let folder = plane.folder.path().join(who.name);
    let config = folder.join("kubelet.json");
    std::fs::write(&config, settings(who.address, &plane.authority.file("ca.crt")).to_string()).unwrap();
    let options = options(
        who,
        &Files {
            config: &config,
            kubeconfig: &plane.kubelet_config(who.name),
            root,
            certificates: &folder.join("pki"),
            runtime,
        },
    );
    let script = "cd \"$0\"; exec \"$@\"";
    let within = ["nsenter", "--mount", "--target", mounts, "sh", "-ec", script, folder.to_str().unwrap()];
    let command = within.map(str::to_owned).into_iter().chain(command("kubelet", &options)).collect();
    Component::start("kubelet", &folder, command)
}

/// Where a kubelet has what it works with.
pub struct Files<'p> {
    /// Its settings.
    pub config: &'p Path,
    pub kubeconfig: &'p Path,
    /// Its directory.
    pub root: &'p Path,
    /// Where it keeps the certificate that it makes for itself.
    pub certificates: &'p Path,
    /// The socket of a container runtime.
    pub runtime: &'p Path,
}

/// The options of this node's kubelet, `name=value` each.
pub fn options(who: &Who, files: &Files<'_>) -> Vec<String> {
    let mut options = vec![
        format!("config={}", files.config.display()),
        format!("kubeconfig={}", files.kubeconfig.display()),
        format!("root-dir={}", files.root.display()),
        format!("cert-dir={}", files.certificates.display()),
        format!("hostname-override={}", who.name),
        format!("node-ip={}", who.address),
        format!("container-runtime-endpoint=unix://{}", files.runtime.display()),
        "v=2".to_owned(),
    ];
    options.extend(is_old().then(|| "container-runtime=remote".to_owned()));
    options
}

/// The settings of a kubelet at this address, which knows its clients by the certificate of this file.
pub fn settings(address: &str, authority: &Path) -> serde_json::Value {
    let mut settings = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": false },
            "x509": { "clientCAFile": authority },
        },
        "authorization": { "mode": "AlwaysAllow" },
        "address": address,
        "healthzPort": 0,
        "nodeStatusUpdateFrequency": "1s",
        "syncFrequency": "5s",
        // As newer ones have it.
        "kubeAPIQPS": 50,
        "kubeAPIBurst": 100,
        "volumePluginDir": PLUGINS,
        // Pods are processes of the test, wherever that runs.
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "evictionHard": { "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%" },
    });
    // Nobody counts what pods write elsewhere; and the machine's cgroups are as they are.
    if is_old() {
        settings["featureGates"] = json!({ "LocalStorageCapacityIsolation": false });
    } else {
        settings["localStorageCapacityIsolation"] = json!(false);
        settings["failCgroupV1"] = json!(false);
    }
    settings
}
