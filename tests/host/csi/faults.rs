//! What goes wrong: guests that keep or do not answer, VMs that come and go, connections and programs that end.

use std::time::Duration;

use tonic::Code;

use super::{Asking, Machines, USUAL, refused, serial, started};
use crate::hypervisor::{Manner, Moment};
use crate::lab::DEADLINE;

const MIB: i64 = 1 << 20;

fn published() -> (Machines, Asking, String) {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    a.publish(&id, "a").unwrap();
    (vms, a, id)
}

#[test]
fn a_volume_that_is_in_use_stays() {
    let (vms, a, id) = published();
    let holder = "the disk sdb is in use: staged for kubelet at /var/lib/kubelet/x".to_owned();
    vms.guest("a").disks().refusal = Some((Code::FailedPrecondition, holder.clone()));
    refused(a.unpublish(&id, "a"), Code::FailedPrecondition, &holder);
    assert_eq!((vms.qemu("a").devices().len(), a.all()[0].1.len()), (1, 1));
    vms.guest("a").disks().refusal = None;
    a.unpublish(&id, "a").unwrap();
    assert!(vms.qemu("a").devices().is_empty());
}

#[test]
fn a_paused_guest_keeps_its_volume_and_nobody_waits_for_it() {
    let (vms, a, id) = published();
    vms.qemu("a").event("STOP");
    vms.lab.until_vm("a", |vm| vm["power"] == "paused");
    // Asked by another VM of the cluster; its own could not.
    let b = vms.of("b");
    let begun = std::time::Instant::now();
    refused(b.unpublish(&id, "a"), Code::FailedPrecondition, "the VM is paused");
    assert!(begun.elapsed() < Duration::from_secs(8), "it waited for a session: {:?}", begun.elapsed());
    assert_eq!((vms.qemu("a").devices().len(), b.all()[0].1.len()), (1, 1));
    assert!(vms.guest("a").disks().asked.iter().all(|asked| !asked.starts_with("release")));
    vms.qemu("a").event("RESUME");
    vms.lab.until_vm("a", |vm| vm["power"] == "running");
    a.unpublish(&id, "a").unwrap();
    assert!(vms.qemu("a").devices().is_empty());
}

#[test]
fn a_guest_that_cannot_answer_loses_a_volume_that_is_taken_away() {
    let (vms, a, id) = published();
    vms.guest("a").disks().refusal = Some((Code::Unimplemented, "no such call".to_owned()));
    a.unpublish(&id, "a").unwrap();
    assert!(vms.qemu("a").devices().is_empty());
    assert_eq!(a.all(), [(id, vec![])]);
}

/// What QEMU has asked a guest's kernel to let go of vanishes at any time, whatever the agent says of it since.
#[test]
fn a_volume_that_a_guest_was_asked_to_let_go_of_is_not_published_to_it() {
    let (mut vms, a, id) = published();
    vms.qemu("a").guest_is(Manner::Slow);
    vms.qemu("a").commands();
    std::thread::scope(|scope| {
        scope.spawn(|| a.unpublish(&id, "a"));
        vms.lab.until("QEMU is asked", || vms.qemu("a").commands().contains(&"device_del".to_owned()));
        vms.lab.kill();
    });
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["power"] == "running" && vm["callback"] == "open");
    let a = vms.of("a");
    let holder = "the disk sdb is in use: staged for kubelet at /var/lib/kubelet/x".to_owned();
    vms.guest("a").disks().refusal = Some((Code::FailedPrecondition, holder.clone()));
    refused(a.unpublish(&id, "a"), Code::FailedPrecondition, &holder);
    refused(a.publish(&id, "a").map(drop), Code::Aborted, "is being unplugged from this node");
    vms.qemu("a").let_go();
    vms.guest("a").disks().refusal = None;
    a.unpublish(&id, "a").unwrap();
    a.publish(&id, "a").unwrap();
    assert_eq!(vms.qemu("a").devices().len(), 1);
}

