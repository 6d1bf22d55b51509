//! qemu-ga's options and settings files, given to the real program, beside Debian's qemu-ga where it has them.

mod daemon;

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::agent::launch::without_usual_files;
use crate::agent::{Agent, Client, PATIENCE, settings_in};
use crate::beside_qemu_ga::qemu_ga;

const PROGRAM: &str = crate::agent::launch::AGENT;

fn run<A: AsRef<OsStr>>(program: &Path, config: Option<&Path>, arguments: &[A]) -> Output {
    let mut command = without_usual_files(program);
    command.args(arguments);
    if let Some(config) = config {
        command.env("QGA_CONF", config);
    }
    command.output().unwrap()
}

fn text(output: &[u8]) -> String {
    String::from_utf8(output.to_vec()).unwrap()
}

fn file(folder: &TempDir, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// The program under the name that makes it qemu-ga.
fn under_the_name_qemu_ga(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("qemu-ga");
    symlink(PROGRAM, &path).unwrap();
    path
}

fn wait_for(what: &str, mut found: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !found() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The lines of a dump. Debian's qemu-ga has no allow list yet, and shows block lists back to front.
fn dumped(output: &Output) -> Vec<String> {
    let sorted = |line: &str| match line.strip_prefix("block-rpcs=") {
        Some(names) => {
            let mut names: Vec<_> = names.split(',').collect();
            names.sort_unstable();
            format!("block-rpcs={}", names.join(","))
        }
        None => line.to_owned(),
    };
    text(&output.stdout).lines().filter(|line| *line != "allow-rpcs=").map(sorted).collect()
}

#[test]
fn settings_are_shown_as_qemu_ga_shows_them() {
    let folder = tempfile::tempdir().unwrap();
    let arguments: &[&[&str]] = &[
        &["-D"],
        &["--dump-conf", "-v", "-r", "-d"],
        &["-D", "--verbose", "--retry-path", "--daemonize"],
        &["-D", "-m", "isa-serial"],
        &["-D", "-m", "isa-serial", "-p", "/dev/ttyS1"],
        &["-D", "--method=unix-listen", "--path=/run/a socket"],
        &["-D", "-m", "vsock-listen", "-p", "3:1234"],
        &["-D", "-l", "/log", "-f", "/pid", "-t", "/state"],
        &["-D", "--logfile=/log", "--pidfile", "/pid", "--statedir=/state"],
        &["-D", "-F"],
        &["-DF/hook"],
        &["-D", "--fsfreeze-hook"],
        &["-D", "--fsfreeze-hook=/a\\hook"],
        &["-D", "-b", "guest-ping,guest-info", "--blacklist=guest-exec", "--block", "guest-sync"],
        &["-D", "--meth", "isa-serial", "--daemon"],
    ];
    let config = file(
        &folder,
        "full.conf",
        "# all of them\n[general]\ndaemon=true\nmethod = unix-listen\npath=/run/s\nlogfile=/a\\sb\npidfile=/c\n\
         fsfreeze-hook=/d\nstatedir=/e\nverbose=1\nretry-path=true\nblock-rpcs=guest-ping,guest-info\nother=1\n\
         [other]\nmethod=isa-serial\n",
    );
    let old = file(&folder, "old.conf", "[general]\r\nblacklist=guest-exec\r\n");
    let empty = file(&folder, "empty.conf", "");
    let twice = file(&folder, "twice.conf", "[general]\nstatedir=/a\n[x]\n[general]\nstatedir=/b\n");
    for config in [None, Some(&*config), Some(&*old), Some(&*empty), Some(&*twice)] {
        for arguments in arguments {
            let ours = run(Path::new(PROGRAM), config, arguments);
            let theirs = run(&qemu_ga(), config, arguments);
            assert!(theirs.status.success() && !theirs.stdout.is_empty(), "{arguments:?}");
            assert_eq!(dumped(&ours), dumped(&theirs), "{config:?} {arguments:?}: {}", text(&ours.stderr));
            assert_eq!(ours.status.code(), Some(0), "{arguments:?}");
        }
    }
}

#[test]
fn what_is_shown_can_be_read_back_by_both() {
    let folder = tempfile::tempdir().unwrap();
    let program = Path::new(PROGRAM);
    let first =
        run(program, None, &["-D", "-F", "-m", "unix-listen", "-p", "/ s", "-b", "a,b", "-a", "c,d", "-l/l"]);
    assert!(text(&first.stdout).ends_with("block-rpcs=a,b\nallow-rpcs=c,d\n"), "{}", text(&first.stdout));
    let config = file(&folder, "conf", &first.stdout);
    assert_eq!(text(&run(program, Some(&config), &["-D"]).stdout), text(&first.stdout));
    assert_eq!(
        text(&run(program, None, &[OsStr::new("-D"), "-c".as_ref(), config.as_ref()]).stdout),
        text(&first.stdout)
    );
    let theirs = run(&qemu_ga(), Some(&config), &["-D"]);
    let ours: Vec<_> = dumped(&first).into_iter().filter(|line| !line.starts_with("allow-rpcs")).collect();
    assert_eq!(dumped(&theirs), ours);
}

#[test]
fn what_qemu_ga_refuses_in_its_file_is_refused_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let cases: &[(&[u8], &str)] = &[
        (b"verbose=true\n", "conf:1: "),
        (b"[general\n", "conf:1: "),
        (b"[general]\nverbose\n", "conf:2: "),
        (b"[general]\n\nverbose=yes\n", "conf:3: verbose: \"yes\" is not one of true, false, 1, 0"),
        (b"[general]\npath=a\\qb\n", "conf:2: path: "),
        (b"[general]\npath=\xff\n", "conf:2: "),
        (b"[general]\nmethod=unix-listen\n", "conf:2: the method unix-listen needs the path"),
    ];
    for (bytes, expected) in cases {
        let config = file(&folder, "conf", bytes);
        let theirs = run(&qemu_ga(), Some(&config), &["-D"]);
        assert!(!theirs.status.success(), "{}", String::from_utf8_lossy(bytes));
        let ours = run(Path::new(PROGRAM), Some(&config), &["-D"]);
        assert_eq!(ours.status.code(), Some(1));
        assert!(text(&ours.stderr).contains(expected), "{}", text(&ours.stderr));
    }
}

#[test]
fn lists_that_would_block_nothing_are_refused_with_what_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let config = file(&folder, "conf", "[general]\n# no\nblock-rpcs=guest-exec guest-exec-status\n");
    let cases: &[(&[&str], &str)] = &[
        (
            &["-c", config.to_str().unwrap()],
            "conf:3: block-rpcs: \"guest-exec guest-exec-status\" is more than one name: separate names by commas, as in \
             guest-exec,guest-exec-status",
        ),
        (
            &["-b", "guest-exec;guest-ping"],
            "command line: block-rpcs: \"guest-exec;guest-ping\" is more than one name",
        ),
        (
            &["-a", "guest-exec guest-ping"],
            "command line: allow-rpcs: \"guest-exec guest-ping\" is more than one name",
        ),
        (&["--blacklist", "guest-exec", "guest-ping"], "unexpected word \"guest-ping\""),
    ];
    for (arguments, expected) in cases {
        let output = run(Path::new(PROGRAM), None, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains(expected), "{arguments:?}: {}", text(&output.stderr));
    }
}

