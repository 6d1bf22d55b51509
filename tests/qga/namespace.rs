//! Mounts and links that only a test and the agents that it starts see.

use std::process::Command;

/// Runs the test called `name` again in a mount namespace of its own; false in there.
pub fn is_outside(name: &str) -> bool {
    is_outside_of(name, "--mount")
}

/// As [`is_outside`], for the namespace that this option of unshare(1) makes.
pub fn is_outside_of(name: &str, option: &str) -> bool {
    const INSIDE: &str = "GUESTLET_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return false;
    }
    let status = Command::new("unshare")
        .arg(option)
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{name} failed in its namespace (this test is for root)");
    true
}

/// Runs a command line that has to succeed.
pub fn run(command: &str) {
    let status = Command::new("sh").args(["-ec", command]).status().unwrap();
    assert!(status.success(), "{command}");
}
