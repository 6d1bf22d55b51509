//! Where a cluster of the tests runs: namespaces in which ports, processes and mounts are the test's own.

use crate::lab::run;

/// The namespaces of a cluster: options of unshare(1).
pub const NAMESPACES: [&str; 6] = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// Runs the test that calls this again where it sees no processes, networks and mounts but its own, and where all that it
/// starts ends with it; false in there.
pub fn is_outside() -> bool {
    crate::stand_in::play_if_meant();
    let outside = crate::namespace::inside().is_none() && crate::namespace::run_inside(&NAMESPACES, &[]);
    if !outside {
        settle();
    }
    outside
}

/// Makes new namespaces a place for a cluster.
pub fn settle() {
    std::fs::create_dir_all("/run/guestlet").unwrap();
    for place in ["/var/lib", "/var/log", "/run/guestlet", "/mnt"] {
        run(&format!("mount -t tmpfs lab {place}"));
    }
    // The nodes', and those of all pods.
    run("ip link set lo up; ip address add 192.0.2.1/32 dev lo; ip address add 192.0.2.2/32 dev lo");
    run("ip address add 198.18.0.1/15 dev lo");
}
