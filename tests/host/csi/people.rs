//! What people see of volumes, and do to them: `guestctl volumes` and `guestctl watch`.

use guestlet::wire::proto::v1::event::Kind;
use guestlet::wire::proto::v1::{Disk, DiskAdded, FileSystemMounted, MountedFileSystem, SerialNumber};
use serde_json::{Value, json};
use tonic::Code;

use super::{Machines, USUAL, serial, started};
use crate::lab::{Watch, assert_fails, uuid};

const MIB: i64 = 1 << 20;

fn ask(vms: &Machines, arguments: &[&str]) -> Value {
    serde_json::from_str(&vms.lab.words(&[&["-o", "json", "volumes"], arguments].concat())).unwrap()
}

#[test]
fn people_look_after_volumes() {
    let vms = started(&USUAL, "[cluster.dev]\nmax-volumes = 1");
    let made = ask(&vms, &["create", "data", "--cluster", "dev", "--size", "20M"]);
    let id = made["id"].as_str().unwrap();
    let expected = json!({
        "id": id, "name": "data", "cluster": "dev", "class": "fast", "size": 20 * MIB, "claim": "", "problem": "",
        "serial": serial(id), "holder": null,
    });
    assert_eq!(made, expected);
    assert_eq!(ask(&vms, &["create", "data", "--cluster", "dev", "--size", "20M"]), made);
    let attached = ask(&vms, &["attach", id, "a"]);
    let holder = json!({
        "vm": "a", "uuid": uuid(1), "read_only": false, "leaving": false, "device": "", "mount_points": [], "pods": [],
    });
    assert_eq!(attached["holder"], holder);
    assert_eq!(ask(&vms, &["expand", id, "--size", "40M"])["size"], 40 * MIB);
    let refusal = "the disk sdb is in use: mounted at /srv";
    vms.guest("a").disks().refusal = Some((Code::FailedPrecondition, refusal.to_owned()));
    for (arguments, code, words) in [
        (
            vec!["create", "more", "--cluster", "dev", "--size", "1M"],
            1,
            "quota: the cluster dev has 1 volumes",
        ),
        (vec!["create", "data", "--cluster", "dev", "--size", "1G"], 1, "a volume of this name already"),
        (
            vec!["create", "x", "--cluster", "prod", "--size", "1M", "--class", "gold"],
            1,
            "it may use: fast, full, qcow",
        ),
        (vec!["create", "x", "--cluster", "prod", "--size", "0"], 2, "--size"),
        (vec!["attach", id, "c"], 1, "the node \"c\" is not on this host"),
        (vec!["attach", id, "b"], 1, "it can be on one at a time"),
        (vec!["attach", "none", "a"], 1, "there is no volume \"none\""),
        (vec!["detach", id], 1, refusal),
        (vec!["detach", "none"], 1, "there is no volume \"none\""),
        (vec!["rm", id], 1, "unpublish it first"),
        (vec!["expand", id, "--size", "100T"], 1, "no size of a volume is at least"),
    ] {
        assert_fails(&vms.lab.ctl(&[&["volumes"], &arguments[..]].concat()), code, words);
    }
    assert_eq!(ask(&vms, &["detach", id, "--force"])["holder"], Value::Null);
    assert_eq!(vms.lab.words(&["volumes", "rm", id]), format!("{id}: removed\n"));
    assert_eq!(ask(&vms, &["ls"]), json!([]));
}

#[test]
fn a_list_says_which_vm_and_pod_has_each() {
    let vms = started(&USUAL, "");
    let mut request = super::wanted("pvc-1", 20 * MIB);
    for (key, value) in [("pvc/name", "data\u{202e}"), ("pvc/namespace", "shop"), ("pv/name", "pvc-1")] {
        request.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    let id = vms.of("a").create_volume(request).unwrap().volume.unwrap().volume_id;
    let other = vms.of("c").create("pvc-2", 10 * MIB).unwrap().volume_id;
    vms.of("a").publish(&id, "a").unwrap();
    let serials = vec![SerialNumber { value: serial(&id).to_owned(), source: "scsi".into() }];
    let disk = Disk { name: "sdb".into(), file: "/dev/sdb".into(), serials, ..Disk::default() };
    vms.guest("a").happen(Kind::DiskAdded(DiskAdded { disk: Some(disk) }));
    let mount_point = "/var/lib/kubelet/pods/0a1b/volumes/kubernetes.io~csi/pvc-1/mount";
    let file_system = MountedFileSystem {
        mount_point: mount_point.into(),
        source: "/dev/sdb".into(),
        r#type: "ext4".into(),
    };
    let mounted = FileSystemMounted { file_system: Some(file_system) };
    vms.guest("a").happen(Kind::FileSystemMounted(mounted));
    let find = |id: &str| {
        let list = ask(&vms, &["ls"]);
        list.as_array().unwrap().iter().find(|one| one["id"] == id).unwrap().clone()
    };
    vms.lab.until("the guest has told", || find(&id)["holder"]["pods"] == json!(["0a1b"]));
    let volume = find(&id);
    assert_eq!(volume["claim"], "shop/data\u{fffd}");
    assert_eq!(
        [&volume["holder"]["device"], &volume["holder"]["mount_points"]],
        [&json!("sdb"), &json!([mount_point])]
    );
    let words = vms.lab.words(&["volumes", "ls", "--cluster", "dev"]);
    let lines: Vec<Vec<_>> = words.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["ID", "CLUSTER", "SIZE", "VM", "DEVICE", "POD", "NAME", "CLAIM"]);
    assert_eq!(lines[1], [&id, "dev", "20M", "a", "sdb", "0a1b", "pvc-1", "shop/data\u{fffd}"]);
    assert_eq!(lines.len(), 2);
    assert!(vms.lab.words(&["-o", "wide", "volumes", "ls"]).contains(mount_point));
    assert_eq!(find(&other)["holder"], Value::Null);
}

#[test]
fn what_happens_to_volumes_is_told() {
    let mut vms = started(&USUAL, "");
    let watch = Watch::start(&vms.lab, &["-o", "json"]);
    let a = vms.of("a");
    let id = a.create("pvc-1", 20 * MIB).unwrap().volume_id;
    let created = watch.event("a", "volume-created");
    assert_eq!([&created["volume"], &created["volume_name"], &created["by"]], [&id, "pvc-1", "a"]);
    assert_eq!([&created["cluster"], &created["class"]], ["dev", "fast"]);
    a.publish(&id, "b").unwrap();
    a.publish(&id, "b").unwrap();
    assert_eq!(watch.event("b", "volume-attached")["by"], "a");
    a.expand(&id, 30 * MIB).unwrap();
    assert_eq!(watch.event("b", "volume-expanded")["size"], 30 * MIB);
    vms.end("b");
    vms.boot("b", 2);
    assert_eq!(watch.event("b", "volume-reattached")["by"], "host");
    a.unpublish(&id, "b").unwrap();
    assert_eq!(watch.event("b", "volume-detached")["volume"], id);
    vms.lab.words(&["volumes", "rm", &id]);
    assert_eq!(watch.event("", "volume-removed")["by"], "host");
    let words = vms.lab.words(&["volumes", "create", "x", "--cluster", "dev", "--size", "20M"]);
    assert!(words.contains("fast."));
    let lines = Watch::quiet(&vms.lab, &["--since", "1h", "--kind", "volume-attached"]);
    let line = lines.until(|line| line.contains("volume attached"));
    assert!(
        line.ends_with(&format!("b  volume attached: {id} (pvc-1, 20 MiB, cluster dev), by a")),
        "{line}"
    );
}
