//! Programs that a user is logged in for: the agent is in a mount namespace of its own, where /etc has users, limits and a PAM service
//! of the test's. What logind does with a session, a script that PAM runs does here.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use guestlet::sys::terminal::Size;

use crate::host::{assert_fails, wait};
use crate::lab::{ALL, Lab, code, is_running, text, until};
use crate::screen::Screen;

const ALICE: u32 = 4_000_042;
const READERS: u32 = 4_000_043;
const USERS: &str = "alice:x:4000042:4000042::@home:/bin/bash\n\
                     carol:x:4000044:4000042::@home:/usr/bin/fish\n\
                     locked:x:4000045:4000042::@home:/usr/sbin/nologin\n";
const PROFILE: &str = "export FROM_PROFILE=yes\nPATH=$HOME/bin:$PATH\n";

/// A guest in which alice can log in.
struct Login {
    lab: Lab,
    home: tempfile::TempDir,
    /// The group to which sessions are moved, where this machine lets one make it.
    scope: Option<PathBuf>,
}

impl Login {
    fn new() -> Self {
        Self::with(ALL, "")
    }

    /// With these grants; `more` is done in the namespace as well.
    fn with(grants: &str, more: &str) -> Self {
        // Where others may go.
        let home =
            tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o755)).tempdir().unwrap();
        std::fs::write(home.path().join(".profile"), PROFILE).unwrap();
        let scope = scope(home.path());
        let etc = tempfile::tempdir().unwrap();
        let at = |name: &str| etc.path().join(name);
        let users = USERS.replace('@', &format!("{}/../", home.path().display())).replace("/../home", "");
        let also = |file: &str, more: &str| std::fs::read_to_string(file).unwrap() + more;
        std::fs::write(at("passwd"), also("/etc/passwd", &users)).unwrap();
        std::fs::write(at("group"), also("/etc/group", &format!("readers:x:{READERS}:alice\n"))).unwrap();
        let shadow =
            ["alice", "carol", "locked"].map(|user| format!("{user}:*:19000:0:99999:7:::\n")).concat();
        std::fs::write(at("shadow"), also("/etc/shadow", &shadow)).unwrap();
        std::fs::write(at("limits.conf"), "alice hard nofile 321\nalice soft nofile 321\n").unwrap();
        let told = home.path().join("sessions");
        let move_it = scope.as_ref().map(|scope| format!("echo $PPID > {}/cgroup.procs", scope.display()));
        let script = format!(
            "echo $PAM_TYPE $PAM_USER $PAM_SERVICE >> {}\n[ $PAM_TYPE != open_session ] || {}\n",
            told.display(),
            move_it.unwrap_or_else(|| "true".into())
        );
        std::fs::write(at("session.sh"), script).unwrap();
        let service = format!(
            "auth sufficient pam_rootok.so\nsession required pam_exec.so /bin/sh {}\nsession required pam_limits.so\n\
             session required pam_unix.so\n",
            at("session.sh").display()
        );
        std::fs::write(at("runuser-l"), service).unwrap();
        let mut setup = String::new();
        for (name, place) in [
            ("passwd", "/etc/passwd"),
            ("group", "/etc/group"),
            ("shadow", "/etc/shadow"),
            ("limits.conf", "/etc/security/limits.conf"),
            ("runuser-l", "/etc/pam.d/runuser-l"),
        ] {
            let _ = write!(setup, "mount --bind {} {place}; ", at(name).display());
        }
        let lab = Lab::within(grants, Some(format!("{setup}{more}")));
        // The agent has it mounted.
        drop(etc.keep());
        Self { lab, home, scope }
    }

    /// `guestctl exec --login` for alice.
    fn command(&self, options: &[&str], command: &[&str]) -> Command {
        self.lab.command(&[&["--login", "--user", "alice"], options].concat(), command)
    }

    fn run(&self, options: &[&str], command: &[&str]) -> std::process::Output {
        self.command(options, command).stdin(Stdio::null()).output().unwrap()
    }

    fn sessions(&self) -> String {
        std::fs::read_to_string(self.home.path().join("sessions")).unwrap_or_default()
    }

    /// The numbers of processes of alice that have this argument.
    fn processes(argument: &str) -> Vec<u32> {
        use std::os::unix::fs::MetadataExt as _;

        let all = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_its = |number: &u32| {
            let of = |name: &str| format!("/proc/{number}/{name}");
            let owner = std::fs::metadata(of("")).is_ok_and(|metadata| metadata.uid() == ALICE);
            let arguments = std::fs::read(of("cmdline")).unwrap_or_default();
            owner && arguments.split(|byte| *byte == 0).any(|one| one == argument.as_bytes())
        };
        all.filter_map(|name| name.parse().ok()).filter(is_its).filter(|number| is_running(*number)).collect()
    }
}

