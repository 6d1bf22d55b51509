//! An agent of this release with a host half of another one, and the other way round: `make peers` with the directory of the
//! other release's programs.
//!
//! Whatever release it is, the two have a session, the host half's requests are answered, QGA clients notice nothing, and what
//! does not work is told in words. Everything is on unix sockets: nothing here opens an `AF_VSOCK` socket.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a test runs programs, and may panic"
)]

mod programs;

use serde_json::{Value, json};

use programs::{Pair, Programs, eventually, kernel};

#[test]
fn an_agent_of_another_release() {
    works(&Programs::other(), &Programs::own());
}

#[test]
fn a_host_half_of_another_release() {
    works(&Programs::own(), &Programs::other());
}

/// What has to work of an agent and a host half, of whichever release each is.
fn works(agents: &Programs, hosts: &Programs) {
    println!("{} with {}", agents.version("guestlet"), hosts.version("guestlet-host"));
    let mut pair = Pair::start(agents, hosts);
    // The session.
    let vm = pair.until("the session is open", |vm| vm["session"] == "connected");
    assert_eq!(vm["guest"]["kernel_release"], kernel(), "{vm:#}");
    assert_eq!(vm["state"]["interfaces"].as_array().map(Vec::is_empty), Some(false), "{vm:#}");
    // The host half's requests.
    let pings = pair.ctl(&["ping", "a", "-c", "3"]);
    assert!(pings.contains("3 pings"), "{pings}");
    let listed = pair.ctl(&["ls"]);
    assert!(listed.contains("connected"), "{listed}");
    pair.ctl(&["disks", "a"]);
    pair.until("the guest is told where it runs", |vm| vm["topology"]["acknowledged"]["host"] != Value::Null);
    // QGA.
    assert_eq!(pair.qga("guest-ping")["return"], json!({}));
    assert_eq!(pair.qga("guest-get-osinfo")["return"]["kernel-release"], kernel());
    assert_eq!(pair.qga("guest-nonsense")["error"]["class"], "CommandNotFound");
    // What the guest may ask works, or both ends say why not.
    let vm = pair.until("what the guest may ask is known", |vm| {
        vm["callback"] == "open" || vm["callback_reason"].as_str().is_some_and(|reason| !reason.is_empty())
    });
    let asks = vm["callback"] == "open";
    println!("callback: {} {}", vm["callback"], vm["callback_reason"]);
    // (Both ends of a callback learn of it one after the other.)
    eventually("the guest says whether its host half knows it", || {
        let status = pair.status();
        match status.lines().find_map(|line| line.strip_prefix("known there as")) {
            Some(words) => asks == words.trim_start().starts_with("a ("),
            // Before this line was there in any case.
            None => !asks && !agents.is_own(),
        }
    });
    // Another run of each, and the session is back.
    let before = vm["sessions"].as_u64().unwrap();
    pair.restart_agent();
    pair.until("the session is back with another run of the agent", |vm| {
        vm["session"] == "connected" && vm["sessions"].as_u64() > Some(before)
    });
    pair.restart_host();
    pair.until("the session is back with another run of the host half", |vm| vm["session"] == "connected");
    assert_eq!(pair.qga("guest-ping")["return"], json!({}));
}
