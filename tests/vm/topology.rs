//! Where a real guest runs: an edit of its host's zone, and the way to another host.

use std::time::Instant;

use serde_json::Value;

use crate::harness::host::{HostHalf, Listed};
use crate::harness::vm::SOON;
use crate::real;

#[test]
fn a_guest_that_comes_to_another_host_knows_where_it_runs() {
    let mut vm = real("wanderer");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("wanderer", SOON).unwrap();
    host.place("a").unwrap();
    host.wait_placed("wanderer", "a", SOON).unwrap();
    let session = host.info("wanderer").unwrap()["sessions"].clone();
    host.place("b").unwrap();
    let took = host.wait_placed("wanderer", "b", SOON).unwrap();
    println!("an edit of the zone is acknowledged after {took:?}");
    assert_eq!(host.info("wanderer").unwrap()["sessions"], session, "the session is the same");

    // As a live migration does: the vsock device is another one, and so is the host half.
    vm.unplug_vsock().unwrap();
    drop(host);
    let other = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    other.place("c").unwrap();
    vm.replug_vsock().unwrap();
    other.wait_connected("wanderer", SOON).unwrap();
    let connected = Instant::now();
    other.wait_placed("wanderer", "c", SOON).unwrap();
    println!("the zone of the other host is acknowledged {:?} after the reconnect", connected.elapsed());
    let told: Value = serde_json::from_str(&vm.run("cat /run/guestlet/topology.json").unwrap()).unwrap();
    assert_eq!((&told["version"], &told["zone"], &told["region"]), (&1.into(), &"c".into(), &"eu".into()));
}
