//! What only real VMs prove. `make vm-test` runs it; it needs the built programs and package, which
//! `GUESTLET_BIN_DIR` and `GUESTLET_DEB` name. Two tests run at a time: see [`harness::turns`].
//!
//! Each file owns one subject: [`qga`] the channel on virtio-serial, [`sessions`] the host half and its
//! sessions (both with fast guests), [`accounts`] users, clocks and processors, [`channel`] what happens to both channels
//! and to events when the guest is paused, moved, saved or its clock set, [`freeze`] freezes of a whole guest,
//! [`databases`] of one with databases,
//! [`service`] the installed package under systemd, [`disks`] disks of every kind beside qemu-ga, [`hotplug`] disks that
//! come and go, [`hotplug_host`] disks that the host half plugs into a running guest, [`disk_rules`] disks that are
//! mounted by rules, [`disk_faults`] disks that vanish or hang, [`disk_layers`] encryption, LVM and disks that fail
//! ([`disk_calls`] is what they ask an agent, [`udev_words`] when udev was done), [`csi`] volumes of a guest's cluster,
//! [`cluster_node`] the same with the kubelet and the control plane of Kubernetes, [`repair`] a repair that takes long,
//! [`churn`] disks that change under names that others had, [`keys`] how public keys of host halves come into a guest,
//! [`trust`] what becomes of them, [`moves`] the same when a guest's memory goes on elsewhere, [`ports`] which vsock ports a host half with a key dials from,
//! [`topology`] where the guest runs, [`as_qemu_ga`] the agent under the name of qemu-ga and on the other channels of QGA,
//! [`libvirt`] what virsh does through the agent, [`qapi`] what an independent client of it reads (with real guests),
//! [`exec`] programs and the other verbs of guestctl, [`mod@console`] serial consoles, [`logs`] journals, [`metrics`] what is wrong in a guest, seen on the host, [`balancers`] traffic from outside to guests behind NAT,
//! [`packages`] how the package is installed, upgraded and removed.
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::used_underscore_binding,
    reason = "a test program"
)]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../harness/mod.rs"]
mod harness;

#[allow(dead_code, clippy::needless_pass_by_value, reason = "shared with the tests of topology")]
#[path = "../topology/api_server.rs"]
mod api_server;

#[path = "../random.rs"]
mod random;
#[allow(dead_code, reason = "shared with the tests of metrics")]
#[path = "../metrics/samples.rs"]
mod samples;
#[path = "../soak.rs"]
mod soak;

#[allow(dead_code, reason = "shared with the tests of keys")]
#[path = "../trust/authority.rs"]
mod certificates;
#[allow(dead_code, reason = "shared with the tests of keys")]
#[path = "../trust/wire.rs"]
mod wire;

#[allow(dead_code, reason = "shared with the tests of the host half")]
#[path = "../host/cloud/wires.rs"]
mod networks;

// The control plane for `cluster_node`, and what its node needs.
#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/agent.rs"]
mod agent;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/api.rs"]
mod api;
#[path = "../cluster/authority.rs"]
mod authority;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/components.rs"]
mod components;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/disk.rs"]
mod disk;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/half.rs"]
mod half;
#[allow(dead_code, reason = "shared with the tests of the API")]
#[path = "../api/host.rs"]
mod host;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/kubelet.rs"]
mod kubelet;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/lab.rs"]
mod lab;
#[path = "../cluster/messages.rs"]
mod messages;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/node.rs"]
mod node;
#[path = "../cluster/patience.rs"]
mod patience;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/place.rs"]
mod place;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/plane.rs"]
mod plane;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/runtime.rs"]
mod runtime;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/sidecars.rs"]
mod sidecars;
#[allow(dead_code, reason = "shared with the tests in a cluster")]
#[path = "../cluster/stand_in.rs"]
mod stand_in;

mod accounts;
mod as_qemu_ga;
mod balancers;
mod channel;
mod churn;
mod cluster_node;
mod console;
mod cp;
mod csi;
mod databases;
mod disk_calls;
mod disk_faults;
mod disk_layers;
mod disk_rules;
mod disks;
mod exec;
mod forward;
mod freeze;
mod hotplug;
mod hotplug_host;
mod keys;
mod libvirt;
mod logs;
mod metrics;
mod moves;
mod packages;
mod ports;
mod power_loss;
mod qapi;
mod qga;
mod repair;
mod service;
mod sessions;
mod shares;
mod topology;
mod trust;
mod udev_words;

use std::sync::OnceLock;

use harness::host::{HostHalf, Listed};
use harness::images::Images;
use harness::launch::Options;
use harness::snapshot::Saved;
use harness::vm::{FAST_READY, SOON, Vm};
use harness::{tools, turns};

fn images() -> &'static Images {
    static IMAGES: Once<Images> = Once::new();
    once(&IMAGES, Images::prepare)
}

type Once<T> = OnceLock<Result<T, String>>;

/// Made by the first test that needs it. If that fails, each test says why.
fn once<T>(cell: &Once<T>, make: impl FnOnce() -> anyhow::Result<T>) -> &T {
    // Nobody waits for a turn in there, while another one who has it waits for what is made.
    let _turn = turns::beside();
    let outcome = cell.get_or_init(|| make().map_err(|error| format!("{error:#}")));
    outcome.as_ref().unwrap_or_else(|error| panic!("{error}"))
}

/// A fast guest that is up, with an agent in it.
fn fast(name: &str) -> Vm {
    let vm = starting(name);
    vm.wait_booted(FAST_READY, 1).unwrap();
    vm
}

/// The same with several processors, for races within it.
fn fast_with_all_processors(name: &str) -> Vm {
    let options = Options::named(name).all_processors();
    let vm = options.fast(images(), &tools::program("guestlet").unwrap()).unwrap();
    vm.wait_booted(FAST_READY, 1).unwrap();
    vm
}

/// A fast guest that is booting.
fn starting(name: &str) -> Vm {
    Options::named(name).fast(images(), &tools::program("guestlet").unwrap()).unwrap()
}

/// A real guest with the package installed and its agent running.
fn real(name: &str) -> Vm {
    restored(name, installed())
}

/// Gives host halves without a key these roles.
fn grant_plain(vm: &Vm, roles: &[&str]) {
    let table = format!("[[grant]]\nhost = \"plain\"\nroles = {roles:?}\n");
    vm.write("/etc/guestlet/agent.d/plain.toml", table.as_bytes()).unwrap();
    vm.run("systemctl restart guestlet").unwrap();
}

/// A host half that has a session with this VM's agent, which has these roles for it.
fn host_with(vm: &Vm, roles: &[&str]) -> HostHalf {
    grant_plain(vm, roles);
    let host = HostHalf::start(&[Listed::of(vm)]).unwrap();
    host.wait_connected(vm.name(), SOON).unwrap();
    host
}

fn installed() -> &'static Saved {
    static INSTALLED: Once<Saved> = Once::new();
    once(&INSTALLED, || Saved::installed(images(), &tools::package()?))
}

fn restored(name: &str, saved: &Saved) -> Vm {
    Options::named(name).restored(images(), saved).unwrap()
}