/// QEMU's own unit test has such a file, and reads what `-D` shows of it as a key file's list.
#[test]
fn a_list_with_semicolons_in_qemu_gas_file_is_one_and_is_shown_so_that_it_can_be_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let config = file(
        &folder,
        "conf",
        "[general]\ndaemon=false\nmethod=virtio-serial\npath=/path/to/org.qemu.guest_agent.0\n\
         pidfile=/var/foo/qemu-ga.pid\nstatedir=/var/state\nverbose=true\nblock-rpcs=guest-ping;guest-get-time\n",
    );
    let program = Path::new(PROGRAM);
    let shown = run(program, Some(&config), &["-D"]);
    assert_eq!((shown.status.code(), text(&shown.stderr).as_str()), (Some(0), ""));
    let lines = text(&shown.stdout);
    for line in [
        "daemon=false",
        "method=virtio-serial",
        "path=/path/to/org.qemu.guest_agent.0",
        "pidfile=/var/foo/qemu-ga.pid",
        "statedir=/var/state",
        "verbose=true",
        "block-rpcs=guest-ping;guest-get-time",
    ] {
        assert!(lines.lines().any(|shown| shown == line), "{line}: {lines}");
    }
    let again = file(&folder, "again", &shown.stdout);
    assert_eq!(text(&run(program, Some(&again), &["-D"]).stdout), lines);

    let config = file(&folder, "conf", "[general]\nblock-rpcs=guest-ping;guest-get-time;\n");
    let agent = Agent::start_with(&["-c", config.to_str().unwrap()]);
    let mut client = agent.client();
    let names = ["guest-ping", "guest-get-time", "guest-info"];
    assert_eq!(names.map(|name| enabled(&mut client, name)), [false, false, true]);
    for name in &names[..2] {
        let refused = client.ask(&format!("{{\"execute\":\"{name}\"}}"));
        assert_eq!(refused["error"]["class"], "CommandNotFound");
        assert!(refused["error"]["desc"].as_str().unwrap().contains("has been disabled"), "{refused}");
    }
    let log = agent.log();
    assert!(log.contains("conf:2: block-rpcs: ") && log.contains("guest-ping,guest-get-time"), "{log}");
}

