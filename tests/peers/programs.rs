//! Programs of one release, and a pair of them in a directory of its own.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;

/// Names the directory with `guestlet`, `guestlet-host` and `guestctl` of another release.
const OTHER: &str = "GUESTLET_OTHER_BIN_DIR";
/// What only a fault reaches.
const DEADLINE: Duration = Duration::from_secs(60);
/// What a release without one of these tables or keys refuses, and a release with it needs, so that nothing reaches for the
/// machine's own files and sockets; `@` is the directory.
const AGENT_TABLES: [&str; 3] = [
    "[callback]\nlisten = \"unix:@/callback.sock\"\n",
    "[cloud]\nsocket = \"@/cloud/cloud.sock\"\n",
    "[trust]\nstate-dir = \"@/trust\"\n",
];
const HOST_KEY: &str = "trust.state-dir = '@/trust'\n";
const VM_KEY: &str = "callback-socket = '@/callback.sock'\n";

/// The programs of one release.
pub struct Programs(Option<PathBuf>);

impl Programs {
    /// Those that this test was built with.
    pub fn own() -> Self {
        Self(None)
    }

    /// Those of the other release. Panics if nobody says where they are.
    pub fn other() -> Self {
        let Some(directory) = std::env::var_os(OTHER) else {
            panic!("{OTHER} is not set: name the directory with the programs of another release")
        };
        Self(Some(directory.into()))
    }

    pub fn is_own(&self) -> bool {
        self.0.is_none()
    }

    fn program(&self, name: &str) -> Command {
        let own = match name {
            "guestlet" => launch::AGENT,
            "guestlet-host" => lab::HOST,
            _ => env!("CARGO_BIN_EXE_guestctl"),
        };
        let path = self.0.as_ref().map_or_else(|| own.into(), |directory| directory.join(name));
        let mut command = launch::without_the_machines(Command::new(path));
        command.env_remove("CREDENTIALS_DIRECTORY").env_remove("GUESTLET_HOST_SOCKET").stdin(Stdio::null());
        command
    }

    /// What a program says of itself.
    pub fn version(&self, name: &str) -> String {
        let whose = if self.is_own() { "this" } else { "the other" };
        let output = self.program(name).arg("--version").output();
        let output = output.unwrap_or_else(|error| panic!("{name} of {whose} release does not run: {error}"));
        format!("{} of {whose} release", String::from_utf8(output.stdout).unwrap().trim())
    }
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A running agent and a running host half that dials it as the VM `a`.
pub struct Pair {
    agents: Programs,
    hosts: Programs,
    agent: Option<Running>,
    host: Option<Running>,
    folder: TempDir,
}

impl Pair {
    pub fn start(agents: &Programs, hosts: &Programs) -> Self {
        let [agents, hosts] = [agents, hosts].map(|programs| Programs(programs.0.clone()));
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        set_up_agent(&agents, at);
        set_up_host(&hosts, at);
        let (agent, host) = (Some(run_agent(&agents, at)), Some(run_host(&hosts, at)));
        Self { agents, hosts, agent, host, folder }
    }

    pub fn restart_agent(&mut self) {
        self.agent = None;
        self.agent = Some(run_agent(&self.agents, self.folder.path()));
    }

    pub fn restart_host(&mut self) {
        self.host = None;
        self.host = Some(run_host(&self.hosts, self.folder.path()));
    }

    fn run_ctl(&self, arguments: &[&str]) -> Output {
        let mut command = self.hosts.program("guestctl");
        command.arg("--socket").arg(self.folder.path().join("run/api.sock")).args(arguments).output().unwrap()
    }

