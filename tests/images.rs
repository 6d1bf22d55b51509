//! Builds and caches what the VM tests and the demo boot, and shows how long it takes: `make images`.
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod harness;

use harness::images::Images;
use harness::snapshot::Saved;
use harness::tools;

fn main() -> anyhow::Result<()> {
    let images = Images::prepare()?;
    println!("  VMs run with {}", images.accelerator);
    images.initrd_with_agent(&tools::program("guestlet")?)?;
    let installed = Saved::installed(&images, &tools::package()?)?;
    println!("  real guest: {}", installed.disk.display());
    Ok(())
}
