//! Tab in real shells, with the files of the packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use guestlet::sys::terminal::Size;

use crate::lab::Lab;
use crate::screen::Screen;

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/completion").join(name)
}

/// A shell that finds guestctl, and the socket of the lab.
fn shell(lab: &Lab, program: &str, arguments: &[&str]) -> Command {
    let programs = Path::new(env!("CARGO_BIN_EXE_guestctl")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", path).env("GUESTLET_HOST_SOCKET", lab.host.socket());
    command.env("HOME", lab.file("")).env("LC_ALL", "C.UTF-8");
    command
}

/// A shell on a terminal that has read this.
fn screen(command: Command, setup: &str) -> Screen {
    let mut screen = Screen::of(command, Size { rows: 24, columns: 200 });
    screen.type_keys(&format!("{setup}; PS1='re''ady> '\n"));
    screen.until("ready> ");
    screen
}

/// Types this, and Tab; then the line is this.
fn completes(screen: &mut Screen, typed: &str, line: &str) {
    screen.clear();
    screen.type_keys(&format!("{typed}\t"));
    screen.until(line);
    // It is thrown away.
    screen.type_keys("\u{15}");
}

#[test]
fn bash_completes_verbs_options_and_vms() {
    let lab = Lab::new();
    let bash = shell(&lab, "bash", &["--norc", "--noprofile", "-i"]);
    let mut screen = screen(bash, &format!(". {}", packaged("guestctl.bash").display()));
    completes(&mut screen, "guestctl ex", "guestctl exec ");
    completes(&mut screen, "guestctl exec w", "guestctl exec web ");
    completes(&mut screen, "guestctl logs --prio", "guestctl logs --priority ");
    completes(&mut screen, "guestctl trust sh", "guestctl trust show ");
    completes(&mut screen, "guestctl --output=js", "guestctl --output=json ");
}

#[test]
fn zsh_completes_verbs_options_and_vms() {
    let lab = Lab::new();
    let directory = packaged("").display().to_string();
    let zsh = shell(&lab, "zsh", &["-f", "-i"]);
    let setup = format!("fpath=({directory} $fpath); autoload -U compinit; compinit -D -u");
    let mut screen = screen(zsh, &setup);
    // It draws the space after a word by itself.
    completes(&mut screen, "guestctl ex", "guestctl exec");
    completes(&mut screen, "guestctl exec w", "guestctl exec web");
    completes(&mut screen, "guestctl logs --prio", "guestctl logs --priority");
}

#[test]
fn fish_completes_verbs_options_and_vms() {
    let lab = Lab::new();
    let asked = |line: &str| {
        let script =
            format!("source {}; complete --do-complete '{line}'", packaged("guestctl.fish").display());
        let output = shell(&lab, "fish", &["--no-config", "-c", &script]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(asked("guestctl exec w"), "web\n");
    let verbs = asked("guestctl ");
    assert!(verbs.contains("\nexec\tRun a program") && !verbs.contains("proxy"), "{verbs}");
    assert!(asked("guestctl logs --prio").starts_with("--priority\t"));
}

#[test]
fn a_shell_is_not_kept_waiting_and_hears_no_complaints() {
    let mut lab = Lab::new();
    let ask = |lab: &Lab, words: &[&str]| {
        let output = shell(lab, env!("CARGO_BIN_EXE_guestctl"), words).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let vms = ["__complete", "--", "guestctl", "info", ""];
    let (found, complaints) = ask(&lab, &vms);
    assert!(found.starts_with("web\n") && complaints.is_empty(), "{found} {complaints}");
    // One that is stopped takes connections, and answers nobody.
    lab.host.signal(nix::sys::signal::Signal::SIGSTOP);
    let (found, complaints) = ask(&lab, &vms);
    assert!(!found.contains("web") && complaints.is_empty(), "{found} {complaints}");
    lab.host.kill();
    for words in
        [&vms[..], &["__complete"], &["__complete", "--"], &["__complete", "--", "guestctl", "no", "such"]]
    {
        let (found, complaints) = ask(&lab, words);
        assert!(!found.contains("web") && complaints.is_empty(), "{found} {complaints}");
    }
}

#[test]
fn no_program_is_run_for_the_credentials_of_a_kubeconfig() {
    let lab = Lab::new();
    let (config, ran) = (lab.file("kubeconfig"), lab.file("ran"));
    let user = serde_json::json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1",
        "interactiveMode": "Never",
        "command": "touch",
        "args": [ran],
    } });
    let named = |kind: &str, value: serde_json::Value| serde_json::json!([{ "name": "a", kind: value }]);
    let all = serde_json::json!({
        "clusters": named("cluster", serde_json::json!({ "server": "https://127.0.0.1:1" })),
        "users": named("user", user),
        "contexts": named("context", serde_json::json!({ "cluster": "a", "user": "a" })),
        "current-context": "a",
    });
    std::fs::write(&config, all.to_string()).unwrap();
    let config = config.to_str().unwrap();
    let ask = |words: &[&str]| shell(&lab, env!("CARGO_BIN_EXE_guestctl"), words).output().unwrap();
    let output = ask(&["__complete", "--", "guestctl", "--kubeconfig", config, "info", ""]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(!ran.exists());
    // By Enter it is.
    ask(&["--kubeconfig", config, "info", "web"]);
    assert!(ran.exists());
}
