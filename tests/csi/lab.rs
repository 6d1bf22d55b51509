//! An agent in a mount namespace of the test's own, its host half, and kubelet's folder.

use std::future::Future;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guestlet::transport::http2;
use guestlet::wire::proto::v1::disk_selector::By;
use guestlet::wire::proto::v1::guest_client::GuestClient;
use guestlet::wire::proto::v1::{DiskSelector, ReleaseDiskRequest, SetTopologyRequest, Topology};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;

use crate::agent::PATIENCE;
use crate::agent::launch::{AGENT, settings_with, without_the_machines};
use crate::host::{Callback, Control, host, next};
use crate::namespace;

pub const DRIVER: &str = "driver.harvesterhci.io";
/// What the scripted host half calls this guest.
pub const NODE: &str = "6f1c6a4e-8f0a-4a57-9a52-0d6d5d4c2b11";

/// Runs this test again in a mount namespace of its own, where nothing is kept; false in there.
pub fn is_outside() -> bool {
    is_outside_of(&["--mount"])
}

/// The same in the namespaces that these options of unshare(1) make, a mount namespace among them.
pub fn is_outside_of(options: &[&str]) -> bool {
    let outside = namespace::inside().is_none() && namespace::run_inside(options, &[]);
    if !outside {
        std::fs::create_dir_all("/run/guestlet").unwrap();
        run("mount -t tmpfs lab /var/lib; mount -t tmpfs lab /run/guestlet");
    }
    outside
}

/// Runs a script that has to succeed; what it said.
#[track_caller]
pub fn run(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
    assert!(output.status.success(), "{script}: {}\n{}{}", output.status, said[0], said[1]);
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Runs the test.
pub fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}

/// Whether this machine lets root grow an ext4 file system that is mounted, which takes `CAP_SYS_RESOURCE`.
pub fn ext4_grows() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & (1 << 24) != 0
}

