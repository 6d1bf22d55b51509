//! Where volumes are: on which host and in which pool, and what becomes of them where that cannot be told.

use std::process::Stdio;
use std::time::{Duration, Instant};

use guestlet::wire::proto::csi;
use serde_json::Value;
use tonic::Code;

use super::mirror::Mirror;
use super::{Asking, USUAL, refused, serial, started, wanted};
use crate::metrics;
use crate::namespace::is_outside;

const MIB: i64 = 1 << 20;

/// Nothing that a cluster asks of this volume is a success.
fn never_a_success(asking: &Asking, id: &str, code: Code, words: &str) {
    refused(asking.delete(id), code, words);
    refused(asking.unpublish(id, "a"), code, words);
    refused(asking.publish(id, "a"), code, words);
    refused(asking.expand(id, MIB), code, words);
    let request = csi::ControllerGetVolumeRequest { volume_id: id.into() };
    refused(asking.controller_get_volume(request), code, words);
}

#[test]
fn a_volume_of_another_host_is_never_said_to_be_gone() {
    let (here, there) = (started(&USUAL[..1], ""), started(&USUAL[..1], ""));
    let (a, other) = (here.of("a"), there.of("a"));
    let id = other.create("v", 20 * MIB).unwrap().volume_id;
    other.publish(&id, "a").unwrap();
    let uuid = id.split('.').nth(1).unwrap();
    let marker = std::fs::read(there.lab.path("pools/fast/.pool")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&marker).unwrap()["uuid"], uuid);

    let words = format!("the volume {id} belongs to the pool fast ({uuid}), which is not on the host");
    never_a_success(&a, &id, Code::Unavailable, &words);
    refused(a.delete(&id), Code::Unavailable, "ask the host that has this pool");
    // One from before identifiers said so.
    let old = format!("fast.{}", serial(&id));
    never_a_success(&a, &old, Code::Unavailable, "does not show which host");
    let words = here.lab.ctl(&["volumes", "rm", &id]);
    assert!(!words.status.success());

    assert_eq!(other.all(), [(id.clone(), vec!["a".to_owned()])]);
    assert_eq!((there.qemu("a").devices().len(), there.files("fast").len()), (1, 2));
    other.unpublish(&id, "a").unwrap();
    other.delete(&id).unwrap();
    // It was here, so it is gone.
    other.delete(&id).unwrap();
}

#[test]
fn a_volume_is_where_the_cluster_is_told_that_it_is() {
    let vms = started(&USUAL[..1], "[topology]\nhost = 'another-name'");
    let a = vms.of("a");
    // What the agent tells kubelet, as soon as it has been told.
    let here = "another-name".to_owned();
    let place = |host: &str| csi::Topology { segments: [("guestlet.io/host".into(), host.into())].into() };
    let create = |name: &str, requisite: &[&str], preferred: &[&str]| {
        let of = |hosts: &[&str]| hosts.iter().map(|host| place(host)).collect();
        let requirement = csi::TopologyRequirement { requisite: of(requisite), preferred: of(preferred) };
        let request = csi::CreateVolumeRequest {
            accessibility_requirements: Some(requirement),
            ..wanted(name, 20 * MIB)
        };
        a.create_volume(request).map(|answer| answer.volume.unwrap())
    };
    let exhausted = Code::ResourceExhausted;
    refused(create("v", &["two"], &[]), exhausted, "WaitForFirstConsumer");
    refused(create("v", &["two", "three"], &["two"]), exhausted, "requested on other hosts");
    refused(create("v", &[], &["two"]), exhausted, &format!("on guestlet.io/host={here} only"));
    assert_eq!((a.all(), vms.files("fast")), (vec![], vec![]));

    let made = create("v", &["two", &here], &["two"]).unwrap();
    assert_eq!(made.accessible_topology, [place(&here)]);
    assert_eq!(create("v", &[], &[&here]).unwrap(), made, "again, it is the same one");
    // A cluster that says nothing of places is told of none.
    assert_eq!(a.create("w", 20 * MIB).unwrap().accessible_topology, []);

    let room = |accessible_topology: Option<csi::Topology>| {
        let request = csi::GetCapacityRequest { accessible_topology, ..Default::default() };
        a.get_capacity(request).unwrap().available_capacity
    };
    assert!(room(None) > 0 && room(Some(place(&here))) > 0);
    assert_eq!(room(Some(place("two"))), 0);
    // Issue 17: so external-provisioner asks where the driver knows no places.
    assert!(room(Some(csi::Topology::default())) > 0);
}

