//! Volumes of a guest's cluster in real guests: what the sidecars and kubelet ask for, from the first call to the last,
//! while everything that may break does.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use guestlet::wire::proto::csi::GetPluginInfoRequest;
use nix::sys::signal::Signal;
use serde_json::json;
use tonic::{Code, Status};

use crate::harness::csi::{Csi, DRIVER, staging, target};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::launch::Options;
use crate::harness::snapshot::Saved;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::{tools, wait_for};
use crate::random::{Random, seed};
use crate::soak::steps;
use crate::{images, real};

pub const MIB: i64 = 1 << 20;

/// What a sidecar or kubelet does: again, as long as the answer says that it may help.
fn until_done<T>(what: &str, mut call: impl FnMut() -> Result<T, Status>) -> T {
    let begun = Instant::now();
    loop {
        match call() {
            Ok(done) => return done,
            Err(status) => {
                // A disk that has left, as one does that takes an address again at once, comes back; kubelet repeats a
                // publish whatever the answer is.
                let is_back_soon =
                    status.code() == Code::FailedPrecondition && status.message().ends_with(" was removed");
                let passes =
                    matches!(status.code(), Code::Unavailable | Code::Aborted | Code::DeadlineExceeded)
                        || is_back_soon;
                assert!(passes && begun.elapsed() < BOOT, "{what}: {status:?}");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

pub fn checksum(vm: &Vm, id: &str) -> String {
    vm.run(&format!("sha256sum < {}/data", target(id))).unwrap().trim().to_owned()
}

/// Has the disk of a volume do so many bytes in a second; 0 is no limit.
pub fn pace(vm: &Vm, id: &str, bytes: u32) {
    let serial = id.rsplit('.').next().unwrap();
    let disks = vm.qmp().execute("query-block", json!({})).unwrap();
    let mut disks = disks.as_array().unwrap().iter();
    let disk = disks.find(|disk| disk["inserted"].to_string().contains(serial)).unwrap();
    let limits = json!({
        "id": disk["qdev"], "bps": bytes, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
    });
    vm.qmp().execute("block_set_io_throttle", limits).unwrap();
}

#[test]
fn a_claim_becomes_a_disk_in_the_pod_and_goes_with_it() {
    // Guests that are restored have the same UUID: the second one boots.
    let disk = &Saved::installed(images(), &tools::package().unwrap()).unwrap().disk;
    let second = Options::named("node-2").without_cloud_init().real(images(), disk).unwrap();
    let first = real("node-1");
    let host = HostHalf::start(&[Listed::of(&first), Listed::of(&second)]).unwrap();
    for vm in [&first, &second] {
        host.wait_connected(vm.name(), BOOT).unwrap();
    }
    let (one, two) = (Csi::of(&first).unwrap(), Csi::of(&second).unwrap());
    let names = [one, two].map(|csi| csi.register().unwrap());
    assert_eq!(names, [first.uuid(), second.uuid()]);
    let info = one.identity(async |mut client| client.get_plugin_info(GetPluginInfoRequest {}).await);
    assert_eq!(info.unwrap().name, DRIVER);
    assert_eq!(one.probe().unwrap(), Some(true));

    let id = one.create("pvc-1", 64 * MIB).unwrap();
    assert_eq!(one.create("pvc-1", 64 * MIB).unwrap(), id);
    let took = one.use_volume(&id, &names[0]).unwrap();
    println!("attached; formatted and staged; published after {took:?}");
    let pods = format!("\"pods\":[\"{id}\"]");
    let told = || {
        let volumes = host.ctl(&["volumes", "ls", "-o", "json"]).unwrap();
        volumes.split_whitespace().collect::<String>().contains(&pods).then_some(())
    };
    wait_for("the pod in the list of volumes", SOON, told).unwrap();
    first.run(&format!("head -c 8M /dev/urandom > {}/data; sync", target(&id))).unwrap();
    let sum = checksum(&first, &id);

    // It grows under somebody who writes.
    let before = one.total(&id).unwrap();
    let write = format!("(while date >> {}/log; do sync; done) > /dev/null 2>&1 & echo $!", target(&id));
    let writer = first.run(&write).unwrap();
    one.expand(&id, 128 * MIB).unwrap();
    first.run(&format!("kill -0 {0} && kill {0}", writer.trim())).unwrap();
    assert!(one.total(&id).unwrap() > before * 3 / 2);

    // Nobody takes it away from a pod, or gives it to a second node.
    let held = one.detach(&id, &names[0]).unwrap_err();
    assert_eq!(held.code(), Code::FailedPrecondition);
    assert!(held.message().contains("kubelet"), "{held:?}");
    assert_eq!(one.attach(&id, &names[1]).unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(one.delete(&id).unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(checksum(&first, &id), sum);

    // The machine's reset button: the disk stays plugged, and kubelet begins anew.
    host.reset(&first).unwrap();
    assert_eq!(one.register().unwrap(), names[0]);
    let took = one.use_volume(&id, &names[0]).unwrap();
    println!("after a reset: attached; staged; published after {took:?}");
    assert_eq!(checksum(&first, &id), sum);

    // The pod moves to the other node.
    one.unpublish(&id).unwrap();
    one.unstage(&id).unwrap();
    one.detach(&id, &names[0]).unwrap();
    let took = two.use_volume(&id, &names[1]).unwrap();
    println!("on the other node: attached; staged; published after {took:?}");
    assert_eq!(checksum(&second, &id), sum);
    assert!(two.total(&id).unwrap() > before * 3 / 2);

    // Its disk stands still: that is told, and nobody is kept waiting for it.
    pace(&second, &id, 1);
    let told = wait_for("word of the disk", SOON, || two.problem(&id).unwrap()).unwrap();
    assert_eq!(told, "the volume has not answered for 5 s");
    assert_eq!(two.probe().unwrap(), Some(true));
    pace(&second, &id, 0);
    wait_for("answer of the disk", SOON, || two.problem(&id).unwrap().is_none().then_some(())).unwrap();
    // While its file system is frozen it stays as it is.
    let mut client = second.qga().unwrap();
    let frozen = json!({ "mountpoints": [staging(&id)] });
    assert_eq!(client.execute("guest-fsfreeze-freeze-list", frozen).unwrap(), 1);
    let refused = two.unpublish(&id).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("frozen"), "{refused:?}");
    assert_eq!(client.execute("guest-fsfreeze-thaw", json!({})).unwrap(), 1);
    assert_eq!(checksum(&second, &id), sum);
    two.unpublish(&id).unwrap();
    two.unstage(&id).unwrap();
    two.detach(&id, &names[1]).unwrap();
    assert_eq!(two.volumes().unwrap(), [id.as_str()]);
    two.delete(&id).unwrap();
    assert!(two.volumes().unwrap().is_empty());
    assert_eq!(host.pool_files().unwrap(), Vec::<String>::new());

    // Without a host half the sidecars are told so at once, and are to be moved.
    drop(host);
    wait_for("end of the channel", SOON, || (one.probe().unwrap() == Some(false)).then_some(())).unwrap();
    let refused = one.create("pvc-2", MIB).unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
}

/// One volume from its beginning to its end, with a check that it holds what was written on it.
fn life(node: Csi<'_>, name: &str, number: u64) {
    let uuid = node.vm().uuid();
    let say = |step: &str| format!("{name}: {step}");
    let id = until_done(&say("create"), || node.create(name, 16 * MIB));
    node.make_folders(&id).unwrap();
    let begin = || {
        let context = until_done(&say("attach"), || node.attach(&id, uuid));
        until_done(&say("stage"), || node.stage(&id, context.clone()));
        until_done(&say("publish"), || node.publish(&id, context.clone()));
    };
    let end = || {
        until_done(&say("unpublish"), || node.unpublish(&id));
        until_done(&say("unstage"), || node.unstage(&id));
        until_done(&say("detach"), || node.detach(&id, uuid));
    };
    begin();
    let words = format!("{name} {number}");
    node.vm().run(&format!("echo {words} > {}/data", target(&id))).unwrap();
    // A volume that was somewhere else meanwhile.
    if number.is_multiple_of(3) {
        end();
        begin();
    }
    let read = node.vm().run(&format!("cat {}/data", target(&id))).unwrap();
    assert_eq!(read.trim(), words);
    end();
    until_done(&say("delete"), || node.delete(&id));
}

#[test]
fn volumes_come_and_go_while_everything_is_killed() {
    const AT_ONCE: u64 = 4;
    let volumes = steps(16, 300);
    let vm = real("churn");
    let mut host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("churn", SOON).unwrap();
    let node = Csi::of(&vm).unwrap();
    // What its kernel says is not to stand between what programs print.
    vm.run("dmesg --console-off").unwrap();
    node.register().unwrap();
    let numbers = Mutex::new(0..volumes);
    let next = || numbers.lock().unwrap().next();
    std::thread::scope(|scope| {
        let work = || {
            while let Some(number) = next() {
                life(node, &format!("pvc-{number}"), number);
            }
        };
        let lives: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        let mut random = Random(seed());
        let mut kills = [0, 0];
        while lives.iter().any(|life| !life.is_finished()) {
            std::thread::sleep(Duration::from_millis(2000 + u64::from(random.below(4000))));
            if random.below(2) == 0 {
                kills[0] += 1;
                vm.run("systemctl kill --signal KILL guestlet.service").unwrap();
            } else {
                kills[1] += 1;
                host.kill().unwrap();
            }
        }
        println!("{volumes} volumes; agent killed {} times, host half {} times", kills[0], kills[1]);
    });
    host.wait_connected("churn", SOON).unwrap();
    wait_for("channel", SOON, || matches!(node.probe(), Ok(Some(true))).then_some(())).unwrap();
    assert_eq!(node.volumes().unwrap(), Vec::<String>::new());
    assert_eq!(host.pool_files().unwrap(), Vec::<String>::new());
    let mounts = vm.run("grep -c pvc- /proc/self/mountinfo || true").unwrap();
    assert_eq!(mounts.trim(), "0");

    // With QEMU killed under a volume that is in use.
    let id = node.create("pvc-last", 16 * MIB).unwrap();
    node.use_volume(&id, vm.uuid()).unwrap();
    vm.qemu().signal(Signal::SIGKILL).unwrap();
    host.wait("churn", "gone", SOON, |now| now["power"] == "off").unwrap();
    let list = || host.ctl(&["volumes", "ls", "-o", "json"]).unwrap();
    assert!(list().contains(&id));
    host.ctl(&["volumes", "detach", &id]).unwrap();
    host.ctl(&["volumes", "rm", &id]).unwrap();
    assert!(!list().contains(&id));
    assert_eq!(host.pool_files().unwrap(), Vec::<String>::new());
}
