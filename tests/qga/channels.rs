//! Where QGA clients come from: serial lines, sockets of the service manager, sockets that cannot be had yet.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use crate::agent::{Agent, Client, PATIENCE, settings_in};

const PING: &[u8] = b"\xff{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":7}}\n";

/// Both ends of a line, open as those of a line of hardware are. No program that is started meanwhile inherits them:
/// an agent that has the host's end open as well would never be hung up on.
pub struct Line {
    pub host: File,
    guest: File,
}

/// A new line, whose guest's end `path` leads to.
pub fn line_at(path: &Path) -> Line {
    let host = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).unwrap();
    grantpt(&host).unwrap();
    unlockpt(&host).unwrap();
    let name = ptsname_r(&host).unwrap();
    let flags = OFlag::O_NOCTTY.bits();
    let guest = File::options().read(true).write(true).custom_flags(flags).open(&name).unwrap();
    // Until the agent has opened it, it must not echo.
    let mut settings = tcgetattr(&guest).unwrap();
    cfmakeraw(&mut settings);
    tcsetattr(&guest, SetArg::TCSANOW, &settings).unwrap();
    let beside = path.with_extension("new");
    symlink(name, &beside).unwrap();
    std::fs::rename(beside, path).unwrap();
    Line { host: File::from(OwnedFd::from(host)), guest }
}

/// Asks until there is an answer (what is sent before the agent opens the line is dropped), and hangs up.
fn answers(Line { host, guest }: Line) {
    let mut reader = BufReader::new(host.try_clone().unwrap());
    let (heard, hearing) = std::sync::mpsc::channel();
    let listener = std::thread::spawn(move || {
        let mut answer = Vec::new();
        while !answer.ends_with(b"{\"return\": 7}\n") && !answer.ends_with(b"{\"return\":7}\n") {
            answer.clear();
            if reader.read_until(b'\n', &mut answer).unwrap_or(0) == 0 {
                return;
            }
        }
        heard.send(()).unwrap();
    });
    let deadline = Instant::now() + PATIENCE;
    loop {
        (&host).write_all(PING).unwrap();
        if hearing.recv_timeout(Duration::from_millis(200)).is_ok() {
            break;
        }
        assert!(Instant::now() < deadline, "no answer on the line");
    }
    listener.join().unwrap();
    drop((guest, host));
}

#[test]
fn a_serial_line_is_served_and_again_after_it_was_hung_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let line = line_at(&path);
    let agent = Agent::start_with(&["-m", "isa-serial", "-p", path.to_str().unwrap()]);
    answers(line);
    answers(line_at(&path));
    assert!(agent.log().contains("hung up"), "{}", agent.log());
}

#[test]
fn a_serial_line_that_is_not_there_yet_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let _agent = Agent::start_with(&["-m", "isa-serial", "-p", path.to_str().unwrap()]);
    answers(line_at(&path));
}

/// Waits until somebody listens: the socket's file is there a moment earlier.
fn wait_for_listener(socket: &Path) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = UnixStream::connect(socket) {
        assert!(Instant::now() < deadline, "nobody listens on {}: {error}", socket.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The agent with a socket from a service manager.
fn activated(folder: &Path, socket: OwnedFd, unit: &str, arguments: &[&str]) -> Running {
    std::fs::write(folder.join("agent.toml"), settings_in(folder)).unwrap();
    // $LISTEN_PID is the agent's, and the socket its first descriptor after the standard streams.
    let script =
        "exec 3<&0 < /dev/null; LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec \"$@\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh", crate::agent::launch::AGENT, "--settings"])
        .arg(folder.join("agent.toml"));
    command.args(arguments).env("LISTEN_FDNAMES", unit).stdin(Stdio::from(socket));
    Running(command.stderr(File::create(folder.join("log")).unwrap()).spawn().unwrap())
}

#[test]
fn a_socket_that_is_passed_wins_over_the_method_and_is_left_in_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("passed.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let other = folder.path().join("other.sock");
    let agent = activated(
        folder.path(),
        listener.into(),
        "qga.socket",
        &["-m", "unix-listen", "-p", other.to_str().unwrap()],
    );
    let (mut one, mut two) = (Client::connect(&socket), Client::connect(&socket));
    one.call("guest-ping");
    two.call("guest-ping");
    one.call("guest-ping");
    assert!(!other.exists());
    drop(agent);
    assert!(socket.exists(), "the socket is the service manager's");
}

#[test]
fn a_socket_that_cannot_be_used_is_refused_and_one_of_the_api_is_never_qga() {
    let folder = tempfile::tempdir().unwrap();
    let (connected, _other) = UnixStream::pair().unwrap();
    let mut agent = activated(folder.path(), connected.into(), "qga.socket", &[]);
    assert_eq!(agent.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(
        log.contains("the socket passed for QGA cannot be used: it is not a stream socket that listens"),
        "{log}"
    );

    let socket = folder.path().join("qga.sock");
    let api = UnixListener::bind(folder.path().join("api.sock")).unwrap();
    assert!(api.as_raw_fd() > 2);
    let _agent = activated(
        folder.path(),
        api.into(),
        "guestlet.socket",
        &["-m", "unix-listen", "-p", socket.to_str().unwrap()],
    );
    wait_for_listener(&socket);
    Client::connect(&socket).call("guest-ping");
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.contains("a socket that guestlet.socket passed is ignored"), "{log}");
}

#[test]
fn with_retry_path_a_socket_is_listened_on_as_soon_as_it_can_be() {
    let folder = tempfile::tempdir().unwrap();
    let later = folder.path().join("later");
    let socket = later.join("qga.sock");
    let agent = Agent::start_with(&["-r", "-p", socket.to_str().unwrap()]);
    assert!(agent.log().contains("trying again every 5 s"), "{}", agent.log());
    std::fs::create_dir(&later).unwrap();
    wait_for_listener(&socket);
    Client::connect(&socket).call("guest-ping");
}