impl Drop for Login {
    fn drop(&mut self) {
        let Some(scope) = &self.scope else { return };
        // What a failed test has left.
        drop(std::fs::write(scope.join("cgroup.kill"), "1"));
        let gone = || std::fs::remove_dir(scope).is_ok() || !scope.exists();
        for _ in 0..100 {
            if gone() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        drop(std::fs::remove_dir(scope.parent().unwrap()));
    }
}

/// A group of the name that logind gives to one.
fn scope(home: &Path) -> Option<PathBuf> {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let mount = mounts.into_iter().find(|mount| mount.join("cgroup.controllers").exists())?;
    let name = home.file_name().unwrap().to_str().unwrap().trim_start_matches('.');
    let scope = mount.join(format!("guestlet-test-{name}")).join("session-7.scope");
    std::fs::create_dir_all(&scope).ok()?;
    Some(scope)
}

/// Starts a program whose first line of output is waited for.
fn begun(mut command: Command) -> (Child, String) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut source = BufReader::new(child.stdout.take().unwrap());
    source.read_line(&mut line).unwrap();
    // What comes after it is read, or the program would wait for that.
    std::thread::spawn(move || std::io::copy(&mut source, &mut std::io::sink()));
    (child, line)
}

#[test]
fn pam_opens_a_session_whose_shell_has_read_its_profile() {
    let login = Login::new();
    let show = "echo $(id -un) $(id -Gn); echo $FROM_PROFILE $(ulimit -n) $HOME $PWD $USER $SHELL; echo ${PATH%%:*} $GUESTLET_AGENT; \
                cat sessions; exit 7";
    let output = login.run(&[], &["sh", "-c", show]);
    let home = login.home.path().display().to_string();
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = words.lines();
    assert_eq!(code(&output), 7, "{output:?}");
    assert_eq!(lines.next(), Some("alice 4000042 readers"), "{output:?}");
    assert_eq!(lines.next(), Some(&*format!("yes 321 {home} {home} alice /bin/bash")), "{output:?}");
    assert_eq!(lines.next(), Some(&*format!("{home}/bin")));
    assert_eq!(lines.collect::<Vec<_>>(), ["open_session alice runuser-l"]);
    assert_eq!(login.sessions(), "open_session alice runuser-l\nclose_session alice runuser-l\n");
    // Without it there is no session.
    let plain = login.lab.exec(&["--user", "alice"], &["sh", "-c", "echo $(ulimit -n) $FROM_PROFILE"]);
    assert_ne!(text(&plain), "321 yes\n");
    assert_eq!(login.sessions().lines().count(), 2);
    let audited = login.lab.agent_log();
    assert!(audited.contains("(sh as alice (login)"), "{audited}");
    assert!(login.lab.host.log().contains("sh as alice (login)"), "{}", login.lab.host.log());
    assert!(!audited.contains("FROM_PROFILE"), "{audited}");
}