#[test]
fn volumes_from_before_pools_had_uuids_stay_what_they_are() {
    let mut vms = started(&USUAL, "");
    let made = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.lab.kill();
    let old = format!("fast.{}", serial(&made));
    let file = vms.file("fast", &made, "json");
    let record = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, record.replace(&made, &old)).unwrap();
    std::fs::remove_file(vms.lab.path("pools/fast/.pool")).unwrap();
    std::fs::remove_file(vms.lab.path("trust/pools.json")).unwrap();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = vms.of("a");
    assert_eq!(a.create("v", 20 * MIB).unwrap().volume_id, old);
    a.publish(&old, "a").unwrap();
    a.expand(&old, 30 * MIB).unwrap();
    refused(a.delete(&old), Code::FailedPrecondition, "is published to the node");
    a.unpublish(&old, "a").unwrap();
    a.delete(&old).unwrap();
    // Asked again, by a sidecar that was not told: it was removed here, which is known after a restart, too.
    a.delete(&old).unwrap();
    vms.lab.kill();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    vms.of("a").delete(&old).unwrap();
    assert_eq!(vms.files("fast"), [""; 0]);
}

#[test]
fn a_volume_that_a_newer_program_keeps_is_not_made_again() {
    let mut vms = started(&USUAL, "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.lab.kill();
    let file = vms.file("fast", &id, "json");
    let record = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, record.replace("\"version\": 1", "\"version\": 2, \"readers\": 2, \"more\": {}"))
        .unwrap();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = vms.of("a");
    refused(a.create("v", 20 * MIB), Code::Internal, "the volume is damaged");
    never_a_success(&a, &id, Code::Internal, "the volume is damaged");
    assert_eq!(vms.files("fast").len(), 2);
    let listed: Vec<Value> = serde_json::from_str::<Value>(&vms.lab.words(&["-o", "json", "volumes", "ls"]))
        .map(|found| found.as_array().cloned().unwrap_or_else(|| vec![found]))
        .unwrap();
    let text = Value::from(listed).to_string();
    assert!(text.contains(&id) && text.contains("that support version 2"), "{text}");
    // The upgrade brings it back.
    std::fs::write(&file, record).unwrap();
    vms.lab.until("it can be used", || a.create("v", 20 * MIB).is_ok_and(|found| found.volume_id == id));
    a.delete(&id).unwrap();
}

#[test]
fn a_volume_whose_record_is_lost_is_not_gone() {
    let mut vms = started(&USUAL, "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.of("a").publish(&id, "a").unwrap();
    vms.lab.kill();
    let file = vms.file("fast", &id, "json");
    let record = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = vms.of("a");
    let told = vms.lab.ctl(&["volumes", "rm", &id]);
    let words = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(!told.status.success() && words.contains("restore the record from a copy"), "{words}");
    assert!(vms.lab.words(&["-o", "json", "volumes", "ls"]).contains(&id));
    refused(a.create("v", 20 * MIB), Code::Unavailable, "cannot be used now");
    assert!(vms.file("fast", &id, "raw").exists());
    assert_eq!(vms.qemu("a").devices().len(), 1, "it is left alone");
    std::fs::write(&file, record).unwrap();
    vms.lab.until("it can be used", || a.create("v", 20 * MIB).is_ok_and(|found| found.volume_id == id));
    a.unpublish(&id, "a").unwrap();
    a.delete(&id).unwrap();
}

#[test]
fn a_pool_that_is_not_mounted_at_the_start_is_no_new_one() {
    let mut vms = started(&USUAL, "");
    let id = vms.of("a").create("v", 20 * MIB).unwrap().volume_id;
    vms.lab.kill();
    let (path, elsewhere) = (vms.lab.path("pools/fast"), vms.lab.path("elsewhere"));
    std::fs::rename(&path, &elsewhere).unwrap();
    std::fs::create_dir(&path).unwrap();
    vms.lab.again();
    vms.lab.until_vm("a", |vm| vm["callback"] == "open");
    let a = vms.of("a");
    refused(a.create("v", 20 * MIB), Code::Unavailable, "cannot be used now");
    never_a_success(&a, &id, Code::Unavailable, "cannot be used now");
    let told = vms.lab.ctl(&["volumes", "create", "v", "--cluster", "dev", "--size", "20M"]);
    let words = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(!told.status.success() && words.contains("mount its file system there"), "{words}");
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "nothing is made under the mount point");
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&elsewhere, &path).unwrap();
    vms.lab.until("it is mounted", || a.create("v", 20 * MIB).is_ok_and(|found| found.volume_id == id));
    a.delete(&id).unwrap();
}

