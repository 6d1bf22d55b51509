//! A repair that takes long, in a guest with systemd: it outlives the agent, and none is begun beside it.

use serde_json::json;

use crate::csi::{MIB, checksum, pace};
use crate::disk_calls::find;
use crate::harness::csi::{Csi, target};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::real;

/// The e2fsck that runs, if there is exactly one.
fn checker(vm: &Vm) -> Option<String> {
    let processes = vm.run("pidof e2fsck").ok()?;
    let mut processes = processes.split_whitespace();
    processes.next().filter(|_| processes.next().is_none()).map(str::to_owned)
}

fn agent(vm: &Vm) -> String {
    vm.run("systemctl show --value --property MainPID guestlet.service").unwrap().trim().to_owned()
}

#[test]
fn a_repair_outlives_the_agent_and_is_the_only_one() {
    let vm = real("repair");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("repair", SOON).unwrap();
    let node = Csi::of(&vm).unwrap();
    node.register().unwrap();
    let id = node.create("pvc-1", 256 * MIB).unwrap();
    node.use_volume(&id, vm.uuid()).unwrap();
    let place = target(&id);
    vm.run(&format!("mkdir {place}/many && cd {place}/many && seq 2000 | xargs touch")).unwrap();
    vm.run(&format!("head -c 8M /dev/urandom > {place}/data; sync")).unwrap();
    let sum = checksum(&vm, &id);
    node.unpublish(&id).unwrap();
    node.unstage(&id).unwrap();

    // As the kernel leaves it when it has found a fault.
    let disk = find(&vm, id.rsplit('.').next().unwrap(), 60_000).unwrap();
    vm.run(&format!(
        "debugfs -w -R 'ssv state 2' /dev/{0} && sync && udevadm settle && blockdev --flushbufs /dev/{0}",
        disk.name
    ))
    .unwrap();
    let context = node.attach(&id, vm.uuid()).unwrap();
    pace(&vm, &id, 64 << 10);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| node.stage(&id, context.clone()));
        let process = wait_for("e2fsck", SOON, || checker(&vm)).unwrap();
        pace(&vm, &id, 1);
        let group = vm.run(&format!("cat /proc/{process}/cgroup")).unwrap();
        assert!(group.contains(".scope") && !group.contains("guestlet.service"), "{group}");

        let before = agent(&vm);
        vm.run(&format!("kill -9 {before}")).unwrap();
        assert!(first.join().unwrap().is_err());
        let back = || vm.qga().ok()?.execute("guest-ping", json!({})).ok();
        wait_for("the next agent", SOON, back).unwrap();
        assert_ne!(agent(&vm), before);
        assert_eq!(checker(&vm).as_deref(), Some(process.as_str()));
        // kubelet asks again.
        for _ in 0..2 {
            let refused = node.stage(&id, context.clone()).unwrap_err();
            assert!(refused.message().contains("is still working on it"), "{refused:?}");
            assert_eq!(checker(&vm).as_deref(), Some(process.as_str()));
        }
    });
    pace(&vm, &id, 0);
    wait_for("the volume", SOON, || node.stage(&id, context.clone()).ok()).unwrap();
    node.publish(&id, context).unwrap();
    assert_eq!(checksum(&vm, &id), sum);
    let state = vm.run(&format!("dumpe2fs -h /dev/{} 2> /dev/null | grep state", disk.name)).unwrap();
    assert!(state.trim().ends_with(" clean"), "{state}");
}