#[test]
fn arguments_variables_and_the_directory_arrive_as_they_are() {
    let login = Login::new();
    let hostile = [
        "",
        "-n",
        "--",
        "a b",
        "$(touch made)",
        "`touch made`",
        "'; touch made; '",
        "\"",
        "\\",
        "\n\n",
        "*",
        "é",
        "a=b",
        "!!",
        "~",
        "&",
        "\u{1b}[2J",
        "#",
        "-",
    ];
    for shell in ["alice", "carol"] {
        let options = [
            "--user",
            shell,
            "--env",
            "A=1 '2\"",
            "--env",
            "B=",
            "--env",
            "C=$(touch made)\n",
            "--cwd",
            "/usr/bin",
        ];
        let script = "printf '%s\\0' \"$0\" \"$@\" \"$A\" \"${B-none}\" \"$C\" \"$PWD\"";
        let command = [&["sh", "-c", script][..], &hostile].concat();
        let output = login.lab.exec(&[&["--login"][..], &options].concat(), &command);
        let found = text(&output);
        let wanted = [&hostile[..], &["1 '2\"", "", "$(touch made)\n", "/usr/bin"]].concat();
        assert_eq!(found.split_terminator('\0').collect::<Vec<_>>(), wanted, "{shell}");
    }
    assert!(!login.home.path().join("made").exists() && !Path::new("/usr/bin/made").exists());
    assert_fails(&login.run(&["--cwd", "/no/such"], &["true"]), 125, "/no/such");
    assert_fails(&login.run(&[], &["no-such-program"]), 127, "no-such-program");
    assert_fails(&login.run(&[], &["/etc/passwd"]), 126, "/etc/passwd");
    assert_fails(&login.run(&[], &["-c", "true"]), 125, "give its path");
    assert_fails(&login.run(&["--env", "a-b=1"], &["true"]), 125, "\"a-b\" is not the name of a variable");
    assert_fails(&login.lab.exec(&["--login", "--user", "locked"], &["true"]), 1, "");
    let words = text(&login.lab.exec_with(&["-i", "--login", "--user", "alice"], &["cat"], b"typed\n"));
    assert_eq!(words, "typed\n");
}

#[test]
fn signals_reach_the_program_and_its_end_is_its_own() {
    let login = Login::new();
    let script =
        "trap 'exit 3' TERM; trap 'echo usr1; exit 4' USR1; echo ready; while :; do sleep 0.05; done";
    for (signal, wanted) in [(None, 3), (Some("USR1"), 4)] {
        let (mut child, line) = begun(login.command(&[], &["sh", "-c", script]));
        assert_eq!(line, "ready\n");
        let id = login.lab.programs()[0]["id"].as_str().unwrap().to_owned();
        let kill = match signal {
            None => vec!["kill", "web", &id],
            Some(signal) => vec!["kill", "web", &id, "--signal", signal],
        };
        login.lab.host.words(&kill);
        assert_eq!(wait(&mut child).code(), Some(wanted), "{signal:?}");
    }
    assert_eq!(code(&login.run(&[], &["sh", "-c", "kill -SEGV $$"])), 139);
    assert_eq!(login.sessions().matches("close_session").count(), 3, "each session was closed");
}