#[test]
fn a_guest_that_lets_go_late_has_the_volume_until_then() {
    let (vms, a, id) = published();
    vms.qemu("a").guest_is(Manner::Stubborn);
    refused(a.unpublish(&id, "a"), Code::FailedPrecondition, "the guest refuses to release");
    assert_eq!(a.all()[0].1, ["a"]);
    vms.qemu("a").guest_is(Manner::Slow);
    vms.qemu("a").commands();
    std::thread::scope(|scope| {
        let unpublishing = scope.spawn(|| a.unpublish(&id, "a"));
        vms.lab.until("QEMU is asked", || vms.qemu("a").commands().contains(&"device_del".to_owned()));
        // Whoever comes meanwhile is told so.
        for outcome in
            [a.unpublish(&id, "a"), a.publish(&id, "a").map(drop), a.delete(&id), a.expand(&id, 1).map(drop)]
        {
            refused(outcome, Code::Aborted, "another operation on this volume is under way");
        }
        vms.qemu("a").let_go();
        unpublishing.join().unwrap().unwrap();
    });
    assert_eq!(a.all()[0].1, [""; 0]);
}

#[test]
fn a_vm_that_comes_back_without_its_volumes_gets_them_again() {
    let (mut vms, _, id) = published();
    let before = vms.qemu("a").devices();
    vms.end("a");
    assert_eq!(vms.of("b").all(), [(id.clone(), vec!["a".to_owned()])]);
    vms.boot("a", 1);
    vms.lab.until("it is plugged again", || vms.qemu("a").devices() == before);
    // Somebody else has taken it away.
    let detach = ["disk", "detach", "a", "--serial", serial(&id)];
    vms.lab.until("nobody is at it", || vms.lab.ctl(&detach).status.success());
    vms.lab.kill();
    vms.lab.again();
    vms.lab.until("it is plugged again", || vms.qemu("a").devices() == before);
}

