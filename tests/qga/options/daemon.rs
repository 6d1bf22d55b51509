//! The agent as a daemon, with its pid file.

use super::*;

/// A daemon, ended with the test.
struct Daemon {
    folder: TempDir,
}

impl Daemon {
    fn command(folder: &TempDir) -> Command {
        let mut command = crate::agent::launch::guestlet();
        let settings = file(folder, "agent.toml", settings_in(folder.path()));
        command.args(["-d", "-m", "unix-listen", "-p"]).arg(folder.path().join("qga.sock"));
        command.arg("-f").arg(folder.path().join("pid")).arg("--settings").arg(settings);
        command
    }

    fn pid(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.folder.path().join("pid")).ok()?;
        assert!(text.ends_with('\n'), "{text:?}");
        Some(Pid::from_raw(text.trim().parse().unwrap()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

#[test]
fn a_daemon_is_up_when_its_starter_ends_and_takes_its_pid_file_along() {
    let folder = tempfile::tempdir().unwrap();
    let started = Daemon::command(&folder).output().unwrap();
    let daemon = Daemon { folder };
    assert!(started.status.success(), "{}", text(&started.stderr));
    // At once, without waiting for anything.
    let mut client = Client::connect(&daemon.folder.path().join("qga.sock"));
    client.call("guest-ping");
    let pid = daemon.pid().unwrap();
    let process = PathBuf::from(format!("/proc/{pid}"));
    for descriptor in ["0", "1", "2"] {
        assert_eq!(std::fs::read_link(process.join("fd").join(descriptor)).unwrap(), Path::new("/dev/null"));
    }
    assert_eq!(std::fs::read_link(process.join("cwd")).unwrap(), Path::new("/"));
    let session = nix::unistd::getsid(Some(pid)).unwrap();
    assert!(
        session != pid && session != nix::unistd::getsid(None).unwrap(),
        "the session is neither ours nor its own"
    );

    let second =
        Daemon::command(&daemon.folder).arg("-p").arg(daemon.folder.path().join("other")).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("running already"), "{}", text(&second.stderr));
    assert_eq!(daemon.pid(), Some(pid));

    kill(pid, Signal::SIGTERM).unwrap();
    wait_for("the daemon does not end", || !process.exists());
    assert_eq!(daemon.pid(), None, "the pid file is left behind");
    assert!(!daemon.folder.path().join("qga.sock").exists());
}

#[test]
fn a_daemon_that_cannot_start_says_so_to_its_starter() {
    let folder = tempfile::tempdir().unwrap();
    let precious = file(&folder, "precious", "data");
    let failed = Daemon::command(&folder).arg("-p").arg(&precious).output().unwrap();
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed.stderr).contains("exists and is not a socket"), "{}", text(&failed.stderr));
    assert!(!folder.path().join("pid").exists());
}

#[test]
fn a_killed_daemons_pid_file_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Daemon::command(&folder).status().unwrap().success());
    let daemon = Daemon { folder };
    let first = daemon.pid().unwrap();
    kill(first, Signal::SIGKILL).unwrap();
    wait_for("the daemon does not end", || !PathBuf::from(format!("/proc/{first}")).exists());
    assert!(Daemon::command(&daemon.folder).status().unwrap().success());
    assert_ne!(daemon.pid(), Some(first));
}