#[test]
fn a_settings_file_that_is_named_has_to_be_there() {
    let missing = Path::new("/no/such/qemu-ga.conf");
    for output in [
        run(Path::new(PROGRAM), Some(missing), &["-D"]),
        run(Path::new(PROGRAM), None, &[OsStr::new("-D"), "-c".as_ref(), missing.as_ref()]),
    ] {
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("/no/such/qemu-ga.conf: there is no such file"));
    }
    assert!(run(Path::new(PROGRAM), None, &["-D"]).status.success());
}

/// Shows the settings where /etc is a folder of the test's own.
fn dumped_with_etc(files: &[(&str, &str)], arguments: &str) -> Output {
    let etc = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = etc.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let script = format!("mount --bind {} /etc && exec {PROGRAM} -D {arguments}", etc.path().display());
    Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", &script])
        .env_remove("QGA_CONF")
        .output()
        .unwrap()
}

#[test]
fn the_files_of_every_distribution_are_found_and_their_order_is_kept() {
    let rhel = "# This is a systemd environment file, not a shell script.\n\
        FILTER_RPC_ARGS=\"--allow-rpcs=guest-sync-delimited,guest-sync,guest-ping\"\n\
        BLACKLIST_RPC=guest-file-open,guest-exec\nBLOCK_RPCS=guest-file-read\n\
        FSFREEZE_HOOK_PATHNAME=/etc/qemu-ga/fsfreeze-hook\n";
    let output = dumped_with_etc(
        &[
            ("sysconfig/qemu-ga", rhel),
            ("qemu/qemu-ga.conf", "[general]\nblock-rpcs=guest-info\nstatedir=/one\nfsfreeze-hook=/one\n"),
            ("guestlet/agent.toml", "[qga]\nblock-rpcs = ['guest-shutdown']\nstatedir = '/two'\n"),
            ("guestlet/agent.d/1.toml", "[qga]\nallow-rpcs = ['guest-info']\n[log]\nfile = '/three'\n"),
        ],
        "-b guest-sync -l /four",
    );
    let expected = "\
[general]
daemon=false
method=virtio-serial
path=/dev/virtio-ports/org.qemu.guest_agent.0
logfile=/four
pidfile=/var/run/qemu-ga.pid
fsfreeze-hook=/etc/qemu-ga/fsfreeze-hook
statedir=/two
verbose=false
retry-path=false
block-rpcs=guest-info,guest-file-open,guest-exec,guest-file-read,guest-shutdown,guest-sync
allow-rpcs=guest-sync-delimited,guest-sync,guest-ping,guest-info
";
    assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));

    let output = dumped_with_etc(&[("sysconfig/qemu-ga", "\nBLACKLIST_RPC='guest-exec guest-ping'\n")], "");
    assert_eq!(output.status.code(), Some(1));
    let words = text(&output.stderr);
    assert!(
        words.contains("/etc/sysconfig/qemu-ga:2: block-rpcs: ") && words.contains("guest-exec,guest-ping"),
        "{words}"
    );
}

