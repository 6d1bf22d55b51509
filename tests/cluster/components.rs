//! The programs of Kubernetes, and the etcd under them, as they are found, started and ended.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Lines of a program's log that are shown when a test fails.
const LAST_LINES: usize = 400;

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
    let output = Command::new(program("kubelet")).arg("--version").output().unwrap();
    let version = String::from_utf8(output.stdout).unwrap();
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
    starts: u32,
}

impl Component {
    /// Starts a program whose words go to `<name>.log` in `folder`.
    pub fn start(name: &str, folder: &Path, command: Vec<String>) -> Self {
        let log = folder.join(format!("{name}.log"));
        let child = spawn(&command, &log);
        Self { command, log, child, starts: 1 }
    }

    /// Its process id.
    pub fn id(&self) -> String {
        self.child.id().to_string()
    }

    /// How often it was started.
    pub fn starts(&self) -> u32 {
        self.starts
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
        self.starts += 1;
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