    /// What guestctl prints, which has to succeed.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.run_ctl(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Waits until the host half says so of the VM, and returns what it says.
    pub fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + DEADLINE;
        loop {
            let output = self.run_ctl(&["info", "a", "-o", "json"]);
            let vm: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if wanted(&vm) {
                return vm;
            }
            assert!(Instant::now() < end, "never: {what}: {vm:#}\n{output:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What `guestlet status` says in the guest.
    pub fn status(&self) -> String {
        let settings = self.folder.path().join("agent.toml");
        let output = self.agents.program("guestlet").arg("status").arg("--settings").arg(settings).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a QGA client is answered.
    pub fn qga(&self, command: &str) -> Value {
        let mut stream = connected(&self.folder.path().join("qga.sock"));
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        writeln!(stream, "{}", json!({ "execute": command })).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn logs(&self) -> String {
        let log = |name: &str| std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        format!("the agent:\n{}\nthe host half:\n{}", log("agent.log"), log("host.log"))
    }
}

/// The release of the kernel, which both ends can say.
pub fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim().to_owned()
}

/// Settings that keep an agent to the directory, as far as its release knows them.
fn set_up_agent(agents: &Programs, at: &Path) {
    let file = at.join("agent.toml");
    // A hook that fails: nothing of this machine is ever frozen.
    let mut settings = "runtime-dir = \"@\"\nqemu-ga-files = false\n[control]\nlisten = \"unix:@/control.sock\"\n\
                        [qga]\nmethod = \"unix-listen\"\npath = \"@/qga.sock\"\nfsfreeze-hook = \"/bin/false\"\n\
                        [csi]\nenabled = false\nkubelet-root = \"@/kubelet\"\n\
                        [topology]\nkubeconfig = \"@/no-kubeconfig\"\n"
        .to_owned();
    let takes = |settings: &str| {
        std::fs::write(&file, filled(settings, at)).unwrap();
        let mut command = agents.program("guestlet");
        command.arg("--dump-conf").arg("--settings").arg(&file).output().unwrap()
    };
    for table in AGENT_TABLES {
        let more = settings.clone() + table;
        if takes(&more).status.success() {
            settings = more;
        }
    }
    let output = takes(&settings);
    assert!(output.status.success(), "{output:?}");
}

/// Settings that keep a host half to the directory, as far as its release knows them.
fn set_up_host(hosts: &Programs, at: &Path) {
    let file = at.join("host.toml");
    let found = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default();
    let dmi = match found.trim() {
        "" => "none".to_owned(),
        uuid => uuid.to_ascii_lowercase(),
    };
    let takes = |keys: &str, of_vm: &str| {
        let mut settings = format!("socket = '@/run/api.sock'\nvolumes-dir = '@/volumes'\n{keys}");
        write!(
            settings,
            "[[vm]]\nname = 'a'\nuuid = '6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c01'\ndmi-uuid = '{dmi}'\n\
             unix-socket = '@/control.sock'\n{of_vm}"
        )
        .unwrap();
        std::fs::write(&file, filled(&settings, at)).unwrap();
        hosts.program("guestlet-host").arg("--config").arg(&file).arg("--check").output().unwrap()
    };
    let keys = if takes(HOST_KEY, "").status.success() { HOST_KEY } else { "" };
    let of_vm = if takes(keys, VM_KEY).status.success() { VM_KEY } else { "" };
    let output = takes(keys, of_vm);
    assert!(output.status.success(), "{output:?}");
}

fn filled(settings: &str, at: &Path) -> String {
    settings.replace('@', &at.display().to_string())
}

fn run_agent(agents: &Programs, at: &Path) -> Running {
    let log = File::options().create(true).append(true).open(at.join("agent.log")).unwrap();
    let mut command = agents.program("guestlet");
    let child = command.arg("--settings").arg(at.join("agent.toml")).arg("--verbose").stderr(log).spawn();
    let running = Running(child.unwrap());
    connected(&at.join("control.sock"));
    running
}

fn run_host(hosts: &Programs, at: &Path) -> Running {
    let log = File::options().create(true).append(true).open(at.join("host.log")).unwrap();
    let mut command = hosts.program("guestlet-host");
    let child = command.arg("--config").arg(at.join("host.toml")).arg("--verbose").stderr(log).spawn();
    let running = Running(child.unwrap());
    connected(&at.join("run/api.sock"));
    running
}

/// A connection with whoever listens there, who may have to be waited for.
fn connected(socket: &Path) -> UnixStream {
    let end = Instant::now() + DEADLINE;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < end, "nobody listens at {}: {error}", socket.display()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until it is so.
pub fn eventually(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