#[test]
fn what_was_begun_goes_on_when_the_caller_has_gone() {
    let (vms, a, id) = published();
    vms.qemu("a").guest_is(Manner::Slow);
    let mut client = a.client();
    let request = guestlet::wire::proto::csi::ControllerUnpublishVolumeRequest {
        volume_id: id.clone(),
        node_id: "a".into(),
        ..Default::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let given_up = runtime.block_on(async {
        let call = client.controller_unpublish_volume(request);
        tokio::time::timeout(Duration::from_millis(500), call).await
    });
    assert!(given_up.is_err());
    assert_eq!(a.all()[0].1, ["a"]);
    vms.qemu("a").let_go();
    vms.lab.until("it is taken away", || a.all()[0].1.is_empty());
    assert!(vms.qemu("a").devices().is_empty());
}

/// Lets the connection to QEMU break at each command in turn, until one run needs fewer.
fn broken_everywhere(vms: &Machines, moment: Moment, work: impl Fn() -> bool, undo: impl Fn()) {
    for at in 0.. {
        assert!(at < 100, "it never ends");
        vms.lab.until_vm("a", |vm| vm["power"] == "running" && vm["session"] == "connected");
        vms.qemu("a").break_at(at, moment);
        let done = work();
        let whole = !vms.qemu("a").has_broken();
        if whole {
            assert!(done && at > 5, "{moment:?} {at}");
            return;
        }
        vms.lab.until("it can be repeated", &work);
        undo();
    }
}

#[test]
fn what_breaks_anywhere_is_repeated() {
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    for moment in [Moment::Before, Moment::After] {
        let publish = || vms.of("a").publish(&id, "a").is_ok();
        let unpublish = || vms.of("a").unpublish(&id, "a").is_ok();
        broken_everywhere(&vms, moment, publish, || {
            assert_eq!((vms.qemu("a").devices().len(), vms.qemu("a").nodes().len()), (1, 1), "{moment:?}");
            vms.lab.until("it can be undone", unpublish);
        });
        broken_everywhere(&vms, moment, unpublish, || {
            vms.lab.until("nothing is left", || {
                vms.qemu("a").devices().is_empty() && vms.qemu("a").nodes().is_empty()
            });
            vms.lab.until("it can be undone", publish);
        });
        assert_eq!(vms.of("a").all(), [(id.clone(), vec![])]);
    }
}

#[test]
fn a_daemon_that_is_killed_at_any_command_is_no_harm() {
    let mut vms = started(&USUAL, "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    for moment in [Moment::Before, Moment::After] {
        for command in ["blockdev-add", "device_add", "device_del", "blockdev-del"] {
            let adds = command.ends_with("add");
            if !adds {
                vms.lab.until("it is plugged", || vms.of("a").publish(&id, "a").is_ok());
            }
            let (there, go) = vms.qemu("a").stop_at(command, moment);
            let asking = vms.of("a");
            std::thread::scope(|scope| {
                let call = scope.spawn(|| {
                    if adds { asking.publish(&id, "a").map(drop) } else { asking.unpublish(&id, "a") }
                });
                there.recv_timeout(DEADLINE).unwrap();
                vms.lab.kill();
                go.send(()).unwrap();
                call.join().unwrap().unwrap_err();
            });
            vms.lab.again();
            vms.lab.until_vm("a", |vm| vm["power"] == "running" && vm["callback"] == "open");
            vms.lab.until("it can be taken away", || vms.of("a").unpublish(&id, "a").is_ok());
            assert_eq!(
                (vms.qemu("a").devices().len(), vms.qemu("a").nodes().len()),
                (0, 0),
                "{command} {moment:?}"
            );
            assert_eq!(vms.of("a").all(), [(id.clone(), vec![])]);
        }
    }
}

#[test]
fn a_volume_outlives_the_daemon_and_what_is_not_one_does_not() {
    let mut vms = started(&USUAL, "");
    let a = vms.of("a");
    let made = a.create("v", 20 * MIB).unwrap();
    a.publish(&made.volume_id, "a").unwrap();
    let record = std::fs::read_to_string(vms.file("fast", &made.volume_id, "json")).unwrap();
    vms.lab.kill();
    // What a run leaves that is killed while it makes a volume, and one that removes a volume.
    for (serial, stage) in [("aaaaaaaaaaaaaaaaaaaa", "making"), ("bbbbbbbbbbbbbbbbbbbb", "removing")] {
        let record = record
            .replace(super::serial(&made.volume_id), serial)
            .replace("\"ready\"", &format!("{stage:?}"));
        std::fs::write(vms.lab.path(&format!("pools/fast/{serial}.json")), record).unwrap();
        std::fs::write(vms.lab.path(&format!("pools/fast/{serial}.raw")), "x").unwrap();
    }
    std::fs::write(vms.lab.path("pools/fast/cccccccccccccccccccc.json.new"), "{").unwrap();
    std::fs::write(vms.lab.path("pools/fast/dddddddddddddddddddd.json"), "{").unwrap();
    std::fs::write(vms.lab.path("pools/fast/notes.txt"), "of somebody else").unwrap();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    vms.lab.until("it is there", || vms.of("a").create("v", 20 * MIB).is_ok_and(|again| again == made));
    let a = vms.of("a");
    assert_eq!(a.all(), [(made.volume_id.clone(), vec!["a".to_owned()])]);
    let mut expected = vec!["dddddddddddddddddddd.json".to_owned(), "notes.txt".to_owned()];
    expected.extend(["json", "raw"].map(|ending| format!("{}.{ending}", serial(&made.volume_id))));
    expected.sort();
    assert_eq!(vms.files("fast"), expected);
    refused(a.delete("fast.dddddddddddddddddddd"), Code::Internal, "the volume is damaged");
    a.unpublish(&made.volume_id, "a").unwrap();
}
