//! What only real VMs prove.
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod harness;

use std::time::Instant;

use harness::images::Images;
use harness::snapshot::Saved;
use harness::vm::{FAST_READY, Options};

#[test]
fn self_test_of_the_harness() {
    let images = Images::prepare().unwrap();
    let started = Instant::now();
    let vm = Options::named("bare").bare(&images).unwrap();
    vm.wait_booted(FAST_READY, 1).unwrap();
    println!("fast {:?} {}", started.elapsed(), images.accelerator);
    println!("{}", vm.run("hostname; cat /sys/class/dmi/id/product_uuid; ls /dev/virtio-ports /dev/vsock; ls /sys/bus/virtio/devices").unwrap());
    vm.reset().unwrap();
    vm.wait_booted(FAST_READY, 2).unwrap();
    println!("reset {:?}", started.elapsed());
    println!("{}", vm.run("hostname").unwrap());
    drop(vm);
    let started = Instant::now();
    let saved = Saved::booted(&images).unwrap();
    println!("saved {:?}", started.elapsed());
    let started = Instant::now();
    let vm = Options::named("r").restored(&images, &saved).unwrap();
    println!("restored {:?}", started.elapsed());
    println!("{}", vm.run("hostname; date; ls -l /dev/vsock /dev/virtio-ports; cat /sys/class/dmi/id/product_uuid; free -m; systemctl is-system-running; systemctl --failed").unwrap());
    vm.run("(socat VSOCK-LISTEN:1234,fork EXEC:cat >/dev/null 2>&1 &) ; sleep 1").unwrap();
    println!("{:?}", vm.dial(1234));
    println!("{:?}", vm.dial(1235).map_err(|e| e.to_string()));
}