/// Whether somebody takes connections at this socket, whose file alone says nothing.
pub fn serves(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Waits until something is so.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The agent, and where it is.
pub struct Lab {
    pub folder: TempDir,
    pub agent: Child,
    arguments: Vec<String>,
    /// Where the tree is that the agent has in the place of /sys, if it has not the one that is there.
    tree: Option<PathBuf>,
    half: Option<(Control, Callback, tonic::Streaming<guestlet::wire::proto::v1::Event>)>,
}

impl Lab {
    /// An agent that nobody has told yet who it is, and kubelet's folder. `settings` are lines of `[csi]`.
    pub fn unknown(settings: &str) -> Self {
        Self::unknown_with(settings, |all| all, &["-m", "none"])
    }

    /// As [`Self::unknown`], with settings as `adapt` changes them, and other arguments, where `{folder}` is the agent's
    /// folder.
    pub fn unknown_with(settings: &str, adapt: impl Fn(String) -> String, arguments: &[&str]) -> Self {
        Self::started(None, settings, adapt, arguments, |_| {})
    }

    /// An agent that nobody has told yet who it is, on a machine whose tree of sysfs is there. kubelet's folder is there, and
    /// what is mounted below it is seen by all.
    pub fn unknown_on(tree: Option<&Path>, settings: &str) -> Self {
        let share = |root: &str| {
            run(&format!("mkdir {root}; mount -t tmpfs kubelet {root}; mount --make-shared {root}"));
        };
        Self::started(tree, settings, |all| all, &["-m", "none"], share)
    }

    fn started(
        tree: Option<&Path>,
        settings: &str,
        adapt: impl Fn(String) -> String,
        arguments: &[&str],
        prepare: impl FnOnce(&str),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("kubelet").display().to_string();
        prepare(&root);
        let lines = format!("[csi]\nkubelet-root = \"{root}\"\n{settings}\n");
        let settings = adapt(settings_with(folder.path(), &lines));
        std::fs::write(folder.path().join("agent.toml"), settings).unwrap();
        let arguments: Vec<_> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let tree = tree.map(Path::to_owned);
        let agent = spawn(tree.as_deref(), folder.path(), &arguments);
        let lab = Self { folder, agent, arguments, tree, half: None };
        until("the agent answers", || serves(&lab.path("agent.sock")));
        lab
    }

    /// An agent that knows who it is.
    pub async fn new() -> Self {
        let mut lab = Self::unknown("");
        std::fs::create_dir(lab.root()).unwrap();
        lab.introduce().await;
        until("the driver is offered", || serves(&lab.registration()));
        lab
    }

    /// Has a host half say who the guest is.
    pub async fn introduce(&mut self) {
        self.introduce_by(host("one", CancellationToken::new())).await;
    }

    /// The same by one that serves this to the guest.
    pub async fn introduce_by(&mut self, service: impl http2::Service<Body>) {
        let (control, events) = self.hold().await;
        let callback = Callback::serve(self.folder.path(), "one", service).await;
        self.half = Some((control, callback, events));
    }

    /// A host half that holds the guest, and has no callback.
    pub async fn hold(&self) -> (Control, tonic::Streaming<guestlet::wire::proto::v1::Event>) {
        let control = Control::dial(self.folder.path()).await;
        let mut events = control.watch("one", None).await.unwrap();
        next(&mut events).await;
        (control, events)
    }

    /// Has the host half say on which host the guest runs.
    pub async fn runs_on(&self, host: &str) {
        self.tell(Topology { host: host.to_owned(), ..Topology::default() }).await.unwrap();
    }

    /// Has the host half say where the guest runs.
    pub async fn tell(&self, topology: Topology) -> Result<(), tonic::Status> {
        let (control, ..) = self.half.as_ref().unwrap();
        let request = SetTopologyRequest { host_instance_id: "one".to_owned(), topology: Some(topology) };
        control.client.clone().set_topology(request).await.map(drop)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// kubelet's folder.
    pub fn root(&self) -> PathBuf {
        self.path("kubelet")
    }

    pub fn socket(&self) -> PathBuf {
        self.root().join(format!("plugins/{DRIVER}/csi.sock"))
    }

    /// That of the sidecars.
    pub fn controller(&self) -> PathBuf {
        self.root().join(format!("plugins/{DRIVER}/controller/csi.sock"))
    }

    /// The host half goes away.
    pub fn leave(&mut self) {
        self.half = None;
    }

    pub fn registration(&self) -> PathBuf {
        self.root().join(format!("plugins_registry/{DRIVER}-reg.sock"))
    }

    /// Has the host half ask for a disk back.
    pub async fn release(&self, serial: &str) -> Result<(), tonic::Status> {
        release(self.guest(), serial).await
    }

    /// What the host half asks the agent by.
    pub fn guest(&self) -> GuestClient<http2::Client> {
        self.half.as_ref().unwrap().0.client.clone()
    }

    /// Ends the agent as hard as can be.
    pub fn kill(&mut self) {
        self.half = None;
        self.agent.kill().unwrap();
        self.agent.wait().unwrap();
    }

    /// Starts the agent after it was ended.
    pub fn start(&mut self) {
        self.agent = spawn(self.tree.as_deref(), self.folder.path(), &self.arguments);
    }

    /// The disks that the agent knows.
    pub fn disks(&self) -> String {
        run(&format!("{} disks -o json --settings {}", AGENT, self.path("agent.toml").display()))
    }

    /// Where the guest runs, and what became of that on its Node, as the agent tells programs.
    pub fn topology(&self) -> serde_json::Value {
        let asked = format!("{AGENT} topology -o json --settings {}", self.path("agent.toml").display());
        serde_json::from_str(&run(&asked)).unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

/// Asks an agent for a disk back.
pub async fn release(mut agent: GuestClient<http2::Client>, serial: &str) -> Result<(), tonic::Status> {
    let disk = Some(DiskSelector { by: Some(By::Serial(serial.to_owned())) });
    agent.release_disk(ReleaseDiskRequest { disk }).await.map(drop)
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        if std::thread::panicking() {
            eprintln!("the agent's log:\n{}", self.log());
        }
    }
}

fn spawn(tree: Option<&Path>, folder: &Path, arguments: &[String]) -> Child {
    let there = folder.display().to_string();
    let arguments = arguments.iter().map(|argument| argument.replace("{folder}", &there));
    let log = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).unwrap();
    // Figures are taken of another build than tests are.
    let program = std::env::var("GUESTLET_AGENT").unwrap_or_else(|_| AGENT.to_owned());
    let command = match tree {
        None => Command::new(program),
        Some(tree) => {
            let script = format!("mount --rbind {} /sys; exec \"$0\" \"$@\"", tree.display());
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "unchanged", "sh", "-ec", &script, &program]);
            command
        }
    };
    without_the_machines(command)
        .args(["-v", "-t"])
        .arg(folder)
        .args(arguments)
        .arg("--settings")
        .arg(folder.join("agent.toml"))
        .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}
