//! `guestlet-host node` with a thousand guests on its node, and `guestlet-host controller`, in a cluster with ten thousand VMs:
//! what they cost, how soon all sessions are back, how soon all guests know an edited label, and what is asked of the API server
//! while nothing happens.
//!
//! The API server and the programs are the real ones; the guests are the agent's own service on unix sockets, all in this
//! process. `VMS` says how many VMs there are in the cluster, and `GUESTS` how many of them are on the node. Prints figures, and
//! fails when a guest is lost.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, clippy::print_stdout)]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::print_stderr
)]

#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../../tests/cluster/api.rs"]
mod api;
#[path = "../../tests/cluster/authority.rs"]
mod authority;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../../tests/cluster/components.rs"]
mod components;
#[allow(dead_code, reason = "shared with the other measurements")]
#[path = "../host_scale/guests.rs"]
mod guests;
#[allow(dead_code, reason = "shared with the other measurements")]
#[path = "../host_scale/host.rs"]
mod host;
#[path = "../../tests/cluster/patience.rs"]
mod patience;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../../tests/cluster/plane.rs"]
mod plane;

mod site;

use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;

use guests::Guests;
use host::Host;
use site::{NODE, Site};

/// How long nothing happens.
const IDLE: Duration = Duration::from_secs(60);

fn main() {
    // `cargo bench` passes arguments that this has no use for.
    let number = |name: &str, usual| std::env::var(name).ok().map_or(usual, |text| text.parse().unwrap());
    let (vms, guests): (usize, usize) = (number("VMS", 10_000), number("GUESTS", 1_000));
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(measure(vms, guests));
}

async fn measure(vms: usize, number: usize) {
    let begun = Instant::now();
    let site = Site::start().await;
    let instances = site.fill(vms, number).await;
    println!("{vms} VMs, {number} of them on the node ({:.0} s to make them)", begun.elapsed().as_secs_f64());
    let folder = TempDir::new().unwrap();
    let guests = Guests::hybrid(folder.path(), 0..number);
    let nobody = Guests::hybrid(folder.path(), 0..0);
    let sockets = folder.path().join("sockets");
    std::fs::create_dir(&sockets).unwrap();
    for (at, uid) in instances.iter().enumerate() {
        let socket = folder.path().join(at.to_string());
        std::os::unix::fs::symlink(socket, sockets.join(format!("{uid}.sock"))).unwrap();
    }
    let config = site.node_config();
    let arguments = ["node", "--node", NODE, "--kubeconfig", config.to_str().unwrap()];
    let lines = format!("kubevirt.sockets = '{}'\n", sockets.display());
    let start = || Host::start_with(folder.path(), &arguments, &lines);
    let mut node = start();
    node.until_all(number, number);
    site.until_guests(number).await;
    println!("node role: {:.1} MB after the first start", node.memory() / 1024.0);
    for _ in 0..3 {
        drop(node);
        let begun = Instant::now();
        node = start();
        node.until_all(number, number);
        println!("restart: all sessions and callbacks after {:.2} s", begun.elapsed().as_secs_f64());
    }
    for round in 0..3 {
        let zone = format!("zone-{}", round + 2);
        let begun = Instant::now();
        site.zone(&zone).await;
        guests::until_zone([&guests, &nobody], &zone);
        println!("an edited label: known to all guests after {:.2} s", begun.elapsed().as_secs_f64());
    }
    // What is written late is written by now.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (requests, processor) = (site.requests().await, node.processor());
    tokio::time::sleep(IDLE).await;
    println!(
        "idle for {} s: {} of the API server, {:.2} s of processor time",
        IDLE.as_secs(),
        site.requests().await.since(&requests),
        node.processor() - processor
    );
    println!(
        "node role: {:.1} MB with all sessions, {} files open",
        node.memory() / 1024.0,
        node.descriptors()
    );
    drop(node);
    drop(guests);

    let config = site.controller_config();
    let config = config.to_str().unwrap();
    let folder = TempDir::new().unwrap();
    let arguments =
        ["controller", "--kubeconfig", config, "--name", "controller-0", "--address", "127.0.0.1"];
    let begun = Instant::now();
    let controller = Host::start_with(folder.path(), &arguments, "kubevirt.controller = '127.0.0.1:0'\n");
    site.until_led().await;
    println!("controller: it leads after {:.1} s", begun.elapsed().as_secs_f64());
    println!("controller: {:.1} MB", controller.memory() / 1024.0);
    let requests = site.requests().await;
    tokio::time::sleep(IDLE).await;
    println!("idle for {} s: {} of the API server", IDLE.as_secs(), site.requests().await.since(&requests));
    println!("controller: {:.1} MB", controller.memory() / 1024.0);
}
