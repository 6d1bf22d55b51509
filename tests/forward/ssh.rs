//! ssh, scp, rsync and Ansible through `guestctl forward --stdio`, with the real programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::forwarding::{free_port, lab};
use crate::lab::{Lab, until};
use crate::servers::pattern;

/// An sshd on a port of 127.0.0.1 that lets one key in, in a folder of its own. Ends when it is dropped.
struct Server {
    folder: tempfile::TempDir,
    port: u16,
    sshd: Child,
}

/// Where nobody else sees it: the users, and the empty directory that sshd wants.
const PREPARED: &str = "mount --bind \"$1\" /etc/passwd; mount -t tmpfs -o mode=755 run /run; mkdir /run/sshd; shift; exec \"$@\"";

/// sshd, which `make setup` unpacks; `SSHD` names it.
fn program() -> PathBuf {
    let path =
        PathBuf::from(std::env::var_os("SSHD").expect("SSHD must name Debian's sshd; make test sets it"));
    assert!(path.is_file(), "SSHD names {}, which is no file", path.display());
    path
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.sshd.kill());
        drop(self.sshd.wait());
    }
}

fn key(path: &Path) {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path);
    assert!(command.status().unwrap().success());
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        key(&path("host"));
        key(&path("mine"));
        fs::copy(path("mine.pub"), path("authorized")).unwrap();
        // The user that sshd has for what it does before a login, wherever it is not installed.
        let users = fs::read_to_string("/etc/passwd").unwrap();
        let others = users.lines().filter(|line| !line.starts_with("sshd:"));
        let sshd = ["sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin"];
        let users: Vec<_> = others.chain(sshd).collect();
        fs::write(path("passwd"), users.join("\n") + "\n").unwrap();
        let port = free_port();
        let settings = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {0}/host\nAuthorizedKeysFile {0}/authorized\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
            folder.path().display()
        );
        fs::write(path("sshd_config"), settings).unwrap();
        let log = fs::File::create(path("log")).unwrap();
        let mut sshd = Command::new("unshare");
        sshd.args(["--mount", "sh", "-ec", PREPARED, "sh"]).arg(path("passwd")).arg(program());
        sshd.args(["-D", "-e", "-f"]).arg(path("sshd_config")).stderr(log).stdin(Stdio::null());
        let server = Self { port, sshd: sshd.spawn().unwrap(), folder };
        until("sshd listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        server
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Options of ssh, which scp has as well.
    fn options(&self, lab: &Lab) -> Vec<String> {
        let proxy = format!(
            "ProxyCommand={} --socket {} forward web {} --stdio",
            env!("CARGO_BIN_EXE_guestctl"),
            lab.host.socket().display(),
            self.port
        );
        let known = format!("UserKnownHostsFile={}", self.path("known").display());
        let words =
            ["IdentitiesOnly=yes", "StrictHostKeyChecking=accept-new", "BatchMode=yes", &known, &proxy];
        let mut options = vec![
            "-F".to_owned(),
            "none".to_owned(),
            "-i".to_owned(),
            self.path("mine").display().to_string(),
        ];
        options.extend(words.iter().flat_map(|word| ["-o".to_owned(), (*word).to_owned()]));
        options
    }
}

fn done(command: &mut Command, server: &Server) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let log = fs::read_to_string(server.path("log")).unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}\n{log}");
    output
}

#[test]
fn ssh_scp_and_rsync_work_through_it() {
    let server = Server::start();
    let lab = lab(&[server.port.to_string()]);
    let options = server.options(&lab);
    let output =
        done(Command::new("ssh").args(&options).args(["root@web", "echo $((6 * 7)); exit 0"]), &server);
    assert_eq!(output.stdout, b"42\n");
    let failed = Command::new("ssh").args(&options).args(["root@web", "exit 9"]).output().unwrap();
    assert_eq!(failed.status.code(), Some(9), "{failed:?}");

    let (here, there) = (server.path("here"), server.path("there"));
    fs::write(&here, pattern(8 << 20)).unwrap();
    done(
        Command::new("scp").arg("-q").args(&options).arg(&here).arg(format!("root@web:{}", there.display())),
        &server,
    );
    assert!(fs::read(&there).unwrap() == pattern(8 << 20));

    let tree = server.path("tree");
    for name in ["a", "b/c"] {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, pattern(100_000)).unwrap();
    }
    let words: Vec<_> = options.iter().map(|word| format!("'{word}'")).collect();
    let shell = format!("ssh {}", words.join(" "));
    let target = format!("root@web:{}/copy", server.folder.path().display());
    done(
        Command::new("rsync").arg("-a").arg("-e").arg(shell).arg(format!("{}/", tree.display())).arg(target),
        &server,
    );
    assert!(fs::read(server.path("copy/b/c")).unwrap() == pattern(100_000));
}

#[test]
fn ansible_works_through_it() {
    let server = Server::start();
    let lab = lab(&[server.port.to_string()]);
    // Of a text that begins and ends with the same quote, Ansible takes both away.
    let words: Vec<_> = server.options(&lab).iter().map(|word| format!("\"{word}\"")).collect();
    let inventory = server.path("inventory.json");
    let web = serde_json::json!({
        "ansible_user": "root",
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_common_args": format!("-4 {}", words.join(" ")),
    });
    let hosts = serde_json::json!({ "all": { "hosts": { "web": web } } });
    fs::write(&inventory, hosts.to_string()).unwrap();
    let ansible = |module: &[&str]| {
        let mut command = Command::new("ansible");
        command.args(["--one-line", "--inventory"]).arg(&inventory).arg("all").args(module);
        // Its own files, and connections that outlive it, are of this test.
        command.env("HOME", server.folder.path()).env("ANSIBLE_HOME", server.path("ansible"));
        command.env("ANSIBLE_SSH_ARGS", "-o ControlMaster=no").env("ANSIBLE_NOCOLOR", "1");
        command.env("ANSIBLE_REMOTE_TEMP", server.path("remote")).env("LC_ALL", "C.UTF-8");
        String::from_utf8(done(&mut command, &server).stdout).unwrap()
    };
    let pong = ansible(&["-m", "ping"]);
    assert!(pong.starts_with("web | SUCCESS") && pong.contains(r#""ping": "pong""#), "{pong}");
    let (here, there) = (server.path("here"), server.path("there"));
    fs::write(&here, pattern(1 << 20)).unwrap();
    let copied = ansible(&["-m", "copy", "-a", &format!("src={} dest={}", here.display(), there.display())]);
    assert!(copied.starts_with("web | CHANGED"), "{copied}");
    assert!(fs::read(&there).unwrap() == pattern(1 << 20));
}