fn enabled(client: &mut Client, name: &str) -> bool {
    let info = client.call("guest-info");
    let commands = info["supported_commands"].as_array().unwrap();
    let found = commands.iter().find(|command| command["name"] == name).unwrap();
    found["enabled"].as_bool().unwrap()
}

#[test]
fn lists_of_the_file_and_of_the_command_line_add_up_and_block_wins() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        file(&folder, "conf", "[general]\nblock-rpcs=guest-shutdown\nallow-rpcs=guest-info,guest-shutdown\n");
    let agent = Agent::start_with(&[
        "-c",
        config.to_str().unwrap(),
        "-a",
        "guest-ping,guest-sync",
        "-b",
        "guest-sync",
    ]);
    let mut client = agent.client();
    let names = ["guest-info", "guest-ping", "guest-shutdown", "guest-sync", "guest-get-host-name"];
    let found = names.map(|name| enabled(&mut client, name));
    assert_eq!(found, [true, true, false, false, false]);
    let refused = client.ask("{\"execute\":\"guest-get-host-name\"}");
    assert_eq!(refused["error"]["class"], "CommandNotFound");
    client.call("guest-ping");
}

#[test]
fn the_log_file_is_appended_to_and_begun_anew_when_it_was_rotated() {
    let folder = tempfile::tempdir().unwrap();
    let log = file(&folder, "qga.log", "from before\n");
    let agent = Agent::start_with(&["-v", "-l", log.to_str().unwrap()]);
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    wait_for("nothing is logged", || read(&log).contains(" started: QGA: "));
    assert!(read(&log).starts_with("from before\n"));
    assert_eq!(agent.log(), "", "what goes to the file does not go to standard error");
    std::fs::rename(&log, folder.path().join("qga.log.1")).unwrap();
    let mut client = agent.client();
    client.call("guest-info");
    wait_for("the call is not logged", || read(&log).contains("guest-info"));

    let wrong = run(Path::new(PROGRAM), None, &["-l", "/no/such/folder/log", "-m", "none"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(
        text(&wrong.stderr).contains("cannot open the log file /no/such/folder/log"),
        "{}",
        text(&wrong.stderr)
    );
}

#[test]
fn under_its_name_it_is_qemu_ga() {
    let folder = tempfile::tempdir().unwrap();
    let program = under_the_name_qemu_ga(&folder);
    for option in ["-V", "--version"] {
        assert_eq!(text(&run(&program, None, &[option]).stdout), "QEMU Guest Agent 10.2.0\n");
    }
    let help = text(&run(&program, None, &["--help"]).stdout);
    assert!(help.contains("Usage: qemu-ga") && !help.contains("--settings"), "{help}");
    for words in [&["status"][..], &["--settings", "/x"], &["--colour"]] {
        let output = run(&program, None, words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(text(&output.stderr).starts_with("qemu-ga: "), "{}", text(&output.stderr));
    }
    let dump = run(&program, None, &["-D"]);
    assert_eq!(dumped(&dump), dumped(&run(&qemu_ga(), None, &["-D"])));

    let agent = Agent::start_other(&program, &["-v"]);
    assert_eq!(agent.client().call("guest-info")["version"], "10.2.0");
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains("/run/guestlet/"), "it serves the guestlet API as well");
}

#[test]
fn a_relative_path_begins_where_the_program_was_started() {
    let folder = tempfile::tempdir().unwrap();
    let dump = |program: &Path| {
        let mut command = without_usual_files(program);
        command.args(["-D", "-m", "unix-listen", "-p", "socket", "-l", "log"]);
        text(&command.current_dir(folder.path()).output().unwrap().stdout)
    };
    let ours = dump(Path::new(PROGRAM));
    let place = folder.path().canonicalize().unwrap();
    assert!(ours.contains(&format!("\npath={}\n", place.join("socket").display())), "{ours}");
    assert!(ours.contains(&format!("\nlogfile={}\n", place.join("log").display())), "{ours}");
}

#[test]
fn the_list_of_commands_is_shown_for_either_word() {
    let program = Path::new(PROGRAM);
    let shown = text(&run(program, None, &["-b", "help"]).stdout);
    assert!(shown.lines().count() > 5 && shown.lines().all(|line| line.starts_with("guest-")), "{shown}");
    for arguments in [["-b", "?"], ["-a", "help"], ["--allow-rpcs", "?"], ["--blacklist", "help"]] {
        assert_eq!(text(&run(program, None, &arguments).stdout), shown, "{arguments:?}");
    }
}

#[test]
fn keys_that_are_not_known_are_told_of_and_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let config = file(&folder, "conf", "[general]\ndaemonize = 0\n");
    let agent = Agent::start_with(&["-c", config.to_str().unwrap()]);
    assert_eq!(agent.client().call("guest-ping"), Value::Object(serde_json::Map::new()));
    assert!(
        agent.log().contains("conf:2: daemonize is not a key of qemu-ga, and ignored"),
        "{}",
        agent.log()
    );
}

#[test]
fn the_packaged_settings_make_sense_without_their_comment_signs() {
    let packaged = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/agent.toml");
    let packaged = std::fs::read_to_string(packaged).unwrap();
    let (_about, settings) = packaged.split_once("\n\n").unwrap();
    assert!(settings.lines().all(|line| line.is_empty() || line.starts_with('#')), "something is set");
    let lines: Vec<_> = settings.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)).collect();
    let folder = tempfile::tempdir().unwrap();
    let settings = file(&folder, "agent.toml", lines.join("\n"));
    let output = run(Path::new(PROGRAM), None, &["-D", "--settings", settings.to_str().unwrap()]);
    assert!(
        text(&output.stdout).contains("\nallow-rpcs=guest-ping,guest-info\n"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn many_start_at_once_on_a_socket_left_behind_and_one_runs() {
    for _ in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qga.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut agents: Vec<_> = (0..4)
            .map(|number| {
                let own = folder.path().join(number.to_string());
                std::fs::create_dir(&own).unwrap();
                std::fs::write(own.join("agent.toml"), settings_in(&own)).unwrap();
                let mut command = crate::agent::launch::guestlet();
                command
                    .args(["-m", "unix-listen", "-p"])
                    .arg(&socket)
                    .arg("--settings")
                    .arg(own.join("agent.toml"));
                command.stderr(Stdio::null()).spawn().unwrap()
            })
            .collect();
        let mut ended = 0;
        wait_for("more than one runs", || {
            ended = agents.iter_mut().filter_map(|agent| agent.try_wait().unwrap()).count();
            ended >= 3
        });
        Client::connect(&socket).call("guest-ping");
        for agent in &mut agents {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        assert_eq!(ended, 3);
    }
}

/// Issue 16: on a machine with a kubelet, agents of tests served it.
#[test]
fn the_agents_of_tests_leave_the_machine_alone() {
    if crate::traps::is_outside() {
        return;
    }
    let traps = crate::traps::Traps::set();
    let mut agent = Agent::start_with(&["-v"]);
    let mut client = agent.client();
    for command in ["guest-info", "guest-fsfreeze-status", "guest-get-osinfo"] {
        client.call(command);
    }
    agent.kill_and_start();
    agent.client().call("guest-ping");
    for words in [&["status"][..], &["disks"], &["doctor"], &["topology"]] {
        let mut command = crate::agent::launch::guestlet();
        command.args(words).arg("--settings").arg(agent.folder.path().join("agent.toml"));
        let output = command.output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 5)), "{output:?}");
    }
    // It has seen disks and mounts, and what it does when it has started.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!agent.log().contains("kubelet"), "{}", agent.log());
    drop(agent);

    let folder = tempfile::tempdir().unwrap();
    let program = under_the_name_qemu_ga(&folder);
    let agent = Agent::start_other(&program, &["-v"]);
    agent.client().call("guest-ping");
    drop(agent);
    assert!(run(&program, None, &["-D"]).status.success());
    assert!(run(Path::new(PROGRAM), None, &["-D"]).status.success());
    traps.are_untouched();
}
