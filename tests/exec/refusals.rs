//! What is refused, with the reason, and what is written down.

use std::os::unix::fs::PermissionsExt as _;

use crate::lab::{ALL, Lab, code};

fn refused(lab: &Lab, options: &[&str], command: &[&str]) -> String {
    let output = lab.exec(options, command);
    assert_eq!(code(&output), 125, "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_guest_without_grants_runs_nothing_for_a_host_half_without_a_key() {
    let lab = Lab::with("");
    let words = refused(&lab, &[], &["true"]);
    assert!(words.contains("no grant gives the role exec") && words.contains("[[grant]]"), "{words}");
    let listed = lab.host.ctl(&["ps", "web"]);
    assert!(!listed.status.success(), "{listed:?}");
}

#[test]
fn paths_and_users_of_a_grant_hold() {
    let grant =
        ALL.replace("\"exec\"]", "\"exec\"]\nexec = { paths = [\"/usr/bin\"], users = [\"daemon\"] }");
    let lab = Lab::with(&grant);
    assert_eq!(lab.exec(&["--user", "daemon"], &["/usr/bin/id", "-un"]).stdout, b"daemon\n");
    let as_root = refused(&lab, &[], &["/usr/bin/id"]);
    assert!(as_root.contains("as root") && as_root.contains("exec.users"), "{as_root}");
    let script = lab.file("script");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    refused(&lab, &["--user", "daemon"], &[script.to_str().unwrap()]);
    for variable in ["LD_PRELOAD=/x", "PATH=/tmp", "X=1"] {
        let words = refused(&lab, &["--user", "daemon", "--env", variable], &["/usr/bin/id"]);
        assert!(words.contains("with variables") && words.contains("neither --env nor --cwd"), "{words}");
    }
    // A script that is allowed may name others from where it starts.
    let elsewhere = refused(&lab, &["--user", "daemon", "--cwd", "/tmp"], &["/usr/bin/id"]);
    assert!(elsewhere.contains("in a directory of its choice"), "{elsewhere}");
    assert!(elsewhere.contains("neither --env nor --cwd"), "{elsewhere}");
    // By the number, too.
    refused(&lab, &["--user", "0"], &["/usr/bin/id"]);
}

#[test]
fn where_the_settings_limit_programs_no_directory_is_taken() {
    let lab = Lab::with(&format!("{ALL}[qga.exec]\npaths = [\"/usr/bin\"]\n"));
    assert_eq!(lab.exec(&[], &["/usr/bin/id", "-un"]).stdout, b"root\n");
    let elsewhere = refused(&lab, &["--cwd", "/tmp"], &["/usr/bin/id"]);
    assert!(elsewhere.contains("--cwd") && elsewhere.contains("qga.exec.paths"), "{elsewhere}");
    refused(&lab, &["--env", "PATH=/tmp"], &["/usr/bin/id"]);
}

#[test]
fn what_is_wrong_is_said() {
    let lab = Lab::new();
    let user = refused(&lab, &["--user", "no-such-user"], &["true"]);
    assert!(user.contains("this guest has no user \"no-such-user\""), "{user}");
    let directory = refused(&lab, &["--cwd", "/no/such"], &["true"]);
    assert!(directory.contains("cannot start in /no/such"), "{directory}");
    let private = lab.file("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o700)).unwrap();
    let private = refused(&lab, &["--user", "daemon", "--cwd", private.to_str().unwrap()], &["true"]);
    assert!(private.contains("Permission denied"), "{private}");
    let long: Vec<String> = (0..20).map(|_| "x".repeat(100_000)).collect();
    let long: Vec<&str> = [&["true"], &long.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat();
    let long = refused(&lab, &[], &long);
    assert!(long.contains("2000025 bytes; at most 262144"), "{long}");
    let unknown = lab.host.ctl(&["exec", "db", "--", "true"]);
    assert_eq!(code(&unknown), 125);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("knows no VM named \"db\""), "{unknown:?}");
    let attach = lab.host.ctl(&["attach", "web", "0123456789ab"]);
    assert!(String::from_utf8_lossy(&attach.stderr).contains("there is no program"), "{attach:?}");
}

#[test]
fn both_ends_write_down_what_was_run_and_how_it_ended_and_no_arguments() {
    let lab = Lab::new();
    lab.exec(&[], &["sh", "-c", "exit 3; : secret-word"]);
    let agent = lab.agent_log();
    let records: Vec<_> =
        agent.lines().filter(|line| line.contains("audit:") && line.contains("RunProgram")).collect();
    assert!(records.iter().any(|line| line.contains("exit status: 3")), "{records:#?}");
    assert!(
        records.iter().any(|line| line.contains("(sh as root)") && line.contains("done")),
        "{records:#?}"
    );
    let host = lab.host.log();
    let records: Vec<_> =
        host.lines().filter(|line| line.contains("audit:") && line.contains("exec")).collect();
    assert!(
        records.iter().any(|line| line.contains("sh as root") && line.contains("allowed")),
        "{records:#?}"
    );
    assert!(!agent.contains("secret-word") && !host.contains("secret-word"));
}
