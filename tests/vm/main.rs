//! What only real VMs prove. `make vm-test` runs it; it needs the built programs and package, which
//! `GUESTLET_BIN_DIR` and `GUESTLET_DEB` name.
//!
//! Each file owns one subject: [`qga`] the channel on virtio-serial, [`sessions`] the host half and its
//! sessions (both with fast guests), [`service`] the installed package under systemd (with real guests).
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../harness/mod.rs"]
mod harness;

mod qga;
mod service;
mod sessions;

use std::sync::LazyLock;

use harness::images::Images;
use harness::snapshot::Saved;
use harness::tools;
use harness::vm::{FAST_READY, Options, Vm};

fn images() -> &'static Images {
    static IMAGES: LazyLock<Images> = LazyLock::new(|| Images::prepare().unwrap());
    &IMAGES
}

/// A fast guest that is up, with an agent in it.
fn fast(name: &str) -> Vm {
    let vm = starting(name);
    vm.wait_booted(FAST_READY, 1).unwrap();
    vm
}

/// A fast guest that is booting.
fn starting(name: &str) -> Vm {
    Options::named(name).fast(images(), &tools::program("guestlet").unwrap()).unwrap()
}

/// A real guest with the package installed and its agent running.
fn real(name: &str) -> Vm {
    static INSTALLED: LazyLock<Saved> =
        LazyLock::new(|| Saved::installed(images(), &tools::package().unwrap()).unwrap());
    Options::named(name).restored(images(), &INSTALLED).unwrap()
}
