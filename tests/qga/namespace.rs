//! Mounts and links that only a test and the agents that it starts see.

use std::path::PathBuf;
use std::process::Command;

/// Set in a test's own namespaces: a file that says, by being there, that the test ran in them.
const INSIDE: &str = "GUESTLET_TEST_INSIDE";

/// Runs the test that calls this again in a mount namespace of its own; false in there.
pub fn is_outside() -> bool {
    is_outside_of("--mount")
}

/// As [`is_outside`], for the namespace that this option of unshare(1) makes.
pub fn is_outside_of(option: &str) -> bool {
    inside().is_none() && run_inside(&[option], &[])
}

/// In a test's namespaces: a folder that lasts as long as the test outside, which is told now that this one runs.
pub fn inside() -> Option<PathBuf> {
    let file = PathBuf::from(std::env::var_os(INSIDE)?);
    std::fs::write(&file, "").unwrap();
    Some(file.parent().unwrap().to_owned())
}

/// Runs the test that calls this again in the namespaces that these options of unshare(1) make, by a program, if
/// one is said. The test's name is that of its thread, which the test runner gives it.
///
/// Always true. A runner that finds no test of that name says that all went well: only a test that ran did.
pub fn run_inside(options: &[&str], by: &[&str]) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let ran = folder.path().join("ran");
    let thread = std::thread::current();
    let name = thread.name().unwrap();
    let status = Command::new("unshare")
        .args(options)
        .args(by)
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(INSIDE, &ran)
        .status()
        .unwrap();
    assert!(status.success(), "{name} failed in its namespace (this test is for root)");
    assert!(ran.exists(), "no test called {name} ran in its namespace");
    true
}

/// Runs a command line that has to succeed.
pub fn run(command: &str) {
    let status = Command::new("sh").args(["-ec", command]).status().unwrap();
    assert!(status.success(), "{command}");
}