#[test]
fn a_login_is_killed_with_all_that_has_left_its_group() {
    let mut login = Login::new();
    let begin = |number: &str| {
        format!("setsid sleep {number} > /dev/null 2>&1 & setsid sleep {number} & echo $$; wait")
    };
    let script = begin("424201");
    let (mut child, _) = begun(login.command(&[], &["sh", "-c", &script]));
    until("its processes", || Login::processes("424201").len() == 2);
    let program = login.lab.programs()[0].clone();
    if let Some(scope) = &login.scope {
        let inside = std::fs::read_to_string(scope.join("cgroup.procs")).unwrap();
        let number = program["process_id"].as_u64().unwrap().to_string();
        assert!(inside.lines().any(|line| line == number) && inside.lines().count() >= 4, "{inside}");
    }
    login.lab.host.words(&["kill", "web", program["id"].as_str().unwrap(), "--signal", "KILL"]);
    assert_eq!(wait(&mut child).code(), Some(137));
    until("nothing is left", || Login::processes("424201").is_empty());

    // What one that has ended by itself has left, where it is known.
    let leave = "setsid sleep 424202 > /dev/null 2>&1 & exit 0";
    let id = text(&login.run(&["--detach"], &["sh", "-c", leave]));
    let program = || login.lab.programs().into_iter().find(|one| one["id"] == id.trim_end()).unwrap();
    until("it has ended", || program()["is_running"] == false);
    assert_eq!(Login::processes("424202").len(), 1);
    login.lab.host.words(&["kill", "web", id.trim_end()]);
    until("nothing is left", || Login::processes("424202").is_empty());

    // Those of an agent that was killed.
    let script = begin("424203");
    let (mut child, _) = begun(login.command(&[], &["sh", "-c", &script]));
    until("its processes", || Login::processes("424203").len() == 2);
    login.lab.kill_agent();
    login.lab.start_agent();
    assert_eq!(wait(&mut child).code(), Some(255));
    // Whichever agent of this machine starts first ends it.
    until("nothing is left", || Login::processes("424203").is_empty());
}

#[test]
fn a_login_shell_has_the_terminal() {
    let login = Login::new();
    let command = login.lab.host.ctl_command(&["exec", "-it", "--login", "--user", "alice", "web"]);
    let mut screen = Screen::of(command, Size { rows: 30, columns: 100 });
    screen.type_keys("echo $0-$FROM_PROFILE-$TERM-$(stty size | tr ' ' x)\n");
    screen.until("-bash-yes-xterm-30x100");
    // A program in the foreground is interrupted, and the shell goes on.
    screen.type_keys("sleep 424204\n");
    until("it runs", || !Login::processes("424204").is_empty());
    screen.type_keys("\u{3}");
    until("it is interrupted", || Login::processes("424204").is_empty());
    screen.type_keys("echo $?-after\n");
    screen.until("130-after");
    screen.type_keys("exit 9\n");
    assert_eq!(screen.code(), Some(9));

    let mut screen = Screen::of(
        login.command(&["-it"], &["sh", "-c", "test -t 0 && echo ready; cat"]),
        Size { rows: 30, columns: 100 },
    );
    screen.until("ready");
    screen.type_keys("\u{3}");
    assert_eq!(screen.code(), Some(130));
    assert_eq!(login.sessions().matches("close_session").count(), 2);

    // Nobody comes back to this one.
    let script = "echo ready; sleep 424205";
    let mut screen = Screen::of(
        login.command(&["-it", "--wait", "1s"], &["sh", "-c", script]),
        Size { rows: 30, columns: 100 },
    );
    screen.until("ready");
    until("it runs", || Login::processes("424205").len() == 1);
    screen.kill();
    until("it has hung up", || Login::processes("424205").is_empty());
    until("its session is closed", || login.sessions().matches("close_session").count() == 3);
}

#[test]
fn where_programs_are_limited_the_shell_has_to_be_allowed() {
    let only = |paths: &str| {
        ALL.replace("\"exec\"]", &format!("\"exec\"]\nexec = {{ paths = [{paths}], users = [\"alice\"] }}"))
    };
    let login = Login::with(&only("\"/usr/bin/id\""), "");
    assert_fails(&login.run(&[], &["/usr/bin/id"]), 125, "the login shell must be allowed");
    let login = Login::with(&only("\"/usr/bin/id\", \"/usr/bin/bash\""), "");
    assert_eq!(text(&login.run(&[], &["/usr/bin/id", "-un"])), "alice\n");
    assert_fails(&login.run(&["--env", "A=1"], &["/usr/bin/id"]), 125, "neither --env nor --cwd");
    assert_fails(&login.lab.exec(&["--login"], &["/usr/bin/id"]), 125, "exec.users");
}

#[test]
fn a_guest_without_runuser_says_so() {
    let login = Login::with(ALL, "export PATH=/nowhere; ");
    assert_fails(&login.run(&[], &["true"]), 125, "install util-linux");
    assert_eq!(login.sessions(), "");
}