#[test]
fn a_pool_that_hangs_stops_no_other_one() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // What waits for this one can be killed: otherwise no program could end.
    let (mirror, pool) = Mirror::below(folder.path());
    mirror.hang(true);
    let hung = format!("[[pool]]\nname = 'hung'\npath = '{}/pool'\n", pool.display());
    let mut vms = started(&USUAL, &hung);
    let (a, b) = (vms.of("a"), vms.of("b"));
    // The first call waits for a moment.
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    std::thread::scope(|scope| {
        for number in 0..20 {
            let asking = b.clone();
            scope.spawn(move || {
                asking.create_in(&format!("hung-{number}"), 20 * MIB, Some("hung")).unwrap_err()
            });
        }
        let began = Instant::now();
        a.publish(&id, "a").unwrap();
        assert_eq!(a.all(), [(id.clone(), vec!["a".to_owned()])]);
        a.expand(&id, 30 * MIB).unwrap();
        a.unpublish(&id, "a").unwrap();
        a.delete(&id).unwrap();
        a.delete(&id).unwrap();
        a.create("w", 20 * MIB).unwrap();
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    });
    let began = Instant::now();
    refused(b.create_in("x", 20 * MIB, Some("hung")), Code::Unavailable, "cannot be used now");
    assert!(began.elapsed() < Duration::from_secs(15), "nobody waits for it any more");
    let words =
        vms.lab.ctl(&["volumes", "create", "x", "--cluster", "dev", "--size", "20M", "--class", "hung"]);
    let words = String::from_utf8(words.stderr).unwrap();
    assert!(words.contains("the pool hung (") && words.contains("has not answered for"), "{words}");
    // Nor the end of the program.
    assert!(vms.lab.stop().success());
}

#[test]
fn files_of_disks_that_hang_stop_no_volumes() {
    if is_outside() {
        return;
    }
    let vms = started(&USUAL, "");
    let a = vms.of("a");
    let id = a.create("v", 20 * MIB).unwrap().volume_id;
    let folder = tempfile::tempdir().unwrap();
    let (mirror, shown) = Mirror::below(folder.path());
    let file = shown.join("x.raw");
    std::fs::File::create(folder.path().join("kept/x.raw")).unwrap().set_len(1 << 20).unwrap();
    mirror.hang(true);
    let (kept, volumes) = (vms.lab.path("kept"), vms.lab.path("volumes"));
    std::fs::create_dir(&kept).unwrap();
    std::fs::create_dir(&volumes).unwrap();
    let in_volumes = Mirror::mount(&kept, &volumes);
    in_volumes.hang(true);
    let begin = |arguments: &[&str]| {
        vms.lab.ctl_command(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let attach = ["disk", "attach", "a", "--file", file.to_str().unwrap(), "--serial", "x"];
    let (before, attaching) = (vms.lab.threads(), begin(&attach));
    std::thread::sleep(Duration::from_secs(1));

    // Into the same VM, which once waited for ever.
    a.publish(&id, "a").unwrap();
    let listing: Vec<_> = (0..40).map(|_| begin(&["disk", "volumes"])).collect();
    for asked in listing {
        let told = asked.wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(!told.status.success() && words.contains("(volumes-dir) cannot be used"), "{words}");
    }
    assert!(vms.lab.threads() < before + 10, "{} {before}", vms.lab.threads());
    let told = attaching.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(words.contains("x.raw cannot be examined: its file system has not answered for"), "{words}");
    a.unpublish(&id, "a").unwrap();
    // What waited has given its place back.
    mirror.hang(false);
    in_volumes.hang(false);
    vms.lab.until("it can be attached", || vms.lab.ctl(&attach).status.success());
    vms.lab.until("volumes can be listed", || vms.lab.ctl(&["disk", "volumes"]).status.success());
}

#[test]
fn metrics_are_told_while_a_pool_hangs_and_say_which() {
    if is_outside() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mirror, pool) = Mirror::below(folder.path());
    mirror.hang(true);
    let hung = format!("[[pool]]\nname = 'hung'\npath = '{}/pool'\nanswer-seconds = 1", pool.display());
    let vms = started(&USUAL[..1], &hung);
    refused(vms.of("a").create_in("v", MIB, Some("hung")), Code::Unavailable, "cannot be used now");
    // Pools are looked at beside the calls.
    let told = |line: &str| metrics::ask(&vms.lab, "GET /metrics HTTP/1.1").contains(&format!("\n{line}"));
    vms.lab.until("it is told that the others can be used", || {
        told("guestlet_host_pool_usable{class=\"fast\"} 1")
    });
    assert!(told("guestlet_host_pool_bytes{class=\"fast\",kind=\"free\"} "));
    assert!(told("guestlet_host_pool_usable{class=\"hung\"} 0"));
    assert!(!told("guestlet_host_pool_bytes{class=\"hung\""));
}
